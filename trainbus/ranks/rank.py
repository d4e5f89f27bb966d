"""One rank of a run: ``python -m trainbus.ranks.rank``, or the same forked from a warm process.

Reads TRAINBUS_LAUNCH, imports the task, trains or evaluates, reports through its journal, and exits with
0 (done), 75 (stopped as asked) or 1 (failed; the ``ended`` line and the log say why).
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from contracts.ranks import (
    EXIT_DONE,
    EXIT_STOPPED,
    LAUNCH_VARIABLE,
    EndedLine,
    Launch,
    RendezvousLine,
    ResultLine,
    StartedLine,
    is_about_lost_peer,
)
from contracts.tracebacks import FAILURE_PREFIX
from trainbus.agent_link.channels import AgentLink, Control, Journal
from trainbus.agent_link.process_exit import hard_exit
from trainbus.data.batch_timings import BatchTimings
from trainbus.data.dataset import Dataset
from trainbus.data.order import OrderMismatch
from trainbus.data.reader import DatasetError
from trainbus.data.shard_prefetch import ShardPrefetcher
from trainbus.data.workers import WorkerPool
from trainbus.ranks.output import drop_output_on_full_disk
from trainbus.task import Task, TaskError, describe, load_task
from trainbus.trainer.checkpoint import CheckpointError, FailureHistory
from trainbus.trainer.checkpoint.ranges import find_ranges
from trainbus.trainer.checkpoint.task_artifacts import load_artifacts
from trainbus.trainer.divergence import TrainingDiverged
from trainbus.trainer.drift import RanksDrifted
from trainbus.trainer.optimizer_state import StateMismatch
from trainbus.trainer.peers import abort_communicator, keep_process_on_errors
from trainbus.trainer.start_point import InitialWeights, StartPoint
from trainbus.trainer.step_data import TrainingData
from trainbus.trainer.survivor_state import SurvivorStore
from trainbus.trainer.trainer import Trainer, TrainerSettings
from trainbus.trainer.world import World, WorldError, limit_memory, limit_threads, seed_all

EXIT_FAILED = 1
#: Errors whose text explains them; the log gets the traceback of any other.
EXPLAINED = (
    TaskError,
    DatasetError,
    CheckpointError,
    StateMismatch,
    OrderMismatch,
    TrainingDiverged,
    RanksDrifted,
    WorldError,
)
#: Errors that the same request always causes again.
PERMANENT = (StateMismatch, OrderMismatch)


def run(env: Mapping[str, str]) -> int:
    """Run the rank that ``env`` describes to its end; return the exit code."""
    path = env.get(LAUNCH_VARIABLE)
    if not path:
        print(f"trainbus.ranks.rank is started by a node's agent, which sets {LAUNCH_VARIABLE}", file=sys.stderr)
        return EXIT_FAILED
    launch = Launch.model_validate_json(Path(path).read_bytes())
    workers = _workers(launch)  # before there are threads, and before CUDA
    world = World.from_env(env)
    journal = Journal(launch.folder / f"rank_{world.rank}.jsonl")
    control = Control()
    link = AgentLink(launch, world.rank, journal, control)
    link.stop_at_once = launch.spec.kind == "evaluate"  # it has nothing to save
    link.start()
    _write_stacks_on_signal(launch.folder / f"rank_{world.rank}.stacks")
    signal.signal(signal.SIGTERM, lambda *_: control.request_stop("SIGTERM"))
    try:
        ended = _run_task(launch, world, journal, control, env, workers)
    except BaseException as error:
        ended = _describe_failure(error, launch)
    try:
        if ended.outcome != "failed":
            world.wait_for_all()
    except RuntimeError as error:  # the work is done and on disk; a peer that is already gone changes nothing
        print(f"trainbus: the last barrier failed: {error}", flush=True)
    journal.append(ended)
    return {"succeeded": EXIT_DONE, "stopped": EXIT_STOPPED}.get(ended.outcome, EXIT_FAILED)


def _run_task(
    launch: Launch, world: World, journal: Journal, control: Control, env: Mapping[str, str], workers: WorkerPool
) -> EndedLine:
    spec = launch.spec
    limit_threads(env)
    world.bind_thread()  # before anything that names no device: communicators, pinned memory, events
    limit_memory(env, world.device)
    training = spec.training
    task = _task(launch)
    if launch.dataset_folder is None:
        raise TaskError("a task needs data: submit it with --data (a folder, s3://bucket/prefix, or a dataset's id)")
    waits = BatchTimings()
    arrival = ShardPrefetcher(
        launch.socket,
        launch.dataset_folder,
        rank=world.rank,
        generation=launch.generation,
        waits=waits,
        patience_s=math.inf,  # the node's guard ends ranks whose agent stays away
    )
    dataset = Dataset(launch.dataset_folder, launch.dataset_id, arrive=arrival.wait)
    task.classes, task.statistics = dataset.classes, dataset.statistics
    workers.set_dataset(dataset.classes, dataset.statistics)
    always = training is not None and training.strategy in ("deepspeed", "fsdp2")
    keep_process_on_errors(os.environ)
    control.on_peer_lost = abort_communicator
    world.init_process_group(env, always, lambda *found: journal.append(_rendezvous_line(*found)))

    if spec.kind == "evaluate":
        from trainbus.evaluation.evaluate import evaluate  # pyarrow, which a training does not need

        seed_all(0, "evaluate", world.rank)
        journal.append(
            StartedLine(time=time.time(), step=launch.resume.step if launch.resume else 0, samples_consumed=0)
        )
        metrics, artifacts = evaluate(launch, task, dataset, world)
        journal.append(ResultLine(time=time.time(), metrics=metrics, artifacts=artifacts))
        return EndedLine(time=time.time(), outcome="succeeded")

    if launch.resume_folder is not None:
        load_artifacts(task, launch.resume_folder)
    assert training is not None, "the contract wants training for every task"
    survivors = SurvivorStore(
        launch.memory_folder,
        launch.generation,
        world.rank,
        max_bytes=launch.memory_max_bytes,
        spill_folder=launch.spill_folder,
        disk_folder=launch.survivor_dir,
    )
    trainer = Trainer(
        task,
        TrainingData(task, dataset, training, workers=workers, waits=waits, arrival=arrival),
        training,
        _settings(launch, env),
        start=_start_point(launch, world, survivors),
        world=world,
        control=control,
        journal=journal,
        survivors=survivors,
    )
    outcome = trainer.fit()
    if outcome.outcome == "succeeded":
        journal.append(ResultLine(time=time.time(), metrics=outcome.metrics))
    return EndedLine(
        time=time.time(),
        outcome=outcome.outcome,
        step=outcome.step,
        samples_consumed=outcome.samples_consumed,
        error=control.reason if outcome.outcome == "stopped" else "",
    )


def _rendezvous_line(address: str, missing: tuple[int, ...], waited_s: float) -> RendezvousLine:
    return RendezvousLine(time=time.time(), address=address, missing=missing, waited_s=waited_s)


def _task(launch: Launch) -> Task:
    return load_task(launch.spec.task or "", launch.spec.params, launch.code_folder)


def _workers(launch: Launch) -> WorkerPool:
    """Fork the processes that decode; each imports the task itself."""
    training = launch.spec.training
    count = 0 if training is None or launch.spec.kind == "evaluate" else training.loading.workers
    return WorkerPool(count, lambda: _task(launch))


def _start_point(launch: Launch, world: World, survivors: SurvivorStore) -> StartPoint:
    init = InitialWeights(launch.init_folder, launch.spec.init_exclude) if launch.init_folder else None
    return StartPoint(
        world,
        run_id=launch.run_id,
        survivors=survivors,
        resume_folder=launch.resume_folder,
        resume_step=launch.resume.step if launch.resume else 0,
        require=find_ranges(launch, world.rank),
        init=init,
    )


def _settings(launch: Launch, env: Mapping[str, str]) -> TrainerSettings:
    spec = launch.spec
    return TrainerSettings(
        launch.folder,
        about={
            "run_id": launch.run_id,
            "generation": launch.generation,
            "task": spec.task,
            "params": spec.params,
            "dataset_id": launch.dataset_id,
            "init_from": spec.init_from,
        },
        machine=launch.machine,
        best_metric=spec.retention.metric,
        best_mode=spec.retention.mode,
        watch=spec.watch,
        history=FailureHistory(launch.failures_seen, launch.run_s),
        record_samples=env.get("TRAINBUS_RECORD_SAMPLES") == "1",
    )


def _write_stacks_on_signal(path: Path) -> None:
    """Write the stack of every thread on SIGUSR2, which the agent sends when steps stop coming."""
    file = path.open("a")  # stays open for as long as the process lives
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def _describe_failure(error: BaseException, launch: Launch) -> EndedLine:
    if isinstance(error, EXPLAINED):
        text = str(error)
        print(f"{FAILURE_PREFIX}{text}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
        text = describe(error, launch.code_folder)
        if is_about_lost_peer(text):
            text = f"lost contact with another rank of this run, which says why: {text}"
    return EndedLine(
        time=time.time(),
        outcome="failed",
        error=text[:4000],
        permanent=_is_permanent(error),
        diverged=isinstance(error, (TrainingDiverged, RanksDrifted)),
        drifted_ranks=error.ranks if isinstance(error, RanksDrifted) else (),
    )


def _is_permanent(error: BaseException) -> bool:
    """Whether the same request always ends with this error."""
    return isinstance(error, PERMANENT) or (isinstance(error, TaskError) and error.is_permanent)


def main(run: Callable[[Mapping[str, str]], int] = run) -> None:
    """Run, and end the process in any case: a rank must never hang in a teardown."""
    code = EXIT_FAILED
    drop_output_on_full_disk()
    try:
        code = run(os.environ)
    except BaseException:
        traceback.print_exc()
    hard_exit(code)


if __name__ == "__main__":
    main()
