"""The control socket of a generation: what its ranks are told, whenever they connect."""

from __future__ import annotations

import asyncio
from pathlib import Path

from contracts.ranks import CONTROL_LINE, HelloLine, PeerLostLine, json_line
from services.worker.ranks.control_socket import ControlSocket


async def test_every_rank_is_informed_of_a_lost_peer_once(tmp_path: Path) -> None:
    registered = asyncio.Semaphore(0)
    writers = []  # one that is dropped closes its connection
    async with ControlSocket(tmp_path / "agent.sock", 3, registered.release) as control:

        async def connect(rank: int) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_unix_connection(control.path)
            writers.append(writer)
            writer.write(json_line(HelloLine(rank=rank, pid=1, generation=3)))
            await registered.acquire()
            return reader

        first = await connect(0)
        control.send_peer_lost()
        control.send_peer_lost()
        late = await connect(1)
        for reader in (first, late):
            assert CONTROL_LINE.validate_json(await reader.readline()) == PeerLostLine()
    assert not await first.read()
    for writer in writers:
        writer.close()
