"""The service over a real bus and a real SQLite store: exact series after any failure in between."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from contracts.events.model import ModelPromoted, ModelStaged
from contracts.events.run import RunEvaluated, RunFailed, RunNotPromoted, RunPrepared, RunProgress, RunTracked
from services.kit.bus import Bus
from services.kit.service import Service
from services.tracking import metrics
from services.tracking.app import Projector, build
from services.tracking.core.points import Point
from services.tracking.settings import TrackingSettings
from services.tracking.store import Store, TrackingUnavailable
from tests.tracking.conftest import SHA, World, command_spec, eventually, task_spec

Start = Callable[..., Awaitable[Any]]
#: Generation 1 trained to 37 and committed 30; generation 2 went on from 30 to 40.
SURVIVING = [(step, 1 + step / 1000) for step in range(1, 31)] + [(step, 2 + step / 1000) for step in range(31, 41)]


async def publish_killed_run(world: World, *, settle: bool = False) -> Any:
    """A run whose first generation is killed at step 37 after a commit at 30."""
    story = world.story()
    await story.accepted()
    await story.placed(1)
    await story.progress(1, range(1, 31))
    await story.committed(1, 30)
    if settle:
        await world.settled()
    await story.progress(1, range(31, 38))
    await story.placed(2, resume=30)
    await story.progress(2, range(31, 41))
    await story.committed(2, 40)
    return story


async def test_an_abandoned_tail_is_never_in_mlflow(world: World) -> None:
    story = await publish_killed_run(world)
    await world.settled()
    (page,) = world.pages()
    assert world.series(page) == SURVIVING
    assert page.info.status == "RUNNING"
    await story.progress(2, range(41, 44))
    await story.completed(2, metrics={"result/accuracy": 0.9}, checkpoint=story.reference(40))
    await world.settled()
    (page,) = world.pages()
    assert world.series(page) == SURVIVING + [(step, 2 + step / 1000) for step in (41, 42, 43)]
    assert (page.info.status, page.data.metrics["result/accuracy"]) == ("FINISHED", 0.9)


async def test_every_fact_twice_changes_nothing(world: World) -> None:
    story = await publish_killed_run(world)
    await story.publish(RunPrepared(run_id="r1", dataset_id=SHA, manifest_uri="s3://data/m.json", train_samples=9))
    await story.completed(2)
    await story.publish(RunEvaluated(run_id="r1", evaluation_run_id="e1", metrics={"accuracy": 0.8}))
    await world.settled()
    (before,) = world.pages()
    await story.again()
    await world.settled()
    (page,) = world.pages()
    assert world.series(page) == SURVIVING
    assert dict(page.info) == dict(before.info)
    assert _content(page) == _content(before)
    assert [len(world.client.get_metric_history(page.info.run_id, key)) for key in ("loss", "test/accuracy")] == [40, 1]
    assert len(page.inputs.dataset_inputs) == 1
    tracked = await world.bus.read_history(RunTracked.subject_filter())
    assert [received.event.mlflow_run_id for received in tracked] == [page.info.run_id]


def _content(page: Any) -> dict[str, Any]:
    """What the page holds, but for our own mark of how far the stream was read."""
    content: dict[str, Any] = page.data.to_dictionary()
    content["tags"].pop("trainbus.cursor")
    return content


async def test_what_a_run_is_stands_on_its_page(world: World) -> None:
    story = world.story(
        spec=task_spec(params={"width": 3, "deep": {"er": [1, 2]}}, env={"SECRET": "x"}, tags={"a": "b"})
    )
    await story.accepted()
    await story.publish(RunPrepared(run_id="r1", dataset_id=SHA, manifest_uri="s3://data/m.json", train_samples=9))
    await story.placed(1)
    await story.publish(RunFailed(run_id="r1", reason="the task does not import"))
    await story.publish(RunNotPromoted(run_id="r1", model="m", reason="worse"))
    await world.settled()
    (page,) = world.pages()
    tags, params = page.data.tags, page.data.params
    assert {"name": page.info.run_name, "status": page.info.status} == {"name": "digits", "status": "FAILED"}
    wanted = {
        "mlflow.user": "ada",
        "mlflow.source.git.commit": "c0ffee",
        "trainbus.code.git_dirty": "true",
        "trainbus.code.sha256": SHA,
        "trainbus.dataset_id": SHA,
        "trainbus.generation": "1",
        "trainbus.slots": "2",
        "trainbus.reason": "the task does not import",
        "trainbus.not_promoted": "worse",
        "a": "b",
    }
    assert {name: tags.get(name) for name in wanted} == wanted
    assert (params["params.width"], params["params.deep.er"], params["training.epochs"]) == ("3", "[1, 2]", "1")
    assert params["dataset_id"] == SHA
    assert not [name for name, value in params.items() if "SECRET" in name + value]
    assert page.inputs.dataset_inputs[0].dataset.digest == SHA[:36]


class Faulty(Store):
    """A store that fails at chosen calls, before or after the real call."""

    def __init__(self, settings: TrackingSettings) -> None:
        super().__init__(settings.tracking_uri, settings.artifact_location)
        self.away = False
        self.calls = 0

    def _broken(self) -> None:
        self.calls += 1
        if self.away:
            raise TrackingUnavailable("connection refused")

    def find(self, *args: Any) -> Any:
        self._broken()
        return super().find(*args)

    def create(self, *args: Any) -> Any:
        # The answer is lost after the work was done: the worst moment.
        made = super().create(*args)
        self._broken()
        return made

    def log_points(self, mlflow_run_id: str, points: Any) -> None:
        self._broken()
        super().log_points(mlflow_run_id, points)
        self._broken()

    def log_tags(self, *args: Any) -> None:
        self._broken()
        super().log_tags(*args)


async def test_an_outage_loses_and_doubles_nothing(
    bus: Bus, tracking_settings: TrackingSettings, running: Start
) -> None:
    store = Faulty(tracking_settings)
    service = await running(tracking_settings, store)
    world = World(bus, tracking_settings, store)
    store.away = True
    await publish_killed_run(world)

    async def unready() -> bool:
        return not service.check_readiness()["mlflow"]

    await eventually(unready)

    async def five_wait() -> bool:
        info = await bus.js.consumer_info("FACTS", "tracking")
        return (info.num_pending or 0) + (info.num_ack_pending or 0) == 5

    await eventually(five_wait)
    store.away = False
    await world.settled()
    assert service.check_readiness()["mlflow"]
    (page,) = world.pages()
    assert world.series(page) == SURVIVING


async def test_a_call_that_fails_now_and_then_doubles_nothing(
    bus: Bus, tracking_settings: TrackingSettings, running: Start
) -> None:
    class Flaky(Faulty):
        def _broken(self) -> None:
            self.calls += 1
            if self.calls % 3 == 1:
                raise TrackingUnavailable("reset by peer")

    store = Flaky(tracking_settings)
    await running(tracking_settings, store)
    world = World(bus, tracking_settings, store)
    await publish_killed_run(world)
    await world.settled()
    assert [world.series(page) for page in world.pages()][:1] == [SURVIVING]


async def test_one_impossible_call_does_not_hold_up_the_others(
    bus: Bus, tracking_settings: TrackingSettings, running: Start
) -> None:
    class Choking(Store):
        def log_params(self, mlflow_run_id: str, params: Any) -> None:
            if "params.bad" in params:
                raise TrackingUnavailable("MLflow says INTERNAL_ERROR", unclear=True)
            super().log_params(mlflow_run_id, params)

    store = Choking(tracking_settings.tracking_uri, tracking_settings.artifact_location)
    service = await running(tracking_settings, store)
    world = World(bus, tracking_settings, store)
    await world.story("bad", task_spec(params={"bad": 1})).accepted()
    await publish_killed_run(world)
    await world.settled()
    assert [world.series(page) for page in world.pages()] == [SURVIVING]
    assert service.check_readiness()["mlflow"]
    assert (await bus.js.stream_info("DEAD_LETTERS")).state.messages == 1


async def test_killed_between_points_and_cursor(bus: Bus, tracking_settings: TrackingSettings, running: Start) -> None:
    class Dying(Store):
        dead = False

        def log_tags(self, mlflow_run_id: str, tags: Any) -> None:
            if "trainbus.cursor" in tags and '"step": 40' in tags["trainbus.cursor"]:
                self.dead = True
            if self.dead:
                raise TrackingUnavailable("the process is dead: nothing it does arrives")
            super().log_tags(mlflow_run_id, tags)

    store = Dying(tracking_settings.tracking_uri, tracking_settings.artifact_location)
    first = await running(tracking_settings, store)
    world = World(bus, tracking_settings, Store(tracking_settings.tracking_uri, tracking_settings.artifact_location))
    await publish_killed_run(world, settle=True)

    async def died() -> bool:
        return store.dead

    await eventually(died)
    (page,) = world.pages()
    assert world.series(page) == SURVIVING
    assert '"step": 40' not in page.data.tags["trainbus.cursor"]
    first.stopping.set()
    await running(tracking_settings, world.store)
    await world.settled()
    (page,) = world.pages()
    assert world.series(page) == SURVIVING
    assert '"step": 40' in page.data.tags["trainbus.cursor"]


async def test_a_command_is_logged_live_and_starts_over_on_a_new_page(world: World) -> None:
    story = world.story(spec=command_spec())
    await story.accepted()
    await story.placed(1)
    await story.progress(1, range(1, 8))

    async def seen() -> bool:
        pages = world.pages()
        return bool(pages) and len(world.series(pages[0])) == 7

    await eventually(seen)
    await story.placed(2)
    await story.progress(2, range(1, 4))
    await story.completed(2)
    await world.settled()
    old, new = world.pages()
    assert (old.info.status, new.info.status) == ("KILLED", "FINISHED")
    assert "from scratch" in old.data.tags["trainbus.abandoned"]
    assert new.data.tags["mlflow.parentRunId"] == old.info.run_id
    assert [step for step, _ in world.series(old)] == list(range(1, 8))
    assert world.series(new) == [(step, 2 + step / 1000) for step in range(1, 4)]


def test_one_default_experiment_that_opens_at_its_runs(tracking_settings: TrackingSettings) -> None:
    store = Store(tracking_settings.tracking_uri, tracking_settings.artifact_location)
    for _ in range(2):
        for name in ("default", "digits"):
            store.create(name, "run", 1, {})
        store.forget()
    experiments = store._mlflow.search_experiments()
    assert {each.name: each.tags["mlflow.experimentKind"] for each in experiments} == {
        "Default": "custom_model_development",
        "digits": "custom_model_development",
    }


def test_a_default_experiment_of_before_stays_in_use(tracking_settings: TrackingSettings) -> None:
    store = Store(tracking_settings.tracking_uri, tracking_settings.artifact_location)
    store.open()
    before = store._mlflow.create_experiment("default")
    assert store.create("default", "run", 1, {}).experiment_id == before


async def test_a_command_that_resumes_stays_one_mlflow_run(world: World) -> None:
    story = world.story(spec=command_spec())
    await story.accepted()
    await story.placed(1)
    await story.progress(1, range(1, 8))

    async def seen() -> bool:
        pages = world.pages()
        return bool(pages) and len(world.series(pages[0])) == 7

    await eventually(seen)
    await story.placed(2, resume=4)
    await story.progress(2, range(5, 11))
    await story.completed(2)
    await world.settled()
    (page,) = world.pages()
    assert page.info.status == "FINISHED"
    # Steps 5 to 7 of the first attempt were logged as they came, and are there once.
    assert world.series(page) == [(step, (1 if step < 8 else 2) + step / 1000) for step in range(1, 11)]


async def test_what_a_script_logs_with_mlflow_is_on_its_page_once(world: World) -> None:
    def logged(generation: int, offset: int, **values: Any) -> RunProgress:
        return RunProgress(run_id="r1", generation=generation, node_id="n1", rank=0, offset=offset, points=(), **values)

    story = world.story(spec=command_spec())
    await story.accepted()
    await story.placed(1)
    await story.progress(1, range(1, 4))
    tags = {"color": "red", "mlflow.user": "eve", "trainbus.run_id": "x", "mlflow.note.content": "a note"}
    await world.bus.publish(logged(1, 1, params={"C": "0.5"}, tags=tags))

    async def is_there() -> bool:
        pages = world.pages()
        return bool(pages) and "C" in pages[0].data.params

    await eventually(is_there)
    # A second attempt that goes on chooses otherwise: MLflow keeps a parameter, and a tag is the last one.
    await story.placed(2, resume=3)
    await world.bus.publish(logged(2, 2, params={"C": "0.7", "D": "1"}, tags={"color": "blue"}))
    await story.completed(2)
    await world.settled()
    (page,) = world.pages()
    assert (page.data.params["C"], page.data.params["D"]) == ("0.5", "1")
    shown = ("color", "mlflow.user", "trainbus.run_id", "mlflow.note.content")
    assert [page.data.tags[name] for name in shown] == ["blue", "", "r1", "a note"]
    assert len(world.series(page)) == 3


async def test_running_commands_are_found_again_after_a_restart(
    bus: Bus, tracking_settings: TrackingSettings, running: Start
) -> None:
    store = Store(tracking_settings.tracking_uri, tracking_settings.artifact_location)
    world = World(bus, tracking_settings, store)
    first = await running(tracking_settings, store)
    story = world.story(spec=command_spec())
    await story.accepted()
    await story.placed(1)
    await world.settled()
    first.stopping.set()
    await asyncio.sleep(0)
    await running(tracking_settings, Store(tracking_settings.tracking_uri, tracking_settings.artifact_location))
    await story.progress(1, range(1, 4))

    async def seen() -> bool:
        return len(world.series(world.pages()[0])) == 3

    await eventually(seen)


async def test_limits_hold_and_cuts_are_marked(world: World) -> None:
    many = {f"p{number}": "ü" * 9000 if number < 20 else "x" * 1500 for number in range(250)}
    story = world.story(spec=task_spec(params=many, tags={"bad key!": "\0" + "x" * 9000}))
    await story.accepted()
    await story.placed(1)
    keys = [f"layer {number}/grad" for number in range(40)]
    await story.progress(1, range(1, 64), *keys)
    await story.progress(1, range(64, 65), "nan", value=math.nan)
    await story.progress(1, range(65, 66), "inf", value=math.inf)
    await story.progress(1, range(66, 67), "strange !ключ", value=1.0)
    await story.progress(1, range(3), "cpu", kind="system")
    await story.committed(1, 70)
    await world.settled()
    (page,) = world.pages()
    big = [value for name, value in page.data.params.items() if name.startswith("params.p")]
    assert (len(big), {len(value) for value in big}) == (250, {6000, 1500})
    assert sum(value.endswith("[cut, 9,000 characters in all]") for value in big) == 20
    assert [len(world.series(page, key)) for key in (keys[0], keys[-1])] == [63, 63]
    assert math.isnan(world.series(page, "nan")[0][1])
    assert world.series(page, "inf")[0][1] > 1e308
    assert len([key for key in page.data.metrics if key.startswith("strange __")]) == 1
    assert len(world.series(page, "system/n1/cpu")) == 3
    assert next(value for name, value in page.data.tags.items() if name.startswith("bad key_")).startswith("\\0xx")


async def test_a_point_that_mlflow_cannot_store_delays_no_run(world: World) -> None:
    ghost = world.story("ghost")
    await ghost.completed(1)
    story = world.story()
    await story.accepted()
    await story.placed(1)
    await story.progress(1, range(2**63, 2**63 + 1))
    await story.progress(7, range(1, 3))
    await story.progress(1, range(1, 3))
    await story.completed(1)
    await world.settled()
    (page,) = world.pages()
    assert [step for step, _ in world.series(page)] == [1, 2]
    assert world.pages("ghost") == []
    assert (await world.bus.js.stream_info("DEAD_LETTERS")).state.messages == 1


async def test_an_evaluation_is_nested_in_the_run_it_measures(world: World) -> None:
    story = world.story()
    await story.accepted()
    target = {"run_id": "r1", "checkpoint_uri": "s3://models/m.json"}
    child = world.story("e1", task_spec(kind="evaluate", evaluate=target, training=None, experiment="other"))
    await child.accepted()
    await child.placed(1)
    await child.completed(1, metrics={"accuracy": 0.5})
    await world.settled()
    (page,), (nested,) = world.pages("r1"), world.pages("e1")
    assert nested.data.tags["mlflow.parentRunId"] == page.info.run_id
    assert nested.data.metrics == {"accuracy": 0.5}


def promoted(version: int, run_id: str, **more: Any) -> ModelPromoted:
    uri = f"s3://models/{run_id}/step_1.json"
    return ModelPromoted(model="m", version=version, run_id=run_id, checkpoint_uri=uri, **more)


async def test_the_champion_alias_never_runs_backwards(world: World) -> None:
    story = world.story(spec=task_spec(init_from="s3://models/base.json"))
    await story.accepted()
    await story.publish(promoted(1, "r1"))
    await story.publish(promoted(2, "r2"))
    await world.settled()
    assert world.client.get_model_version_by_alias("m", "champion").version == 2
    versions = {each.version: each.tags for each in world.client.search_model_versions("name = 'm'")}
    assert [versions[number].get("trainbus.init_from") for number in (1, 2)] == ["s3://models/base.json", None]
    await story.again()
    await world.settled()
    assert world.client.get_model_version_by_alias("m", "champion").version == 2
    await story.publish(promoted(3, "r1", rollback=True))
    await world.settled()
    champion = world.client.get_model_version_by_alias("m", "champion")
    assert (champion.version, champion.run_id) == (3, world.pages()[0].info.run_id)
    assert _numbers(world) == {1: "1", 2: "2", 3: "3"}


async def test_promotions_out_of_order_have_their_own_numbers(bus: Bus, tracking_settings: TrackingSettings) -> None:
    store = Store(tracking_settings.tracking_uri, tracking_settings.artifact_location)
    world = World(bus, tracking_settings, store)
    facts = {version: promoted(version, f"r{version}") for version in (1, 2, 3, 6)}
    for fact in facts.values():
        await world.story().publish(fact)
    async with Projector(bus, tracking_settings, store, asyncio.Event(), announces=False) as projector:
        for version in (3, 1, 2, 6, 3, 1):
            await projector.project_promotion(facts[version])
    # 4 and 5 are in no log: their numbers name nothing.
    assert _numbers(world) == {1: "1", 2: "2", 3: "3", 6: "6"}
    assert _aliases(world) == {"champion": "6"}


async def test_a_version_that_somebody_deletes_moves_no_number(world: World) -> None:
    story = world.story()
    await story.accepted()
    for version in (1, 2):
        await story.publish(promoted(version, f"r{version}"))
    await world.settled()
    world.client.delete_model_version("m", "2")
    await story.publish(promoted(3, "r3"))
    await world.settled()
    assert _numbers(world) == {1: "1", 3: "3"}


async def test_a_number_that_is_taken_in_mlflow_is_told_once(world: World) -> None:
    story = world.story()
    await story.accepted()
    await story.publish(promoted(1, "r1"))
    await world.settled()
    by_hand = world.client.create_model_version("m", "s3://models/by-hand")
    with capture_logs() as logs:
        await story.publish(promoted(2, "r2"))
        await world.settled()
        await story.again()
        await world.settled()
    assert _numbers(world) == {1: "1", int(by_hand.version): None, 3: "2"}
    assert _aliases(world) == {"champion": "3"}
    (warning,) = (each for each in logs if "another number" in each["event"])
    assert (warning["version"], warning["mlflow_version"]) == (2, 3)
    assert "version 2 of 'm' in trainbus" in world.client.get_model_version("m", "3").description


class BreakingClient:
    """MLflow's client, whose process ends right after one of its calls."""

    def __init__(self, client: Any, last_call: int) -> None:
        self._client, self._left = client, last_call

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
            return answer

        return call


