"""An empty MLflow that is filled again has the content of the first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contracts.events.run import RunEvaluated, RunPrepared, RunTracked
from services.tracking.replay import replay_tracking
from services.tracking.settings import TrackingSettings
from services.tracking.store import Store
from tests.tracking.conftest import SHA, World, command_spec, copy_database, task_spec
from tests.tracking.test_service import promoted, publish_killed_run, staged

#: Tags that name pages, which are others in another MLflow, and our own mark of how far the stream was read.
OWN_TAGS = {"mlflow.parentRunId", "trainbus.cursor"}


async def test_a_replay_has_the_content_of_the_first_mlflow(world: World, template: Path, tmp_path: Path) -> None:
    story = await publish_killed_run(world)
    await story.publish(RunPrepared(run_id="r1", dataset_id=SHA, manifest_uri="s3://data/m.json", train_samples=9))
    await story.completed(2, metrics={"accuracy": 0.9})
    await story.publish(RunEvaluated(run_id="r1", evaluation_run_id="e1", metrics={"accuracy": 0.8}))
    target = {"run_id": "r1", "checkpoint_uri": "s3://models/m.json"}
    child = world.story("e1", task_spec(kind="evaluate", evaluate=target, training=None))
    await child.accepted()
    await child.completed(1, metrics={"accuracy": 0.5})
    script = world.story("r2", command_spec())
    await script.accepted()
    await script.placed(1)
    await script.progress(1, range(1, 4))
    await script.placed(2)
    await script.progress(2, range(1, 6))
    await script.completed(2)
    await story.publish(promoted(1, "r1"))
    await story.publish(promoted(2, "r2"))
    await story.publish(promoted(3, "r1", rollback=True))
    await story.publish(staged("staging", 2, "r2"))
    await world.settled()

    copy_database(template, tmp_path / "second")
    own = {"mlflow_tracking_uri": f"sqlite:///{tmp_path}/second/mlflow.db", "data_dir": tmp_path / "scratch"}
    settings = TrackingSettings(**world.settings.model_dump() | own)
    second = World(world.bus, settings, Store(settings.tracking_uri, None))
    for _ in range(2):  # the second time changes nothing
        summary = await replay_tracking(world.bus, settings)
        assert (summary.runs, summary.promotions, summary.problems) == (3, 3, ())
        assert _content(second) == _content(world)
    tracked = await world.bus.read_history(RunTracked.subject_filter())
    assert {received.event.mlflow_run_id for received in tracked} <= {
        page.info.run_id for run_id in ("r1", "r2", "e1") for page in world.pages(run_id)
    }


def _content(world: World) -> dict[str, Any]:
    pages = {
        (run_id, page.data.tags["trainbus.attempt"]): {
            "name": page.info.run_name,
            "times": (page.info.start_time, page.info.end_time),
            "status": page.info.status,
            "params": page.data.params,
            "tags": {name: value for name, value in page.data.tags.items() if name not in OWN_TAGS},
            "has_parent": "mlflow.parentRunId" in page.data.tags,
            "inputs": [each.dataset.digest for each in page.inputs.dataset_inputs],
            "series": {
                key: sorted(
                    (each.step, each.timestamp, each.value)
                    for each in world.client.get_metric_history(page.info.run_id, key)
                )
                for key in page.data.metrics
            },
        }
        for run_id in ("r1", "r2", "e1")
        for page in world.pages(run_id)
    }
    versions = {each.version: (each.source, each.tags) for each in world.client.search_model_versions("name = 'm'")}
    return {"pages": pages, "versions": versions, "aliases": dict(world.client.get_registered_model("m").aliases)}


def _plain(metric: Any) -> tuple[int, int, float]:
    return metric.step, metric.timestamp, metric.value
