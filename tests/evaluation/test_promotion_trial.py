"""Many candidates end at once while evaluation, tracking and gateway are killed: one order of promotions everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.kit.bus import Bus
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from tests.evaluation.promotion_trial import PromotionTrial
from tests.tracking.conftest import copy_database
from tests.tracking.conftest import template as template

KILLS = {"evaluation": 4, "tracking": 2, "gateway": 3}


@pytest.mark.e2e
async def test_kills_leave_one_order_of_promotions(
    bus: Bus, objects: ObjectStore, s3_settings: Settings, template: Path
) -> None:
    copy_database(template, s3_settings.data_dir)
    trial = PromotionTrial(bus, objects, s3_settings, candidates=30, kills=KILLS, seed=1)
    promotions = await trial.run()
    assert len(promotions) == 15
    assert trial.killed == KILLS
