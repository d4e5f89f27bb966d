"""A training state three times as large as the memory of a rank: built, trained, saved, restored, evaluated.

    python -m loadtest.rank_memory [--width 768] [--blocks 18] [--worlds 9 8]

Each rank first trains a small model to the end, so that its libraries, threads and connections are there. What it uses
then, and a third of the state, is the address space that it may have from there on (RLIMIT_AS). ``worlds[0]`` ranks
build the model, take a step and save; ``worlds[1]`` ranks restore it, take another step and save; as many evaluate it.
The same without a limit must give the same digests and metrics; there, the evaluation runs whole on a single rank.

The peaks are those of the largest rank, above what it used before the stage's model. Beside them stands what
``torch.distributed.checkpoint`` takes to save and to load the same shards.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import resource
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the ranks, which are forked, need not import it each
import torch._meta_registrations
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn import functional as F

from contracts.ranks import Launch
from contracts.spec.training import Training
from loadtest.common import report
from tests.trainbus.support import linear_dataset, request
from trainbus.agent_link.process_exit import hard_exit
from trainbus.data.dataset import Dataset
from trainbus.evaluation.evaluate import evaluate
from trainbus.task import Task
from trainbus.trainer.start_point import StartPoint
from trainbus.trainer.step_data import StepData, TrainingData
from trainbus.trainer.strategies import ddp, fsdp2  # noqa: F401
from trainbus.trainer.trainer import Outcome, Trainer, TrainerSettings
from trainbus.trainer.world import World, seed_all

MIB = 2**20
#: Weights and the two moments of AdamW, of four bytes each.
STATE_BYTES_PER_WEIGHT = 12
SAMPLE_S = 0.02
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the model is, and how many ranks train it first and then."""

    width: int = 768
    blocks: int = 18
    worlds: tuple[int, int] = (9, 8)

    @property
    def state_bytes(self) -> int:
        """Bytes of the matrices with their moments: all but a thousandth of the state."""
        return 2 * self.blocks * self.width**2 * STATE_BYTES_PER_WEIGHT

    @property
    def limit_bytes(self) -> int:
        """Bytes that a rank may use beside its libraries, threads and connections."""
        return self.state_bytes // 3


