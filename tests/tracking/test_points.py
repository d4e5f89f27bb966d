"""Which points survive: a table of named cases, and random lives against a plain model."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_param_name

from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import (
    CheckpointRef,
    Member,
    ProgressPoint,
    RunAccepted,
    RunCompleted,
    RunExited,
    RunPlaced,
    RunProgress,
    RunStarted,
)
from contracts.spec.run import RunSpec
from services.tracking.core import describe
from services.tracking.core.fold import Run, fold
from services.tracking.core.points import (
    MAX_STEP,
    NO_CEILING,
    NOTHING,
    Cursor,
    Point,
    Selector,
    ceilings,
    result_points,
)
from tests.tracking.conftest import START, command_spec, task_spec

AT = datetime(2026, 1, 1, tzinfo=UTC)


def reference(step: int) -> CheckpointRef:
    return CheckpointRef(uri=f"s3://models/x/{step}.json", step=step, epoch=1, samples_consumed=step)


def placed(generation: int, resume: int | None) -> RunPlaced:
    return RunPlaced(
        run_id="r1",
        generation=generation,
        members=(Member(node_id="n1", slots=(0,), ranks=(0,)),),
        world_size=1,
        resume=None if resume is None else reference(resume),
        spec=task_spec(),
        decided_at_sequence=0,
        decided_at=AT,
    )


def new_run() -> Run:
    run = Run("r1")
    fold(run, RunAccepted(run_id="r1", spec=task_spec(), request_id="1", request_source="t"), AT, 1)
    return run


def test_how_exact_a_run_is_stands_in_its_tags() -> None:
    task = {"name": "r", "task": "m:T", "code": {"uri": "s3://code/c.tar.gz", "sha256": "0" * 64}}
    spec = RunSpec.model_validate({**task, "training": {"epochs": 1, "logical_ranks": 4}})
    run = Run("r1")
    fold(run, RunAccepted(run_id="r1", spec=spec, request_id="1", request_source="t"), AT, 1)
    assert "trainbus.exactness" not in describe.tags(run, 1, 1)
    start = {"run_id": "r1", "node_id": "n1"}
    exact = RunStarted(
        **start, generation=1, exactness="exact", environment={"cpu": "AVX512"}, environment_digest="e" * 64
    )
    committed = CheckpointCommitted(
        run_id="r1",
        generation=1,
        checkpoint=reference(5),
        size_bytes=1,
        exactness="exact",
        state_digest="d" * 64,
        manifest_sha256="a" * 64,
    )
    for sequence, fact in enumerate((placed(1, None), exact, committed, exact, committed), 2):
        fold(run, fact, AT, sequence)
    tags = describe.tags(run, 1, 1)
    names = ("exactness", "exactness_reason", "logical_ranks", "environment_digest", "state_digest")
    assert [tags[f"trainbus.{name}"] for name in names] == ["exact", "", "4", "e" * 64, "d" * 64]
    assert tags["trainbus.manifest_sha256"] == "a" * 64
    fold(run, placed(2, 5), AT, 8)
    fold(run, RunStarted(**start, generation=2, environment={"cpu": "AVX2"}, environment_digest="f" * 64), AT, 9)
    tags = describe.tags(run, 1, 2)
    assert (tags["trainbus.exactness"], tags["trainbus.environment_digest"]) == ("samples-exact", "f" * 64)
    assert "AVX2 instead of AVX512" in tags["trainbus.exactness_reason"]


def test_what_a_run_begins_with_stands_in_its_tags_and_params() -> None:
    task = {"name": "r", "task": "m:T", "code": {"uri": "s3://code/c.tar.gz", "sha256": "0" * 64}}
    uri = "s3://models/base.json"
    given = {"training": {"epochs": 1}, "init_from": uri, "init_exclude": ["head.*"]}
    spec = RunSpec.model_validate(task | given)
    run = Run("r1")
    fold(run, RunAccepted(run_id="r1", spec=spec, request_id="1", request_source="t"), AT, 1)
    assert describe.tags(run, 1, 1)["trainbus.init_from"] == uri
    params = describe.params(spec)
    assert (params["init_from"], params["init_exclude"]) == (uri, '["head.*"]')
    plain = RunSpec.model_validate(task | {"training": {"epochs": 1}})
    assert not [name for name in describe.params(plain) if name.startswith("init")]


def test_what_a_script_sets_before_its_placement_is_known_is_kept_once() -> None:
    run = Run("r1")
    fold(run, RunAccepted(run_id="r1", spec=command_spec(), request_id="1", request_source="t"), AT, 1)
    fold(run, placed(1, None), AT, 2)
    early = RunProgress(
        run_id="r1", generation=2, node_id="n", rank=0, offset=0, points=(), params={"lr": "1"}, tags={"color": "red"}
    )

    def read(cursor: Cursor) -> tuple[dict[str, str], dict[str, str], Cursor]:
        selector = Selector(run, run.generation, cursor, {})
        assert cursor.start <= 7, "it would not be read again"
        selector.select([(7, early)])
        return selector.params, selector.tags, selector.next_cursor()

    *nothing, cursor = read(Cursor())
    assert nothing == [{}, {}]
    fold(run, placed(2, 0), AT, 3)
    *found, cursor = read(cursor)
    assert found == [{"lr": "1"}, {"color": "red"}]
    assert cursor.start == 8


@pytest.mark.parametrize(
    ("resumes", "step", "expected"),
    [
        pytest.param({1: None}, NOTHING, {1: NOTHING}, id="nothing is final before the first commit"),
        pytest.param({1: None}, 30, {1: 30}, id="a commit makes everything up to its step final"),
        pytest.param({1: None, 2: 30}, NOTHING, {1: 30, 2: NOTHING}, id="the resumed-from part is final at once"),
        pytest.param({1: None, 2: 30, 3: 30}, 40, {1: 30, 2: 30, 3: 40}, id="a generation that got nowhere"),
        pytest.param({1: None, 2: None}, 10, {1: NOTHING, 2: 10}, id="from scratch nothing of before survives"),
        pytest.param({1: None, 2: 30, 3: 20}, 40, {1: 20, 2: 20, 3: 40}, id="further back than last time"),
        pytest.param({1: None, 2: 30}, NO_CEILING, {1: 30, 2: NO_CEILING}, id="the end makes everything final"),
    ],
)
def test_ceilings(resumes: dict[int, int | None], step: int, expected: dict[int, int]) -> None:
    run = new_run()
    for generation, resume in resumes.items():
        fold(run, placed(generation, resume), AT, generation)
    assert ceilings(run, max(resumes), step) == expected


class Life:
    """A run that trains, commits, is killed and goes on; and an MLflow that is a set of rows."""

    def __init__(self) -> None:
        self.run = new_run()
        self.stream: list[tuple[int, RunProgress]] = []
        self.rows: set[Point] = set()
        self.stored = Cursor()
        self.generation, self.step = 1, 0
        self.committed: int | None = None
        self.trained: dict[int, int] = {}
        fold(self.run, placed(1, None), AT, 2)

    def train(self, steps: int) -> None:
        """Report ``steps`` steps in one batch."""
        points = []
        for _ in range(steps):
            self.step += 1
            self.trained[self.step] = self.generation
            time = START.timestamp() + self.generation * 1000 + self.step
            points.append(ProgressPoint(step=self.step, time=time, values={"loss": float(self.generation)}))
        batch = RunProgress(
            run_id="r1",
            generation=self.generation,
            node_id="n",
            rank=0,
            offset=len(self.stream),
            points=tuple(points),
        )
        self.stream.append((len(self.stream) + 1, batch))

    def commit(self) -> None:
        self.committed = self.step
        self.run.committed[self.generation] = reference(self.step)

    def kill(self) -> None:
        """Go on from the last commit, as a new generation."""
        self.generation += 1
        self.step = self.committed or 0
        self.trained = {step: generation for step, generation in self.trained.items() if step <= self.step}
        fold(self.run, placed(self.generation, self.committed), AT, 2)
        self.begin("checkpoint")

    def outlive(self) -> None:
        """Go on from where the last generation was, as its state was still in memory."""
        self.generation += 1
        fold(self.run, placed(self.generation, self.committed), AT, 2)
        self.flush(crash=False)  # it is placed, and its ranks have not reported where it begins
        self.begin("memory")

    def begin(self, source: Literal["checkpoint", "memory"]) -> None:
        start = RunStarted(run_id="r1", node_id="n", generation=self.generation, step=self.step, resumed_from=source)
        fold(self.run, start, AT, 2)

    def flush(self, *, crash: bool) -> None:
        """What the service does; a crash loses the cursor, not the rows."""
        heads: dict[str, int] = {}
        for row in self.rows:
            heads[row.key] = max(heads.get(row.key, -1), row.step)
        generation = self.run.start_generation(self.run.generation)
        selector = Selector(self.run, generation, self.stored, heads)
        reading = [item for item in self.stream if item[0] >= self.stored.start]
        for first in range(0, len(reading), 2):
            self.rows.update(selector.select(reading[first : first + 2]))
        if not crash:
            self.stored = Cursor.from_tag(selector.next_cursor().to_tag())

    def check(self, upto: int) -> None:
        expected = {step: generation for step, generation in self.trained.items() if step <= upto}
        assert sorted((row.step, row.value) for row in self.rows) == sorted(expected.items())


STEP = st.one_of(
    st.integers(1, 6).map(lambda steps: ("train", steps)),
    st.sampled_from([("commit", 0), ("kill", 0), ("flush", 0), ("crash", 0), ("outlive", 0)]),
)


@settings(deadline=None)
@given(st.lists(STEP, max_size=40))
def test_mlflow_holds_exactly_the_points_that_survive(actions: list[tuple[str, int]]) -> None:
    life = Life()
    for action, number in actions:
        match action:
            case "train":
                life.train(number)
            case "commit":
                life.commit()
            case "kill":
                life.kill()
            case "outlive":
                life.outlive()
            case _:
                life.flush(crash=action == "crash")
                life.check(upto=life.committed or 0)
    end = {"run_id": "r1", "generation": life.generation}
    fold(life.run, RunExited(**end, node_id="n1", outcome="succeeded"), AT, 9)
    fold(life.run, RunCompleted(**end), AT, 10)
    life.flush(crash=True)
    life.flush(crash=False)
    life.check(upto=life.step)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=300), st.text(max_size=50), max_size=30))
@example({"..0": "", "_..0": "", ".0": ""})
def test_keys_stay_apart_and_are_what_mlflow_takes(tags: dict[str, str]) -> None:
    keys = {name: describe.clean_key(name) for name in tags}
    assert len(set(keys.values())) == len(keys)
    for key in keys.values():
        _validate_param_name(key)
        assert len(key) <= describe.MAX_KEY_CHARS


@settings(deadline=None)
@given(st.lists(st.integers(1, 400), max_size=50), st.integers(1, 10))
def test_chunks_keep_order_and_limits(sizes: list[int], most: int) -> None:
    chunks = list(describe.chunks(((size, size) for size in sizes), most, 1000))
    assert [size for chunk in chunks for size in chunk] == sizes
    assert all(0 < len(chunk) <= most and sum(chunk) <= 1000 for chunk in chunks)


@pytest.mark.parametrize("tag", [None, "", "nonsense", "[]", '{"step": 1}', '{"generation": "x"}'])
def test_a_cursor_that_cannot_be_read_counts_as_none(tag: str | None) -> None:
    assert Cursor.from_tag(tag) == Cursor()


def test_a_result_of_any_step_can_be_stored() -> None:
    """Anybody can publish a checkpoint of any step; an error of the database would hold up everybody's metrics."""
    for step, stored in ((7, 7), (10**30, MAX_STEP), (-1, 0)):
        assert result_points({"loss": 1.0}, "test/", step, 5) == [Point("test/loss", 1.0, 5, stored)]
