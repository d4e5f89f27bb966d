"""Exact runs through the platform: broken off at random, they end with the bits of the run that was left alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.kit.concurrency import gather_limited
from tests.e2e.history import Case, Config, Theatre, draw
from tests.e2e.support import Stack

pytestmark = [pytest.mark.e2e]

HISTORIES = 20
#: A few that have everything in them; ``loadtest.histories`` goes through all. Short runs: each is broken off early.
CONFIGS = (
    Config("MLP", 4, "ddp", steps=50),
    Config("CNN", 7, "zero1", steps=50),
    Config("GPT", 4, "fsdp2", "bf16", steps=40),
    Config("MLP", 12, "zero1", steps=50),
)


def config(rng: random.Random) -> Config:
    return rng.choice(CONFIGS)


async def test_random_histories_end_with_the_same_bits(stack: Stack, tmp_path: Path) -> None:
    theatre = await Theatre.open(stack, tmp_path / "dataset")
    unlike: list[str] = []

    async def play(case: Case) -> None:
        _, difference = await theatre.play(case)
        if difference:
            unlike.append(f"{case}: {difference}")

    await gather_limited((play(draw(number, seed=1, config=config)) for number in range(HISTORIES)), limit=3)
    assert unlike == []


async def test_plain_ddp_and_other_arithmetic_are_found_out(stack: Stack, tmp_path: Path) -> None:
    theatre = await Theatre.open(stack, tmp_path / "dataset")
    found = await theatre.negative_controls(CONFIGS[1])
    assert all(found.values()), found