class Block(nn.Module):
    """A residual block of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        with torch.no_grad():
            self.down.weight.mul_(0.1)

    def forward(self, x_BC: Tensor) -> Tensor:
        out_BC: Tensor = x_BC + self.down(F.gelu(self.up(x_BC)))
        return out_BC


class DeepMLP(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x_BC: Tensor) -> Tensor:
        x_BC = self.first(x_BC)
        for block in self.blocks:
            x_BC = block(x_BC)
        logits_BK: Tensor = self.last(x_BC)
        return logits_BK


class Classes(Task):
    """Three classes of eight numbers."""

    def __init__(self, width: int, blocks: int) -> None:
        self.width, self.blocks = width, blocks

    def model(self) -> nn.Module:
        return DeepMLP(self.width, self.blocks)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.001)

    def decode(self, sample: dict[str, bytes]) -> tuple[Tensor, int]:
        return torch.frombuffer(bytearray(sample["bin"]), dtype=torch.float32), int(sample["cls"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="none")}


class MemoryMeter:
    """The peaks of a process's memory by stage, above what it used when the meter was made."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, int]] = {}
        self._libc = ctypes.CDLL(None)
        self.restart()
        # One thread for all stages: under a limit, each would take address space for its stack.
        threading.Thread(target=self._sample, daemon=True).start()

    def restart(self) -> None:
        """Forget the stages, and measure from what is used now."""
        gc.collect()
        self._libc.malloc_trim(0)
        self.stages.clear()
        self._base = self._read()
        self._anonymous: list[int] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure a stage. Calls of the same name count as one."""
        self._libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        self._anonymous = []
        yield
        used = self._read()
        found = {
            "peak_bytes": used["VmHWM"] - self._base["VmRSS"],
            "anonymous_bytes": max(*self._anonymous, used["RssAnon"], 0) - self._base["RssAnon"],
        }
        before = self.stages.get(name, found)
        self.stages[name] = {key: max(value, before[key]) for key, value in found.items()}

    def _sample(self) -> None:
        while True:
            samples = self._anonymous  # of the stage that the sample is taken in
            samples.append(self._read()["RssAnon"])
            threading.Event().wait(SAMPLE_S)

    @staticmethod
    def _read() -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
        return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS", "RssAnon")}


class MeteredTrainer(Trainer):
    """A trainer whose steps and last checkpoint are stages of a meter."""

    meter: MemoryMeter

    def _train_step(self, data: StepData, *others: Any) -> None:
        with self.meter.stage("step"):
            super()._train_step(data, *others)

    def _end_training(self, early: bool) -> Outcome:
        with self.meter.stage("save"):
            return super()._end_training(early)


@dataclass(frozen=True, slots=True)
class Generation:
    """What the ranks of one generation do, in a folder of their own."""

    folder: Path
    dataset: Dataset
    sizes: Sizes
    world_size: int
    kind: str = "train"
    steps: int = 1
    strategy: str = "fsdp2"
    resume_folder: Path | None = None
    #: Bytes that a rank may use beyond what it uses when it is warm; None: no limit.
    limit_bytes: int | None = None
    #: Where ``torch.distributed.checkpoint`` saves the state that was trained, or loads it from.
    dcp_folder: Path | None = None

    @property
    def is_measured(self) -> bool:
        return self.limit_bytes is not None or self.dcp_folder is not None

    @property
    def training(self) -> dict[str, Any]:
        return {"max_steps": self.steps, "global_batch": 72, "strategy": self.strategy, "checkpoint_every_s": 1e6}

    def train(self, world: World, meter: MemoryMeter) -> dict[str, Any]:
        training, task = Training.model_validate(self.training), Classes(self.sizes.width, self.sizes.blocks)
        settings = TrainerSettings(self.folder, about={"run_id": "large"})
        with meter.stage("build" if self.resume_folder is None else "restore"):
            start = StartPoint(world, run_id="large", resume_folder=self.resume_folder)
            data = TrainingData(task, self.dataset, training)
            trainer = MeteredTrainer(task, data, training, settings, start=start, world=world)
        del start
        trainer.meter = meter
        trainer.fit()
        if self.dcp_folder is not None:
            strategy = trainer.strategy
            del trainer
            gc.collect()
            self._run_dcp(strategy.model, strategy.optimizer, meter)
        return {}

    def _run_dcp(self, model: nn.Module, optimizer: torch.optim.Optimizer, meter: MemoryMeter) -> None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        name, run = ("DCP save", dcp.save) if self.resume_folder is None else ("DCP load", dcp.load)  # type: ignore[attr-defined]
        with meter.stage(name):
            run(state, checkpoint_id=self.dcp_folder)

    def evaluate(self, world: World, meter: MemoryMeter) -> dict[str, Any]:
        target = {"run_id": "large", "checkpoint_uri": "s3://models/large", "split": "test"}
        spec = request(kind="evaluate", evaluate=target, training={**self.training, "epochs": None})
        launch = Launch(
            run_id="evaluated", generation=1, node_id="n", world_size=self.world_size, spec=spec, folder=self.folder,
            socket=self.folder / "socket", resume_folder=self.resume_folder,
        )  # fmt: skip
        seed_all(0, "evaluate", world.rank)
        with meter.stage("evaluate"):
            metrics, _ = evaluate(launch, Classes(self.sizes.width, self.sizes.blocks), self.dataset, world)
        return metrics

    def run(self, world: World, meter: MemoryMeter) -> dict[str, Any]:
        """Do what the generation does, on one rank; return the metrics."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return (self.evaluate if self.kind == "evaluate" else self.train)(world, meter)


