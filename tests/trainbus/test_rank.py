"""Real rank processes over gloo, with a fake agent on the socket."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.predictions import Predictions, PredictionsInfo
from contracts.progress import ring_name
from contracts.ranks import CheckpointLine, EndedLine, MetricsLine, ResultLine, StartedLine
from services.kit.ports import free_ports
from services.worker.ranks.ring_reader import RingReader
from tests.trainbus.support import (
    LINEAR_TASK,
    FakeAgent,
    Gang,
    Warm,
    journal,
    keys_by_step,
    linear_dataset,
    load_tensors,
    rank_env,
    request,
    start_rank,
    whole_checkpoint,
    write_launch,
    write_task,
)
from trainbus.data.dataset import Dataset
from trainbus.data.order import LaneOrder
from trainbus.data.sampler import Sampler

pytestmark = pytest.mark.shell


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return linear_dataset(tmp_path / "data")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return write_task(tmp_path / "code")


def ended(folder: Path, rank: int = 0) -> EndedLine:
    line = journal(folder, rank)[-1]
    assert isinstance(line, EndedLine)
    return line


def final_model(folder: Path) -> dict[str, Any]:
    return load_tensors(whole_checkpoint(folder), "model")


def test_three_ranks_match_one(warm: Warm, dataset: Dataset, code: Path, tmp_path: Path) -> None:
    """The same samples in the same order, and weights that differ by rounding alone; batch 16 over 3 is uneven."""
    import torch

    models = {}
    for world_size in (1, 3):
        folder = tmp_path / f"w{world_size}"
        spec = request(training={"epochs": 2, "accumulate": 2, "clip_norm": 0.5}, params={"adam": False})
        launch = write_launch(folder, spec, dataset, code, world_size=world_size)
        gang = Gang(warm, folder, launch, world_size, TRAINBUS_RECORD_SAMPLES="1")
        assert gang.wait() == [0] * world_size, gang.logs()
        models[world_size] = final_model(folder)
    assert keys_by_step(tmp_path / "w1", 1) == keys_by_step(tmp_path / "w3", 3)
    for name, tensor in models[1].items():
        torch.testing.assert_close(models[3][name], tensor, rtol=1e-4, atol=1e-6)

    lines = journal(tmp_path / "w3")
    kinds = [type(line) for line in lines]
    assert kinds[0] is StartedLine
    assert kinds[-2:] == [ResultLine, EndedLine]
    train = [line for line in lines if isinstance(line, MetricsLine) and "train/loss" in line.values]
    assert [line.step for line in train] == list(range(1, 14))
    assert train[-1].total_steps == 13
    assert train[-1].samples_consumed == 200
    assert {"train/lr", "train/grad_norm", "train/samples_per_s"} <= set(train[0].values)
    # Every rank reports its start; rank 0 alone reports metrics.
    assert not [line for line in journal(tmp_path / "w3", 2) if isinstance(line, MetricsLine)]
    assert [line.step for line in journal(tmp_path / "w3", 2) if isinstance(line, CheckpointLine)] == [7, 13]
    one, three = (journal(tmp_path / name)[-2] for name in ("w1", "w3"))
    assert isinstance(one, ResultLine)
    assert isinstance(three, ResultLine)
    assert three.metrics["validation/loss"] == pytest.approx(one.metrics["validation/loss"], rel=1e-4)


def test_ranks_without_samples_take_part_in_steps(warm: Warm, dataset: Dataset, code: Path, tmp_path: Path) -> None:
    """A global batch of two over three ranks: one has nothing to do in each step, and nothing hangs."""
    folder = tmp_path / "g1"
    launch = write_launch(folder, request(training={"max_steps": 5, "epochs": None, "global_batch": 2}), dataset, code)
    gang = Gang(warm, folder, launch, 3, TRAINBUS_RECORD_SAMPLES="1")
    assert gang.wait() == [0, 0, 0], gang.logs()
    assert [len(keys) for keys in keys_by_step(folder, 3).values()] == [2] * 5


def test_a_stop_sent_to_one_rank_stops_both_after_the_same_step(
    warm: Warm, dataset: Dataset, code: Path, tmp_path: Path
) -> None:
    """The resumed run trains exactly the samples that are left, at another world size."""
    folder, second = tmp_path / "g1", tmp_path / "g2"
    # It has no end of its own: the test stops it.
    spec = request(training={"epochs": 100_000, "checkpoint_every_steps": 50})
    agents = [FakeAgent(tmp_path / f"agent{rank}.sock") for rank in range(2)]
    port = free_ports(1)[0]
    pids = []
    for rank, agent in enumerate(agents):  # two nodes: each rank has its own agent
        launch = write_launch(folder, spec, dataset, code, world_size=2, socket_path=agent.path)
        launch = launch.rename(folder / f"launch_{rank}.json")
        pids.append(warm.fork(rank_env(launch, rank, 2, port, TRAINBUS_RECORD_SAMPLES="1"), folder, rank))
    agents[1].wait_for_hellos(1)
    with agents[0].changed:  # the doorbell after "started" and after the first checkpoint
        assert agents[0].changed.wait_for(lambda: agents[0].rings >= 2, 300)
    agents[1].send({"kind": "stop", "grace_s": 30, "reason": "preempted"})
    assert [warm.wait(pid) for pid in pids] == [75, 75]
    assert [(folder / f"rank_{rank}.exit").read_text().strip() for rank in range(2)] == ["75", "75"]
    ends = [ended(folder, rank) for rank in range(2)]
    assert ends[0].outcome == ends[1].outcome == "stopped"
    assert ends[0].step == ends[1].step
    checkpoints = [line for line in journal(folder) if isinstance(line, CheckpointLine)]
    assert not any(line.final for line in checkpoints)  # the training is not over
    assert checkpoints[-1].step == ends[0].step
    assert len({line.step for line in checkpoints}) == len(checkpoints)

    trained = keys_by_step(folder, 2)
    assert list(trained) == list(range(1, ends[0].step + 1))
    more = ends[0].step + 7
    spec = request(training={"epochs": None, "max_steps": more})
    launch = write_launch(second, spec, dataset, code, resume_folder=whole_checkpoint(folder))
    gang = Gang(warm, second, launch, 1, TRAINBUS_RECORD_SAMPLES="1")
    assert gang.wait() == [0], gang.logs()
    seen = [key for keys in (*trained.values(), *keys_by_step(second, 1).values()) for key in keys]
    for epoch in range(len(seen) // 100):
        assert len(set(seen[epoch * 100 : epoch * 100 + 100])) == 100
    for agent in agents:
        agent.close()


@pytest.mark.parametrize("receiver", [0, 1], ids=["the one that has its samples", "the one that waits"])
def test_a_stop_ends_a_wait_for_missing_samples(warm: Warm, code: Path, tmp_path: Path, receiver: int) -> None:
    """One of two ranks waits for a shard, the other has all it needs; what was trained is kept to the last step."""
    dataset = linear_dataset(tmp_path / "data", train=400)
    training = {"epochs": 2, "logical_ranks": 2, "loading": {"lanes": 2, "window": 1}, "checkpoint_every_steps": 1000}
    spec = request(training=training, params={"dropout": 0.2})
    sizes = dataset.shard_samples("train")
    sampler = Sampler(LaneOrder(dataset.dataset_id, sizes, 0, lanes=2, window=1), 16, 800)
    first_step: dict[int, dict[int, int]] = {0: {}, 1: {}}
    for rank, first in first_step.items():
        for step in range(25):
            ids = sampler.slice(step * 16, 2, rank).ids
            for number in np.unique(np.searchsorted(np.cumsum(sizes), ids, side="right")).tolist():
                first.setdefault(number, step)
    number = max(first_step[1].keys() - first_step[0].keys(), key=first_step[1].__getitem__)
    steps, shard = first_step[1][number], dataset.split("train").shards[number]
    path = dataset.folder / shard.path
    path.rename(path.with_suffix(".away"))

    def launch(name: str, generation: int, **more: Any) -> Path:
        written = write_launch(tmp_path / name, spec, dataset, code, generation=generation, **more)
        written.write_text(json.dumps(json.loads(written.read_bytes()) | {"survivor_dir": str(tmp_path / "left")}))
        return written

    agents = [FakeAgent(tmp_path / f"agent{rank}.sock") for rank in range(2)]
    port, pids, folder = free_ports(1)[0], [], tmp_path / "g1"
    for rank, agent in enumerate(agents):
        own = launch("g1", 1, socket_path=agent.path).rename(folder / f"launch_{rank}.json")
        pids.append(warm.fork(rank_env(own, rank, 2, port), folder, rank))
    with agents[1].changed:
        assert agents[1].changed.wait_for(lambda: agents[1].wanted, 300)
    assert agents[1].wanted[0]["shard"] == shard.path
    while [steps_done(folder, rank) for rank in range(2)] != [steps, steps]:
        time.sleep(0.01)
    agents[receiver].send({"kind": "stop", "grace_s": 30, "reason": "preempted"})
    assert [warm.wait(pid) for pid in pids] == [75, 75]
    for rank in range(2):
        assert (ended(folder, rank).outcome, ended(folder, rank).step) == ("stopped", steps)
    assert [line.step for line in journal(folder) if isinstance(line, CheckpointLine)] == [steps]
    for agent in agents:
        agent.close()

    path.with_suffix(".away").rename(path)
    ends, stopped_at = {}, whole_checkpoint(folder)
    for name, generation, resume in (
        ("scratch", 1, None),
        ("checkpoint", 1, stopped_at),
        ("memory", 3, None),  # the store that brought no shard took no checkpoint either, and generation 2 never began
    ):
        if generation > 1:
            (tmp_path / "left").mkdir()
            (folder / "checkpoints").rename(tmp_path / "left" / "g1")
        gang = Gang(warm, tmp_path / name, launch(name, generation, resume_folder=resume), 1)
        assert gang.wait() == [0], gang.logs()
        started = next(line for line in journal(tmp_path / name) if isinstance(line, StartedLine))
        assert (started.resumed_from, started.step) == (name, 0 if name == "scratch" else steps)
        ends[name] = (whole_checkpoint(tmp_path / name) / "digests-0.json").read_bytes()
    assert ends["checkpoint"] == ends["memory"] == ends["scratch"]


def steps_done(folder: Path, rank: int) -> int:
    """Return the last step that a rank reported as done."""
    ring = RingReader.open(folder / ring_name(rank))
    beat = None if ring is None else ring.beat()
    return 0 if beat is None else beat.step


def test_a_stop_without_a_checkpoint_ends_at_once(warm: Warm, dataset: Dataset, code: Path, tmp_path: Path) -> None:
    folder = tmp_path / "g1"
    agent = FakeAgent(tmp_path / "agent.sock")
    launch = write_launch(folder, request(training={"epochs": 100_000}), dataset, code, socket_path=agent.path)
    gang = Gang(warm, folder, launch, 1)
    agent.wait_for_hellos(1)
    agent.send({"kind": "stop", "grace_s": 0, "checkpoint": False, "reason": "cancelled"})
    assert gang.wait() == [75]
    assert ended(folder).outcome == "stopped"
    agent.close()


def test_a_killed_rank_records_its_exit_code_and_its_peer_fails(
    warm: Warm, dataset: Dataset, code: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "g1"
    agent = FakeAgent(tmp_path / "agent.sock")
    spec = request(training={"epochs": 100_000, "checkpoint_every_steps": 5})
    launch = write_launch(folder, spec, dataset, code, world_size=2, socket_path=agent.path)
    gang = Gang(warm, folder, launch, 2)
    with agent.changed:
        assert agent.changed.wait_for(lambda: agent.rings >= 4, 300)
    os.kill(gang.pids[1], 9)
    assert gang.wait() == [1, -9]
    assert (folder / "rank_1.exit").read_text().strip() == "-9"
    assert ended(folder).outcome == "failed"
    assert "lost contact with another rank" in ended(folder).error
    agent.close()


BAD_TASKS = [
    ("not there", "x = 1", "gone:Linear", {}, "there is no module 'gone' in the code package (its modules: task)"),
    ("no class", "x = 1", "task:Linear", {}, "Linear is not there"),
    ("no task", "class Linear: pass", "task:Linear", {}, "is no subclass of trainbus.Task"),
    ("needs a package", "import no_such_package", "task:Linear", {}, "needs the module 'no_such_package'"),
    ("syntax", "def f(:", "task:Linear", {}, "SyntaxError: invalid syntax (task.py:1)"),
    (
        "exits",
        "raise SystemExit(3)",
        "task:Linear",
        {},
        "SystemExit: 3 (task.py:1): task 'task:Linear' does",
    ),
    ("methods", "from trainbus import Task\nclass Linear(Task): pass", "task:Linear", {}, "lacks model(), loss()"),
    ("params", LINEAR_TASK, "task:Linear", {"lrr": 1}, "params do not fit Linear(lr=0.05"),
    (
        "loss",
        LINEAR_TASK.replace("return F.cross_entropy(model(batch[0]), batch[1])", "return model(batch[0])"),
        "task:Linear",
        {},
        "loss() must return a scalar tensor (a mean), not (16, 3)",
    ),
    (
        "decode",
        LINEAR_TASK.replace('sample["cls"]', 'sample["label"]'),
        "task:Linear",
        {},
        "KeyError: 'label' (task.py:26, in decode): Linear.decode() failed; the sample has the fields bin, cls",
    ),
    (
        "diverges",
        LINEAR_TASK.replace("return F.cross_entropy(model", "return float('nan') * F.cross_entropy(model"),
        "task:Linear",
        {},
        "train/loss is nan at step 1: lower the learning rate",
    ),
]


@pytest.mark.parametrize(
    ("source", "name", "params", "message"), [case[1:] for case in BAD_TASKS], ids=[case[0] for case in BAD_TASKS]
)
def test_an_invalid_task_fails_and_names_what_to_change(
    warm: Warm, dataset: Dataset, tmp_path: Path, source: str, name: str, params: dict[str, Any], message: str
) -> None:
    code, folder = write_task(tmp_path / "bad", source), tmp_path / "g1"
    launch = write_launch(folder, request(task=name, params=params), dataset, code)
    assert Gang(warm, folder, launch, 1).wait() == [1]
    line = ended(folder)
    assert line.outcome == "failed"
    assert message in line.error
    # What the same code may survive (its data, its numbers, what it does at import) is tried again.
    assert line.permanent is not any(word in message for word in ("KeyError", "SystemExit", "is nan"))


CLASSIFIER = (
    LINEAR_TASK[: LINEAR_TASK.index("    def metrics")]
    + """
    kind = "classification"

    def predict(self, model, batch):
        probabilities = model(batch[0]).softmax(1)
        side = ["left" if value < 0 else "right" for value in batch[0][:, 0].tolist()]
        return {
            "prediction": probabilities.argmax(1), "target": batch[1], "probabilities": probabilities, "side": side
        }

    def summarize(self, predictions):
        return {"left": (predictions["side"] == "left").mean(), "samples": len(predictions["id"])}