def test_a_kill_between_any_two_calls_makes_no_second_version(tracking_settings: TrackingSettings) -> None:
    store = Store(tracking_settings.tracking_uri, tracking_settings.artifact_location)
    client = store._mlflow
    tags = {"trainbus.version": "3"}
    for last_call in range(1, 12):
        name = f"m{last_call}"
        # A gap before it, and files: every call that there is.
        files = store.open_model("default", name, None, {"trainbus.checkpoint_uri": f"s3://{name}"}, {})
        fact = promoted(3, "r1").model_copy(update={"model": name})
        store._client = BreakingClient(client, last_call)
        with suppress(KeyboardInterrupt):
            store.promote(fact, None, tags, files)
        store._client = client
        for _ in range(2):
            files = store.open_model("default", name, None, {"trainbus.checkpoint_uri": f"s3://{name}"}, {})
            store.promote(fact, None, tags, files)
            assert [int(each.version) for each in client.search_model_versions(f"name = '{name}'")] == [3]
        assert dict(client.get_registered_model(name).aliases) == {"champion": 3}
        linked = client.get_logged_model(files.model_id).tags["mlflow.modelVersions"]
        assert json.loads(linked) == [{"name": name, "version": 3}]


def _numbers(world: World) -> dict[int, str | None]:
    """Return trainbus's number of each version in MLflow."""
    found = world.client.search_model_versions("name = 'm'")
    return {int(each.version): each.tags.get("trainbus.version") for each in found}