class GenerationFailed(Exception):
    """A rank failed; the text is the traceback of the first one that did."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank of a generation measured."""

    metrics: dict[str, float]
    stages: dict[str, dict[str, int]] = field(default_factory=dict)


def run_ranks(generation: Generation) -> list[RankResult]:
    """Run a generation in processes that are forked from this one; return the result of each rank.

    Raises:
        GenerationFailed: a rank failed.
    """
    generation.folder.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_run_rank, args=(rank, generation)) for rank in range(generation.world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    errors = sorted(generation.folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    if errors:  # the others have lost their connection to the first
        raise GenerationFailed(f"{errors[0].name}: {errors[0].read_text()}")
    return [
        RankResult(**json.loads((generation.folder / f"result-{rank}").read_text()))
        for rank in range(generation.world_size)
    ]


def _run_rank(rank: int, generation: Generation) -> None:
    folder, code = generation.folder, 1
    try:
        gc.freeze()  # no collection looks at, and so copies, what the ranks share
        torch.set_num_threads(1)
        if generation.is_measured:
            _tame_allocator()
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=generation.world_size)
        world = World(rank, generation.world_size)
        meter = _warm_up(generation, world)
        if generation.limit_bytes is not None:
            limit_address_space(generation.limit_bytes)
        metrics = generation.run(world, meter)
        (folder / f"result-{rank}").write_text(json.dumps({"metrics": metrics, "stages": meter.stages}))
        world.wait_for_all()
        code = 0
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        hard_exit(code)


def _tame_allocator() -> None:
    """Give freed tensors back to the system at once, so that what is used is what is counted."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_ARENA_MAX, 1)
    libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)


def _warm_up(generation: Generation, world: World) -> MemoryMeter:
    """Do all that the generation may do with a small model; return a meter that begins after it."""
    folder, saved = generation.folder / "warm", generation.folder / "warm-checkpoint"
    meter = MemoryMeter()
    small = replace(generation, sizes=Sizes(16, 2), strategy="fsdp2", dcp_folder=folder / "dcp")
    replace(small, folder=folder / "first", kind="train", steps=1, resume_folder=None).run(world, meter)
    if world.is_first:
        link_checkpoint(folder / "first", saved)
    world.wait_for_all()
    replace(small, folder=folder / "second", kind="train", steps=2, resume_folder=saved).run(world, meter)
    replace(small, folder=folder / "evaluated", kind="evaluate", resume_folder=saved).run(world, meter)
    world.wait_for_all()
    meter.restart()
    return meter


def limit_address_space(extra_bytes: int) -> None:
    """Limit this process to what it uses now and ``extra_bytes``."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, resource.RLIM_INFINITY))


def link_checkpoint(folder: Path, whole: Path) -> Path:
    """Link the ranks' files of a generation's last checkpoint in one folder."""
    parts = sorted((folder / "checkpoints").glob("step_*"))
    last = parts[-1].name.partition("-")[0]
    whole.mkdir()
    for part in parts:
        for path in part.iterdir() if part.name.startswith(f"{last}-") else ():
            os.link(path, whole / path.name)
    return whole


def read_digests(whole: Path) -> dict[str, str]:
    """Return the digest of each tensor of a checkpoint."""
    return {
        name: found for path in whole.glob("digests-*.json") for name, found in json.loads(path.read_text()).items()
    }


@dataclass(frozen=True, slots=True)
class Life:
    """What came out of a run: of its two checkpoints, its evaluation, and the memory of its ranks."""

    #: Digests by tensor, of the first generation's checkpoint and of the second's.
    digests: tuple[dict[str, str], dict[str, str]]
    metrics: dict[str, float]
    #: The largest rank's peaks by stage.
    stages: dict[str, dict[str, int]]


def run_life(folder: Path, sizes: Sizes, *, limit_bytes: int | None, with_dcp: bool = False) -> Life:
    """Train, save, restore on another number of ranks, train, save and evaluate; under a limit, in shards throughout.

    Raises:
        GenerationFailed: a rank failed; "can't allocate memory" where it did not keep to the limit.
    """
    dataset = linear_dataset(folder / "data", train=200, validation=0, test=64)
    dcp_folder = folder / "dcp" if with_dcp else None
    stages: dict[str, dict[str, int]] = {}

    def run(name: str, world_size: int, **others: Any) -> list[RankResult]:
        generation = Generation(folder / name, dataset, sizes, world_size, limit_bytes=limit_bytes, **others)
        found = run_ranks(generation)
        for result in found:
            for stage, peaks in result.stages.items():
                before = stages.setdefault(stage, peaks)
                stages[stage] = {key: max(value, before[key]) for key, value in peaks.items()}
        return found

    before, after = sizes.worlds
    run("first", before, dcp_folder=dcp_folder)
    saved = link_checkpoint(folder / "first", folder / "saved")
    run("second", after, steps=2, resume_folder=saved, dcp_folder=dcp_folder)
    trained = link_checkpoint(folder / "second", folder / "trained")
    world_size = 1 if limit_bytes is None else after
    [result, *_] = run("evaluated", world_size, kind="evaluate", steps=2, resume_folder=trained)
    return Life((read_digests(saved), read_digests(trained)), result.metrics, stages)


def measure(sizes: Sizes, folder: Path) -> tuple[list[tuple[str, str, str]], dict[str, Any]]:
    """Return the rows and the figures of the report."""
    limited = run_life(folder / "limited", sizes, limit_bytes=sizes.limit_bytes)
    free = run_life(folder / "free", sizes, limit_bytes=None, with_dcp=True)
    peaks = {stage: found["peak_bytes"] for stage, found in limited.stages.items()}
    dcp_peaks = {stage: free.stages[f"DCP {stage}"]["peak_bytes"] for stage in ("save", "load")}
    ratios = {
        "save": peaks["save"] / dcp_peaks["save"],
        "restore": peaks["restore"] / dcp_peaks["load"],
    }
    equal = {
        "first checkpoint": limited.digests[0] == free.digests[0],
        "second checkpoint": limited.digests[1] == free.digests[1],
        "evaluation": limited.metrics == free.metrics,
    }
    state_mib, limit_mib = sizes.state_bytes / MIB, sizes.limit_bytes / MIB
    rows = [("state, and what a rank may use", f"{state_mib:.0f} MiB", f"{limit_mib:.0f} MiB a rank")]
    rows += [(f"peak of a rank: {stage}", f"{peak / MIB:.0f} MiB", "") for stage, peak in peaks.items()]
    rows += [(f"DCP: {stage}", f"{peak / MIB:.0f} MiB", "") for stage, peak in dcp_peaks.items()]
    rows += [(f"{stage} against DCP", f"{ratio:.2f}", "1") for stage, ratio in ratios.items()]
    rows += [(f"{name} equal to that without a limit", str(found), "True") for name, found in equal.items()]
    return rows, {
        "worlds": sizes.worlds,
        "state_bytes": sizes.state_bytes,
        "limit_bytes": sizes.limit_bytes,
        "limited": limited.stages,
        "free": free.stages,
        "against_dcp": ratios,
        "equal": equal,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=Sizes().width)
    parser.add_argument("--blocks", type=int, default=Sizes().blocks)
    parser.add_argument("--worlds", type=int, nargs=2, default=Sizes().worlds)
    options = parser.parse_args(arguments)
    sizes = Sizes(options.width, options.blocks, (options.worlds[0], options.worlds[1]))
    with tempfile.TemporaryDirectory(prefix="trainbus-rank-memory-") as name:
        rows, figures = measure(sizes, Path(name))
    report("rank-memory", rows, figures)
    assert all(figures["equal"].values())


if __name__ == "__main__":
    main()
