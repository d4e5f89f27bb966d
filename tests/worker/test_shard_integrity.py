"""A flipped bit is detected before the trainer reads it: some trials of loadtest.data.integrity."""

from __future__ import annotations

from pathlib import Path

from loadtest.data.integrity import PLACES, Trials
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore


async def test_flipped_bit_is_detected_everywhere(objects: ObjectStore, s3_settings: Settings, tmp_path: Path) -> None:
    outcome = await Trials(objects, s3_settings, tmp_path, seed=1).run(6 * len(PLACES))
    assert not outcome.unseen
    assert outcome.trials == 6 * len(PLACES)
    assert set(outcome.mended) | set(outcome.refused) == set(PLACES)
