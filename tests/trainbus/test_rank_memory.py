"""Ranks that may use a third of their run's state build, train, save, restore and evaluate it, to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.rank_memory import Generation, GenerationFailed, Sizes, run_life, run_ranks
from tests.trainbus.support import linear_dataset

pytestmark = pytest.mark.shell

SIZES = Sizes()


def test_a_state_is_three_times_as_large_as_the_memory_of_a_rank(tmp_path: Path) -> None:
    limited = run_life(tmp_path / "limited", SIZES, limit_bytes=SIZES.limit_bytes)
    free = run_life(tmp_path / "free", SIZES, limit_bytes=None)
    assert limited.digests == free.digests
    assert limited.digests[0] != limited.digests[1]
    assert limited.metrics == free.metrics


def test_the_limit_holds_a_rank_that_builds_the_whole_model(tmp_path: Path) -> None:
    dataset = linear_dataset(tmp_path / "data", train=200, validation=0)
    generation = Generation(tmp_path / "run", dataset, SIZES, 1, strategy="ddp", limit_bytes=SIZES.limit_bytes)
    with pytest.raises(GenerationFailed, match=r"allocate memory|create a primitive"):
        run_ranks(generation)
    assert run_ranks(replace(generation, folder=tmp_path / "free", limit_bytes=None))