async def test_aliases_follow_the_facts_and_are_moved_back(
    bus: Bus, tracking_settings: TrackingSettings, running: Start
) -> None:
    settings = tracking_settings.model_copy(update={"alias_check_interval_s": 0.05})
    store = Store(settings.tracking_uri, settings.artifact_location)
    await running(settings, store)
    world = World(bus, settings, store)
    story = world.story()
    await story.accepted()
    await story.publish(promoted(1, "r1"))
    await story.publish(promoted(2, "r2"))
    await story.publish(staged("staging", 1, "r1"))
    await story.publish(staged("canary", 2, "r2"))
    await story.publish(staged("canary", None))
    await world.settled()
    assert _aliases(world) == {"champion": "2", "staging": "1"}
    # Ours are moved back and come back; one that nobody requested here stays.
    world.client.set_registered_model_alias("m", "champion", "1")
    world.client.delete_registered_model_alias("m", "staging")
    world.client.set_registered_model_alias("m", "mine", "1")
    world.client.set_registered_model_alias("m", "canary", "1")

    async def repaired() -> bool:
        return _aliases(world) == {"champion": "2", "staging": "1", "mine": "1"}

    await eventually(repaired)


async def test_an_alias_moved_by_hand_is_only_reported_where_the_settings_say_so(
    bus: Bus, tracking_settings: TrackingSettings, running: Start
) -> None:
    settings = tracking_settings.model_copy(update={"alias_check_interval_s": 0.05, "repair_aliases": False})
    store = Store(settings.tracking_uri, settings.artifact_location)
    await running(settings, store)
    world = World(bus, settings, store)
    story = world.story()
    await story.publish(promoted(1, "r1"))
    await story.publish(promoted(2, "r2"))
    await world.settled()
    world.client.set_registered_model_alias("m", "champion", "1")
    reported = metrics.ALIASES_MOVED.labels("reported")
    before = reported._value.get()

    async def is_reported() -> bool:
        return bool(reported._value.get() > before)

    await eventually(is_reported)
    assert _aliases(world) == {"champion": "1"}


