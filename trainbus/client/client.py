"""``from trainbus import Client``: what a program does with a stack, sync and async.

::

    with Client() as client:
        run = client.submit("examples/digits", "task:Digits", data="s3://lake/digits/", slots="1..4", epochs=3)
        client.wait(run)
        losses = client.metrics(run)["train/loss"]
        client.fetch(run, "weights")
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar, Unpack

from contracts import streams, subjects
from trainbus.client import run_list
from trainbus.client.address import StackAddress, locate_stack
from trainbus.client.connection import Connection, connect
from trainbus.client.errors import NotFoundError, RunFailedError, TrainbusError, UsageError
from trainbus.client.run_filter import RunFilter
from trainbus.client.submit_options import SubmitOptions
from trainbus.client.views import ModelView, NodeView, RunView

# What reads or publishes events is imported where it is used: the questions that are asked most need none of it.
if TYPE_CHECKING:
    from contracts.events.capacity import PolicyAdopted
    from contracts.events.train import DrainRequested, UndrainRequested
    from contracts.scheduling import Policy
    from trainbus.client.checkpoints import StoredCheckpoint
    from trainbus.client.comparison import Comparison
    from trainbus.client.explanation import Explanation
    from trainbus.client.lake import ObjectList
    from trainbus.client.lake_transfer import PutResult
    from trainbus.client.model_folder import FetchedModel
    from trainbus.client.policy import AdoptedPolicy
    from trainbus.client.resumption import ResumedRun
    from trainbus.client.run_files import FetchedCheckpoint
    from trainbus.client.runs import MetricPoint
    from trainbus.client.stored_event import StoredEvent
    from trainbus.client.submission import SubmittedRun
    from trainbus.datasets.history import DatasetRecord

T = TypeVar("T")
P = ParamSpec("P")
#: A run's id, the unique start of one, or its name; or what ``submit`` and ``run`` return.
RunRef: TypeAlias = "str | SubmittedRun | RunView"
#: What a model has of its champion.
CHAMPION_FIELDS = ("version", "run_id", "metrics", "reason", "promoted_at", "checkpoint_uri")
#: Seconds for which the scheduler's answer to a request is awaited.
ANSWER_TIMEOUT_S = 5.0

_log = logging.getLogger("trainbus.client")


class AsyncClient:
    """A connection to one stack: ``async with AsyncClient() as client``.

    ``data_dir`` names an embedded stack. Without it the client uses the stack that TRAINBUS_GATEWAY_URL and the other
    TRAINBUS_* variables name, else the embedded stack of this folder or one above it, as the command line does.

    Methods that take a run accept its id, the unique start of one, its name, or what ``submit`` returned, and raise
    NotFoundError if there is no such run. Every method raises StackUnreachableError if the gateway or the object store
    does not answer.
    """

    def __init__(self, stack: Path | str | None = None, *, address: StackAddress | None = None) -> None:
        """``stack``: a gateway's URL, or the data folder of an embedded stack; default: as the commands find it."""
        self.address = address or locate_stack(stack)
        self._stack = AsyncExitStack()
        self._connection: Connection | None = None

    async def __aenter__(self) -> Self:
        self._connection = await self._stack.enter_async_context(connect(self.address, _log.warning))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection = None
        await self._stack.__aexit__(kind, error, trace)

    @property
    def connection(self) -> Connection:
        """The open connection to the gateway."""
        if self._connection is None:
            raise TrainbusError("the client is not connected: use it in `async with AsyncClient() as client`")
        return self._connection

    # -- submit ------------------------------------------------------------------

    async def submit(
        self,
        project: Path | str | type | None = None,
        task: str | None = None,
        **options: Unpack[SubmitOptions],
    ) -> SubmittedRun:
        """Pack and upload a project, request its training and return the run.

        ``project`` is the folder with the code, or a Task class that is defined in a file. ``task`` is ``module:Class``
        in that folder. SubmitOptions describes the options: ``command`` runs a program instead; ``request`` is a
        train.requested (a mapping or a JSON file), which the others override; ``init_from`` names a checkpoint as
        ``fetch`` does; the same ``event_id`` is the same run, however often it is submitted.

        Before the upload it imports the Task in a process of its own, binds its params and tries one step on a sample
        of data that lies here, or of a dataset that the gateway has; ``check=False`` skips that.

        Raises:
            UsageError: the request is not valid, or the Task cannot run; nothing was sent.
        """
        from trainbus.client.opened_submission import open_submission
        from trainbus.client.submission import SubmittedRun

        async with open_submission(self.connection, self.address, project, task, options) as opened:
            outcome = await opened.check(opened.request)
        request = await opened.upload()
        sent = await self.connection.publish_request(request, options.get("event_id"))
        assert sent.run_id is not None
        found = outcome.unchecked, outcome.notes
        return SubmittedRun(sent.run_id, request.name, sent.event_id, request, opened.package, *found)

    # -- runs --------------------------------------------------------------------

    async def find_run(self, run: RunRef) -> str:
        """Return the id of a run."""
        return await run_list.find_run(self.connection, run) if isinstance(run, str) else run.run_id

    async def runs(self, *, include_ended: bool = True, matching: RunFilter | None = None) -> list[RunView]:
        """Return the runs in the order of their requests. Without ``include_ended``: only the newest 20 that ended."""
        return await run_list.list_runs(self.connection, include_ended=include_ended, matching=matching)

    async def run(self, run: RunRef) -> RunView:
        """Return one run as it stands, with its timeline."""
        return await run_list.read_run(self.connection, await self.find_run(run))

    async def wait(self, run: RunRef, *, timeout_s: float | None = None, check: bool = True) -> RunView:
        """Wait until a run has ended and, where an evaluation is due, its verdict is out; return its last state.

        Raises:
            RunFailedError: it did not complete, and ``check`` is set.
            TimeoutError: it has not ended after ``timeout_s`` seconds.
        """
        from trainbus.client import runs

        run_id = await self.find_run(run)
        async with asyncio.timeout(timeout_s):
            async for _ in runs.follow_run(self.connection, run_id):
                pass
            view = await run_list.read_run(self.connection, run_id)
        if check and view.state != "completed":
            raise RunFailedError(run_id, view.state, view.reason)
        return view

    async def why(self, run: RunRef) -> Explanation:
        """Return why a run is in its state."""
        from trainbus.client import explanation

        return await explanation.explain_run(self.connection, await self.find_run(run))

    async def cancel(self, run: RunRef, reason: str = "cancelled by request") -> str | None:
        """Stop a run for good and return the scheduler's answer, None if it has not answered after 5 s.

        The run's checkpoints stay.

        Raises:
            UsageError: it has ended already.
        """
        from contracts.events.train import CancelRequested
        from contracts.texts import describe
        from trainbus.client import runs

        run_id = await self.find_run(run)
        if (end := await runs.read_end(self.connection, run_id)) is not None:
            raise UsageError(f"run {run_id} has ended already: {describe(end)}")
        start = await self.connection.last_sequence(streams.FACTS) + 1
        await self.connection.publish_request(CancelRequested(run_id=run_id, reason=reason))
        return await self._wait_for_answer(start, subjects.run(run_id), "cancelled", "cancelling", "stopping")

    async def restore(
        self, run: RunRef, *, step: int | None = None, epoch: int | None = None
    ) -> tuple[str, str | None]:
        """Request a new run from a checkpoint of another; return its id and the scheduler's answer, None after 5 s.

        The checkpoint is that of ``step``, the last of ``epoch``, or the one that ``run`` names: RUN@STEP, RUN@best,
        RUN@last.

        Raises:
            UsageError: the checkpoint is named twice, or not at all.
            NotFoundError: the run has no such checkpoint.
        """
        from contracts.events.train import RestoreRequested

        run_id, step = await self._find_restorable(run, step, epoch)
        start = await self.connection.last_sequence(streams.FACTS) + 1
        restored = (await self.connection.publish_request(RestoreRequested(run_id=run_id, step=step))).run_id
        assert restored is not None
        return restored, await self._wait_for_answer(start, subjects.run(restored), "accepted", "rejected")

    async def _find_restorable(self, run: RunRef, step: int | None, epoch: int | None) -> tuple[str, int]:
        """Return a run and the step of its checkpoint."""
        from trainbus.client import checkpoints

        name = checkpoints.CheckpointName.parse(run) if isinstance(run, str) else None
        if (step is not None) + (epoch is not None) + bool(name and name.mark) != 1:
            raise UsageError("name one checkpoint: RUN@best, RUN@last or RUN@STEP, or a step, or an epoch")
        if name and name.mark:
            stored = await checkpoints.find_checkpoint(self.connection, f"{name.run}@{name.mark}")
            return stored.commit.run_id, stored.step
        run_id = await self.find_run(run)
        known = [each.commit.checkpoint for each in await checkpoints.list_checkpoints(self.connection, run_id)]
        found = [each.step for each in known if each.step == step or each.epoch == epoch]
        if not found:
            steps = ", ".join(f"{each.step} (epoch {each.epoch})" for each in known)
            raise NotFoundError(f"run {run_id} has no such checkpoint; it has steps {steps or '(none)'}")
        return run_id, found[-1]

    async def resume(
        self,
        run: RunRef,
        *,
        start: str = "last",
        epochs: int | None = None,
        max_steps: int | None = None,
        params: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        command: str | Sequence[str] | None = None,
        name: str | None = None,
    ) -> ResumedRun:
        """Request a new run that goes on from a checkpoint of another, for longer or with other settings.

        ``start`` is ``best``, ``last`` or a step. ``epochs`` and ``max_steps`` count from the parent's start; a script
        counts its own and gets another ``command`` or variable instead. ``params`` and ``env`` are merged over the
        parent's.

        Raises:
            UsageError: nothing would be left to train, or the run cannot see a change; nothing was sent.
            NotFoundError: the run has no such checkpoint.
        """
        from pydantic import ValidationError

        from contracts.events.train import TrainRequested
        from contracts.resumption import ResumptionChanges, ResumptionError, plan_resumption
        from trainbus.client import checkpoints, resumption
        from trainbus.client.errors import invalid_request
        from trainbus.client.submission import parse_command

        given: dict[str, Any] = {"epochs": epochs, "max_steps": max_steps, "name": name}
        given |= {"params": dict(params or {}), "env": dict(env or {})}
        given["command"] = None if command is None else parse_command(command)
        checkpoints.CheckpointName.parse(f"run@{start}")
        run_id = await self.find_run(run)
        stored = await checkpoints.find_run_checkpoint(self.connection, run_id, start)
        view = await self.run(run_id)
        assert view.spec is not None
        point = stored.as_resumption_point(is_completed=view.state == "completed")
        try:
            changes = ResumptionChanges.model_validate(given)
            request = plan_resumption(view.spec, point, changes, view.dataset_id)
        except ResumptionError as error:
            raise UsageError(str(error)) from error
        except ValidationError as error:
            raise invalid_request(error, given, TrainRequested) from error
        first = await self.connection.last_sequence(streams.FACTS) + 1
        resumed = (await self.connection.publish_request(request)).run_id
        assert resumed is not None
        answer = await self._wait_for_answer(first, subjects.run(resumed), "accepted", "rejected")
        has_ended_well = point.is_completed and start == checkpoints.LAST
        return resumption.ResumedRun(
            run_id=resumed,
            name=request.name,
            parent_run_id=run_id,
            step=stored.step,
            epoch=stored.commit.checkpoint.epoch,
            point=stored.commit.checkpoint.point,
            note=resumption.describe_changes(view.spec, request, stored),
            answer=answer,
            warning=resumption.describe_unseen_changes(view.spec, request, has_ended_well=has_ended_well),
        )

    # -- what a run has said -------------------------------------------------------

    async def events(
        self, run: RunRef | None = None, *, follow: bool = False, start_sequence: int | None = None, tail: int = 50
    ) -> AsyncGenerator[StoredEvent, None]:
        """Yield the facts of a run, or of the whole stack, in the order of the log.

        Without a run and ``start_sequence`` it begins with the last ``tail`` facts. With ``follow`` it goes on as facts
        come, until the caller stops: after a run's end its evaluation, tracking and promotion may follow.
        """
        filters: tuple[str, ...] = ()
        if run is not None:
            filters = (subjects.run(await self.find_run(run)),)
        elif start_sequence is None:
            start_sequence = max(1, await self.connection.last_sequence(streams.FACTS) - tail + 1)
        async for batch in self.connection.follow(
            streams.FACTS, *filters, start_sequence=start_sequence or 1, until_caught_up=not follow
        ):
            for message in batch:
                yield message

    async def logs(
        self,
        run: RunRef,
        *,
        follow: bool = False,
        rank: int | None = None,
        tail: int | None = None,
        since: datetime | None = None,
        pattern: str | None = None,
    ) -> AsyncGenerator[tuple[int, str], None]:
        """Yield (rank, line) of a run's output. With ``follow`` until it has ended. The bus keeps lines for 14 days.

        ``rank``, ``since`` and ``pattern`` (a regular expression) select lines; ``tail`` the last of those there are.
        """
        from trainbus.client import runs

        run_id = await self.find_run(run)
        choice = runs.OutputChoice(rank, tail, since, pattern)
        if follow:
            async for line in runs.follow_lines(self.connection, run_id, choice):
                yield line
            return
        for line in await runs.read_output(self.connection, run_id, choice):
            yield line

    async def metrics(self, run: RunRef) -> dict[str, list[MetricPoint]]:
        """Return metric name -> points (step, value, time) in the order of their steps."""
        from trainbus.client import runs

        return await runs.read_metrics(self.connection, await self.find_run(run))

    async def compare(self, runs: Sequence[RunRef], metrics: Sequence[str] = ()) -> Comparison:
        """Return runs side by side: what differs in their requests, and their metrics.

        RUN@best, RUN@last and RUN@STEP take the metrics of that checkpoint in place of the run's last ones.
        ``metrics``: only these.

        Raises:
            UsageError: fewer than two runs are named.
        """
        from trainbus.client import checkpoints
        from trainbus.client.comparison import RunResult, compare_runs

        if len(runs) < 2:
            raise UsageError("name at least two runs to compare")
        results = []
        for ref in runs:
            label = ref if isinstance(ref, str) else ref.run_id
            name = checkpoints.CheckpointName.parse(label)
            view = await self.run(name.run)
            chosen = None
            if name.mark:
                stored = await checkpoints.find_run_checkpoint(self.connection, view.run_id, name.mark)
                chosen = stored.step, stored.metrics
            results.append(RunResult(label, view, await self.metrics(view), chosen))
        return compare_runs(results, metrics)

    # -- checkpoints ---------------------------------------------------------------

    async def checkpoints(self, run: RunRef) -> list[StoredCheckpoint]:
        """Return a run's committed checkpoints in the order of their steps, without those that were deleted."""
        from trainbus.client import checkpoints

        return await checkpoints.list_checkpoints(self.connection, await self.find_run(run))

    async def fetch(
        self, target: RunRef | StoredCheckpoint, folder: Path | str, *, manifest_sha256: str | None = None
    ) -> FetchedCheckpoint:
        """Write a checkpoint's files into a new or empty folder, every hash verified.

        ``target`` is a run (its newest checkpoint), RUN@STEP, RUN@best, RUN@last, models:/NAME@champion, a manifest's
        s3:// address, or an element of ``checkpoints``. ``manifest_sha256`` refuses any other manifest.

        Raises:
            UsageError: the folder is not empty.
            NotFoundError: there is no such checkpoint.
            TrainbusError: a file is missing, or is not what was committed.
        """
        from trainbus.client import checkpoints
        from trainbus.client.run_files import fetch_checkpoint

        if not isinstance(target, checkpoints.StoredCheckpoint):
            target = await checkpoints.find_checkpoint(
                self.connection, target if isinstance(target, str) else target.run_id
            )
        return await fetch_checkpoint(self.address, target, Path(folder), manifest_sha256)

    async def fetch_model(self, target: RunRef, folder: Path | str | None = None) -> FetchedModel:
        """Write a run's model and artifacts as plain files into a new or empty folder, every hash verified.

        ``target`` is a run (its best checkpoint where its metric is known, else its newest), or a checkpoint as
        ``fetch`` has it. The folder is named for the run unless it is given. The result has lines that load it.

        Raises:
            UsageError: the folder is not empty.
            NotFoundError: there is no such checkpoint, or the run has kept nothing.
            TrainbusError: a file is missing, or is not what was committed.
        """
        from trainbus.client.model_folder import fetch_model

        name = target if isinstance(target, str) else target.run_id
        return await fetch_model(self.connection, self.address, name, None if folder is None else Path(folder))

    async def dataset(self, name: str) -> DatasetRecord:
        """Return what the log has of a dataset: an id, the unique start of one, or the id of an ingestion or run."""
        from trainbus.client.datasets import find_dataset

        return await find_dataset(self.connection, name)

    async def put(self, path: Path | str, uri: str) -> PutResult:
        """Put a file or a folder into the store; what is there with the same content is not sent again.

        Raises:
            UsageError: there is no such path, nothing in it, or no data belongs at the address.
        """
        from trainbus.client.lake_transfer import put_files

        return await put_files(self.address, Path(path), uri)

    async def list_objects(self, uri: str | None = None, *, recursive: bool = False) -> ObjectList:
        """Return the objects and folders under an address, by default in the lake."""
        from trainbus.client import lake

        pages = [page async for page in lake.list_objects(self.address, uri, recursive=recursive)]
        folders = tuple(each for page in pages for each in page.folders)
        return lake.ObjectList(tuple(each for page in pages for each in page.objects), folders)

    # -- the cluster ---------------------------------------------------------------

    async def nodes(self) -> list[NodeView]:
        """Return the nodes and what runs on them, in the order of their names."""
        return await run_list.list_nodes(self.connection)

    async def models(self) -> list[ModelView]:
        """Return the champion of each registered model."""
        from trainbus.client.models import list_models

        found = [(each, each.champion) for each in await list_models(self.connection)]
        return [
            ModelView(
                each.model,
                **{name: getattr(champion, name) for name in CHAMPION_FIELDS},
                served_version=each.served_version,
                serving_problem=each.serving_problem,
            )
            for each, champion in found
            if champion is not None
        ]

    async def drain(self, node_id: str, reason: str = "drained by request", *, user: str | None = None) -> str | None:
        """Take a node out of use and return the scheduler's answer, None if it has not answered after 5 s.

        It stays drained until ``undrain``, whatever becomes of its agent; ``user`` is recorded with the reason.

        Raises:
            NotFoundError: there is no such node.
        """
        from contracts.events.train import DrainRequested

        return await self._change_drain(DrainRequested(node_id=node_id, reason=reason, user=user), "draining")

    async def undrain(
        self, node_id: str, reason: str = "undrained by request", *, user: str | None = None
    ) -> str | None:
        """Put a drained node back into use and return the scheduler's answer, None if it has not answered after 5 s.

        Raises:
            NotFoundError: there is no such node.
        """
        from contracts.events.train import UndrainRequested

        return await self._change_drain(UndrainRequested(node_id=node_id, reason=reason, user=user), "undrained")

    async def policy(self, digest: str = "") -> AdoptedPolicy:
        """Return the scheduler's policy in force, or an earlier one by its digest: since when, by whom and why.

        Raises:
            NotFoundError: no policy of this digest was ever in force.
        """
        from trainbus.client import policy

        return await policy.read_policy(self.connection, digest)

    async def diff_policy(self, candidate: Policy) -> dict[str, Any]:
        """Return which settings a policy changes, and what it changes about the runs of now in the next cycles.

        Raises:
            UsageError: this version of the scheduler does not take the policy.
        """
        from trainbus.client import policy

        return await policy.diff_policy(self.connection, candidate)

    async def apply_policy(
        self, candidate: Policy, reason: str, *, user: str | None = None, replaces: str | None = None
    ) -> PolicyAdopted:
        """Put a policy in force from the next cycle on; ``replaces`` is the digest of the one that it was made from.

        Raises:
            TrainbusError: it is refused, since another policy is in force by now; or no scheduler answers.
        """
        from trainbus.client import policy

        return await policy.apply_policy(self.connection, candidate, reason, user=user, replaces=replaces)

    async def _change_drain(self, request: DrainRequested | UndrainRequested, answer: str) -> str | None:
        node_id, known = request.node_id, [each.node_id for each in await self.nodes()]
        if node_id not in known:
            raise NotFoundError(f"there is no node {node_id!r}; there are {', '.join(sorted(known)) or 'none'}")
        start = await self.connection.last_sequence(streams.FACTS) + 1
        await self.connection.publish_request(request)
        return await self._wait_for_answer(start, subjects.fact("node", node_id, answer), answer)

    async def _wait_for_answer(self, start_sequence: int, subject: str, *facts: str) -> str | None:
        from contracts.texts import describe
        from trainbus.client import runs

        fact = await runs.wait_for_event(
            self.connection, start_sequence, subject, lambda event: event.fact in facts, ANSWER_TIMEOUT_S
        )
        return None if fact is None else describe(fact)