"""
)


def test_evaluation_is_the_same_for_any_number_of_ranks_and_for_a_sharded_model(
    warm: Warm, dataset: Dataset, tmp_path: Path
) -> None:
    code = write_task(tmp_path / "code", CLASSIFIER)
    folder = tmp_path / "train"
    launch = write_launch(folder, request(training={"epochs": 3}), dataset, code)
    assert Gang(warm, folder, launch, 1).wait() == [0]
    checkpoint = next(line for line in reversed(journal(folder)) if isinstance(line, CheckpointLine))
    results, tables = [], []
    # Of three ranks the last has no samples of its own.
    for world_size, strategy in ((1, "ddp"), (2, "ddp"), (3, "fsdp2")):
        folder = tmp_path / f"evaluate{world_size}"
        target = {"run_id": "rtest", "checkpoint_uri": "s3://models/x/rtest/checkpoints/step_1.json"}
        spec = request(
            kind="evaluate", evaluate={**target, "metric": "macro_f1"}, training={"epochs": 3, "strategy": strategy}
        )
        launch = write_launch(folder, spec, dataset, code, world_size=world_size, resume_folder=Path(checkpoint.folder))
        gang = Gang(warm, folder, launch, world_size)
        assert gang.wait() == [0] * world_size, gang.logs()
        result = journal(folder)[-2]
        assert isinstance(result, ResultLine)
        assert result.artifacts == ("predictions.parquet",)
        results.append(result.metrics)
        predictions = Predictions(folder / "predictions.parquet")
        assert predictions.info == PredictionsInfo(
            dataset_id=dataset.dataset_id,
            split="test",
            classes=("a", "b", "c"),
            kind="classification",
            score_of="accuracy",
        )
        assert predictions.slice_columns == ("side", "class")
        tables.append(predictions.table())
        assert not list(folder.glob(".predictions*"))
    # A model in shards is not served as it lies; the others' latency is no result to be repeated.
    assert [result.pop("test/latency_ms", 0) > 0 for result in results] == [True, True, False]
    assert results[0] == results[1] == pytest.approx(results[2], rel=1e-6)
    assert tables[0].equals(tables[1])
    assert tables[0].drop_columns("probabilities").equals(tables[2].drop_columns("probabilities"))
    whole = tables[0]
    assert whole["id"].to_pylist() == list(dataset.split("test").keys(range(17)))
    assert results[0]["test/accuracy"] == pytest.approx(sum(whole["score"].to_pylist()) / 17)
    assert results[0]["test/left"] == pytest.approx(whole["side"].to_pylist().count("left") / 17)
    assert results[0]["test/samples"] == 17
    assert set(results[0]) == {
        f"test/{name}" for name in ("loss", "accuracy", "macro_f1", "auc", "calibration_error", "left", "samples")
    }


def test_a_cold_rank_runs_and_sigterm_stops_it(dataset: Dataset, code: Path, tmp_path: Path) -> None:
    folder = tmp_path / "g1"
    agent = FakeAgent(tmp_path / "agent.sock")
    spec = request(training={"epochs": 100_000, "checkpoint_every_steps": 5})
    launch = write_launch(folder, spec, dataset, code, socket_path=agent.path)
    process = start_rank(rank_env(launch, 0, 1, 0), folder / "rank_0.log")
    with agent.changed:  # the doorbell after "started" and after the first checkpoint
        assert agent.changed.wait_for(lambda: agent.rings >= 2, 300)
    process.terminate()
    assert process.wait(120) == 75
    assert [line.step for line in journal(folder) if isinstance(line, CheckpointLine)][-1] == ended(folder).step
    agent.close()


def test_the_warm_process_answers_ping_and_explains_bad_requests(warm: Warm, tmp_path: Path) -> None:
    assert warm.ask(op="ping") == {"op": "pong", "pid": warm.process.pid}
    assert "no op 'dance'" in warm.ask(op="dance")["error"]
    assert "KeyError" in warm.ask(op="fork", id="x")["error"]
    answer = warm.ask(op="fork", id="y", env={}, cwd=str(tmp_path / "no"), log=str(tmp_path / "l"), exit_file="e")
    assert "NotADirectoryError" in answer["error"]