def staged(alias: str, version: int | None, run_id: str | None = None) -> ModelStaged:
    uri = f"s3://models/{run_id}/step_1.json" if run_id else None
    return ModelStaged(
        model="m", alias=alias, version=version, run_id=run_id, checkpoint_uri=uri, request_id=f"{alias}-{version}"
    )


def _aliases(world: World) -> dict[str, str]:
    return {name: str(version) for name, version in world.client.get_registered_model("m").aliases.items()}


async def test_the_same_points_twice_are_one_row(world: World) -> None:
    story = world.story()
    await story.accepted()
    await world.settled()
    (page,) = world.pages()
    batch = [Point("k", value, 1000, 1) for value in (1.0, math.nan, math.inf)]
    for _ in range(2):
        await asyncio.to_thread(world.store.log_points, page.info.run_id, batch)
    assert len(world.series(page, "k")) == 3


async def test_of_two_replicas_one_writes_and_the_other_takes_over(
    bus: Bus, tracking_settings: TrackingSettings
) -> None:
    def build_replica() -> Service:
        return build(tracking_settings, Store(tracking_settings.tracking_uri, tracking_settings.artifact_location))

    first, second = build_replica(), build_replica()
    running_first = asyncio.create_task(first.run())
    await eventually(_has_started(first))
    running_second = asyncio.create_task(second.run())
    world = World(bus, tracking_settings, Store(tracking_settings.tracking_uri, tracking_settings.artifact_location))
    story = await publish_killed_run(world)
    await story.publish(promoted(1, "r1"))
    await world.settled()
    assert not second.check_readiness()["started"]
    first.stopping.set()
    await running_first
    await eventually(_has_started(second))
    await story.again()
    await story.completed(2)
    await world.settled()
    (page,) = world.pages()
    assert (page.info.status, world.series(page)) == ("FINISHED", SURVIVING)
    assert len(world.client.search_model_versions("name = 'm'")) == 1
    second.stopping.set()
    await running_second


def _has_started(service: Service) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return service.check_readiness()["started"]

    return check


async def test_of_two_pages_of_one_attempt_the_older_stays(tracking_settings: TrackingSettings) -> None:
    store = Store(tracking_settings.tracking_uri, tracking_settings.artifact_location)
    tags = {"trainbus.run_id": "r1", "trainbus.attempt": "1"}
    older, newer = (store.create("default", "run", start_ms, tags) for start_ms in (1, 2))
    found = store.find("default", "r1", 1)
    assert found is not None
    assert found.mlflow_run_id == older.mlflow_run_id
    deleted = store._mlflow.get_run(newer.mlflow_run_id)
    assert deleted.info.lifecycle_stage == "deleted"
    assert deleted.data.tags["trainbus.duplicate_of"] == older.mlflow_run_id


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/../../b.png", "/abs.txt"])
async def test_artifacts_stay_in_their_folder(name: str) -> None:
    from services.tracking.core.describe import file_path

    folder, file = file_path(name, "evaluation")
    assert folder.startswith("evaluation")
    assert ".." not in f"{folder}/{file}".split("/")
