"""Ranks that wait at their rendezvous say for whom, and where."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

from services.kit.ports import free_ports
from trainbus.trainer.rendezvous import meet

Said = Queue[tuple[int, str, tuple[int, ...]]]


def come(said: Said, rank: int, port: int, said_after_s: float) -> Any:
    return meet(rank, 3, "127.0.0.1", port, lambda at, missing, _: said.put((rank, at, missing)), said_after_s)


def test_the_first_rank_says_who_has_not_come_and_the_others_that_it_does_not_answer() -> None:
    said: Said = Queue()
    [port] = free_ports(1)
    with ThreadPoolExecutor(3) as ranks:
        stores = [ranks.submit(come, said, 1, port, 0.2)]
        # Rank 0 is not there yet.
        assert said.get(timeout=60) == (1, f"127.0.0.1:{port}", (0,))
        stores.append(ranks.submit(come, said, 0, port, 0.2))
        rank, address, missing = said.get(timeout=60)
        assert (rank, address) == (0, f"127.0.0.1:{port}")
        assert 2 in missing
        stores.append(ranks.submit(come, said, 2, port, 60.0))
        assert all(store.result(60) is not None for store in stores)
    assert said.empty()


def test_ranks_that_all_come_say_nothing() -> None:
    said: Said = Queue()
    [port] = free_ports(1)
    with ThreadPoolExecutor(3) as ranks:
        stores = [ranks.submit(come, said, rank, port, 60.0) for rank in (2, 0, 1)]
        assert all(store.result(60) is not None for store in stores)
    assert said.empty()