def _sync(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return the sync form of a method: the same arguments, documentation and result."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(method(self._client, *args, **kwargs))

    return call


def _sync_iterator(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    @functools.wraps(method)
    def iterate(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._iterate(method(self._client, *args, **kwargs))

    return iterate


class Client:
    """The sync client: every method is that of AsyncClient, without ``await``.

    It connects when it is made, and works where an event loop runs already (a notebook): its own runs in a thread.
    Use it in ``with Client() as client``, or call ``close``.
    """

    def __init__(self, stack: Path | str | None = None, *, address: StackAddress | None = None) -> None:
        """``stack``: a gateway's URL, or the data folder of an embedded stack; default: as the commands find it."""
        self._client = AsyncClient(stack, address=address)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trainbus-client", daemon=True)
        self._thread.start()
        try:
            self._call(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> StackAddress:
        """Where the stack is."""
        return self._client.address

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        if self._thread.is_alive():
            self._call(self._client.__aexit__(None, None, None))
            self._stop()

    submit = _sync(AsyncClient.submit)
    find_run = _sync(AsyncClient.find_run)
    runs = _sync(AsyncClient.runs)
    run = _sync(AsyncClient.run)
    wait = _sync(AsyncClient.wait)
    why = _sync(AsyncClient.why)
    cancel = _sync(AsyncClient.cancel)
    restore = _sync(AsyncClient.restore)
    resume = _sync(AsyncClient.resume)
    events = _sync_iterator(AsyncClient.events)
    logs = _sync_iterator(AsyncClient.logs)
    metrics = _sync(AsyncClient.metrics)
    checkpoints = _sync(AsyncClient.checkpoints)
    fetch = _sync(AsyncClient.fetch)
    fetch_model = _sync(AsyncClient.fetch_model)
    compare = _sync(AsyncClient.compare)
    dataset = _sync(AsyncClient.dataset)
    put = _sync(AsyncClient.put)
    list_objects = _sync(AsyncClient.list_objects)
    nodes = _sync(AsyncClient.nodes)
    models = _sync(AsyncClient.models)
    drain = _sync(AsyncClient.drain)
    undrain = _sync(AsyncClient.undrain)
    policy = _sync(AsyncClient.policy)
    diff_policy = _sync(AsyncClient.diff_policy)
    apply_policy = _sync(AsyncClient.apply_policy)

    # -- the loop in its thread ------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        async def advance() -> tuple[T, ...]:
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return ()

        try:
            while found := self._call(advance()):
                yield found[0]
        finally:
            self._call(items.aclose())

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
