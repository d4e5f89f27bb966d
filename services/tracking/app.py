"""The shell: each fact makes MLflow match the run's facts, which are read again from the stream.

A fact only names the run to bring up to date. So a fact that comes twice, late or after a restart leads to the same
page, and one writer (a lease, a lock and a single thread) is all the coordination that MLflow needs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import nats.errors
import structlog
from nats.js.errors import APIError

from contracts import subjects, topology
from contracts.envelope import Envelope
from contracts.events.model import ModelFact, ModelPromoted, ModelStaged
from contracts.events.run import Artifact, RunCompleted, RunFact, RunTracked
from services.kit.backlog import count_unhandled
from services.kit.bus import Bus, Message, PoisonMessage, TransientError
from services.kit.exclusive import ExclusiveRole
from services.kit.service import Service
from services.kit.settings import Settings
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.tracking import metrics
from services.tracking.core import describe, points
from services.tracking.core.fold import FIRST_ATTEMPT, STATUS, Run, filters, fold
from services.tracking.core.registry import Model, Registry
from services.tracking.dvc_tag import DVC_MD5, read_dvc_md5
from services.tracking.model_builder import ModelBuilder, ModelLeftOut
from services.tracking.settings import TrackingSettings
from services.tracking.store import (
    AliasChange,
    LoggedModel,
    Page,
    PageLost,
    Store,
    TrackingRefused,
    TrackingUnavailable,
    import_mlflow,
)

log = structlog.get_logger(__name__)
T = TypeVar("T")

#: Runs kept in memory; others are read again from the stream when something happens to them.
MAX_RUNS = 2000
BEHIND_INTERVAL_S = 5.0
#: How far the import of MLflow steps back behind what else starts on this machine.
IMPORT_NICENESS = 10
#: Tries after which a call that fails while MLflow does everything else is taken for impossible.
UNCLEAR_TRIES = 10


@dataclass(slots=True)
class Attempt:
    """What MLflow has of one attempt of a run, so that only what changed is written."""

    page: Page
    cursor: points.Cursor
    tags: dict[str, str]
    heads: dict[str, int]
    status: str
    #: The parameters that MLflow has.
    params: set[str]
    params_logged: bool = False
    dataset_logged: bool = False


@dataclass(slots=True)
class TrackedRun:
    """A run and its pages."""

    run: Run
    attempts: dict[int, Attempt] = field(default_factory=dict)


class Projector:
    """Keeps MLflow in step with the facts. Use it as an async context manager."""

    def __init__(
        self,
        bus: Bus,
        settings: TrackingSettings,
        store: Store,
        stopping: asyncio.Event,
        role: ExclusiveRole | None = None,
        *,
        announces: bool = True,
    ) -> None:
        """``announces``: publish where the pages are."""
        self._bus, self._settings, self._store, self._stopping = bus, settings, store, stopping
        self._runs: OrderedDict[str, TrackedRun] = OrderedDict()
        self._live: set[str] = set()
        self._announced: set[str] = set()
        self._lock = asyncio.Lock()
        self._registry_lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        # Files of models take minutes; metrics do not wait for them.
        self._upload_thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow-files")
        self._builder = ModelBuilder(bus, settings)
        self._registry = Registry()
        self._role, self._announces = role, announces
        self.away = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The holder of the lock ends its call first; later callers find the service stopping.
        async with self._lock:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._upload_thread.shutdown(wait=False, cancel_futures=True)

    async def warm_up(self) -> None:
        """Import MLflow and open it in the background; the first call waits for it."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._open_store)

    def _open_store(self) -> None:
        # In a thread of its own, since a priority that has been lowered stays low.
        importing = threading.Thread(target=_import_at_low_priority, name="import mlflow")
        importing.start()
        importing.join()
        try:
            self._store.open()
        except Exception as error:
            log.warning("MLflow cannot be opened yet", uri=self._store.uri, error=str(error))

    # -- handlers -----------------------------------------------------------

    async def on_run_fact(self, received: Message[Any]) -> None:
        """Bring the run's pages up to date."""
        await self.project_run(received.event.run_id, received.envelope)

    async def project_run(self, run_id: str, cause: Envelope | None = None) -> None:
        """Bring a run's pages up to date with every fact that is stored.

        Raises:
            PoisonMessage: MLflow refuses it for good.
        """
        async with self._lock:
            await self._retry_after_loss(lambda: self._update(run_id, cause))

    async def on_model_promoted(self, received: Message[ModelPromoted]) -> None:
        """Bring the registry up to date."""
        await self.project_promotion(received.event)

    async def project_promotion(self, promotion: ModelPromoted) -> None:
        """Make a version of a model and copy its files, once.

        Raises:
            PoisonMessage: MLflow refuses it for good.
        """
        async with self._registry_lock:
            await self._retry_after_loss(lambda: self._promote(promotion))

    async def on_model_staged(self, received: Message[ModelStaged]) -> None:
        """Make an alias in the registry name what it names by request."""
        await self.project_aliases(received.event.model)

    async def project_aliases(self, model: str) -> None:
        """Make the aliases of a model those of the facts."""
        async with self._registry_lock:
            await self._retry_after_loss(lambda: self._show_aliases(model))

    async def watch_aliases(self) -> None:
        """Compare MLflow's aliases with the facts every minute: somebody may have moved one by hand."""
        while not self._stopping.is_set():
            await self._pause(self._settings.alias_check_interval_s)
            try:
                async with self._registry_lock:
                    await self._retry_after_loss(self._check_aliases)
            except (TimeoutError, PoisonMessage, TransientError, nats.errors.Error, APIError) as error:
                log.warning("aliases are not compared", error=str(error))

    async def follow_live(self) -> None:
        """Log the points of running commands every few seconds: nothing of theirs need ever be committed."""
        found = False
        while not self._stopping.is_set():
            try:
                if not found:
                    # Those that were running before this process started.
                    self._live.update(await self._call(self._store.live))
                    found = True
                for run_id in sorted(self._live):
                    await self._log_live_points(run_id)
            except (PoisonMessage, TransientError, TrackingRefused, PageLost) as error:
                log.warning("live metrics have to wait", error=str(error))
            await self._pause(self._settings.live_interval_s)

    async def _log_live_points(self, run_id: str) -> None:
        async with self._lock:
            await self._retry_after_loss(lambda: self._update(run_id))

    async def watch_behind(self) -> None:
        """Keep the gauge of what waits: during an outage no handler would."""
        while not self._stopping.is_set():
            with suppress(nats.errors.Error, APIError, asyncio.TimeoutError):
                metrics.BEHIND.set(await self._count_unhandled())
            await self._pause(BEHIND_INTERVAL_S)

    async def _count_unhandled(self) -> int:
        return count_unhandled(await self._bus.js.consumer_info(topology.TRACKING.stream, topology.TRACKING.name))

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not beyond the service's end."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _retry_after_loss(self, work: Callable[[], Any]) -> None:
        """Do ``work``; if MLflow has lost a page, clear what is remembered and do it once more."""
        try:
            try:
                await work()
            except PageLost as error:
                log.warning("MLflow has lost a page: read MLflow again", error=str(error))
                self._runs.clear()
                self._store.forget()
                await work()
        except (PageLost, TrackingRefused) as error:
            raise PoisonMessage(str(error)) from error

    # -- one run ------------------------------------------------------------

    async def _update(self, run_id: str, cause: Envelope | None = None) -> None:
        known = await self._catch_up(run_id)
        run = known.run
        if run.accepted is None:
            raise PoisonMessage(f"run {run_id} was never accepted on this bus, so its facts are not recorded")
        for number, generation in run.attempts():
            last = generation == run.generation
            attempt = known.attempts.get(number)
            if attempt is not None and not last and attempt.status != "RUNNING":
                continue
            attempt = attempt or await self._open(known, number, generation)
            if attempt.page.deleted:
                continue
            await self._describe(run, attempt, number, generation)
            await self._flush(run, attempt, generation)
            await self._finish(run, attempt, generation, last)
            if last and self._announces:
                await self._announce(run_id, attempt.page, cause)
        if run.live and run.ended is None:
            self._live.add(run_id)
        else:
            self._live.discard(run_id)

    async def _catch_up(self, run_id: str) -> TrackedRun:
        """The run with every fact that is stored by now."""
        known = self._runs.setdefault(run_id, TrackedRun(Run(run_id)))
        self._runs.move_to_end(run_id)
        for received in await self._bus.read_history(*filters(run_id), start_sequence=known.run.sequence + 1):
            fold(known.run, received.event, received.envelope.time, received.sequence)
        while len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)
        return known

    async def _open(self, known: TrackedRun, number: int, generation: int) -> Attempt:
        """The attempt's page: the one that is there, or a new one."""
        run = known.run
        assert run.accepted is not None
        spec = run.accepted.spec
        page = await self._call(self._store.find, spec.experiment, run.run_id, number)
        if page is None:
            tags = describe.tags(run, number, generation)
            if parent := await self._parent_page(known, number):
                tags["mlflow.parentRunId"] = parent
            placed = run.placements.get(generation)
            start_s = placed.at_s if placed and number != FIRST_ATTEMPT else run.accepted_at_s
            name = describe.clean_value(spec.name, describe.MAX_KEY_CHARS)
            page = await self._call(self._store.create, spec.experiment, name, _ms(start_s), tags)
            log.info("run is tracked", run_id=run.run_id, attempt=number, mlflow_run_id=page.mlflow_run_id)
        cursor = points.Cursor.from_tag(page.tags.get(describe.CURSOR))
        attempt = Attempt(page, cursor, dict(page.tags), dict(page.heads), page.status, set(page.params))
        known.attempts[number] = attempt
        return attempt

    async def _parent_page(self, known: TrackedRun, number: int) -> str | None:
        """The page of the run that this one evaluates; of a later attempt, the page of the first."""
        run = known.run
        assert run.accepted is not None
        if number != FIRST_ATTEMPT:
            return known.attempts[FIRST_ATTEMPT].page.mlflow_run_id
        target = run.accepted.spec.evaluate
        if target is None or target.run_id == run.run_id:
            return None
        parent = (await self._catch_up(target.run_id)).run
        if parent.accepted is None:
            return None
        number, _ = parent.attempts()[-1]
        page = await self._call(self._store.find, parent.accepted.spec.experiment, target.run_id, number)
        return page.mlflow_run_id if page else None

    async def _describe(self, run: Run, attempt: Attempt, number: int, generation: int) -> None:
        """Parameters, dataset and tags."""
        assert run.accepted is not None
        mlflow_run_id = attempt.page.mlflow_run_id
        if not attempt.params_logged:
            params = describe.params(run.accepted.spec)
            await self._call(self._store.log_params, mlflow_run_id, params)
            attempt.params |= params.keys()
            attempt.params_logged = True
        if run.prepared is not None and not attempt.dataset_logged:
            for name, dataset in run.prepared.by_name.items():
                profile = dataset.model_dump_json(include={"train_samples", "validation_samples", "test_samples"})
                param = f"dataset_id.{name}" if name else "dataset_id"
                await self._call(self._store.log_params, mlflow_run_id, {param: dataset.dataset_id})
                await self._call(
                    self._store.log_dataset,
                    mlflow_run_id,
                    name or dataset.dataset_id[:12],
                    dataset.dataset_id,
                    dataset.manifest_uri,
                    profile,
                )
            attempt.dataset_logged = True
        await self._tag(attempt, describe.tags(run, number, generation))

    async def _tag(self, attempt: Attempt, tags: dict[str, str]) -> None:
        changed = {name: value for name, value in tags.items() if attempt.tags.get(name) != value}
        if changed:
            await self._call(self._store.log_tags, attempt.page.mlflow_run_id, changed)
            attempt.tags.update(changed)

    async def _flush(self, run: Run, attempt: Attempt, generation: int) -> None:
        """Log every point that nothing can take back any more, then the cursor."""
        generation = run.start_generation(generation)
        horizon = points.horizon(run, generation)
        final = horizon == points.NO_CEILING
        if not final and (generation, horizon) == (attempt.cursor.generation, attempt.cursor.step):
            return
        selector = points.Selector(run, generation, attempt.cursor, attempt.heads)
        progress = self._bus.follow(
            topology.PROGRESS.name, (subjects.progress(run.run_id),), attempt.cursor.start, until_caught_up=True
        )
        async for batch in progress:
            chosen = selector.select([(received.sequence, received.event) for received in batch])
            if chosen:
                await self._call(self._store.log_points, attempt.page.mlflow_run_id, chosen)
        await self._describe_script(attempt, selector)
        metrics.DROPPED.inc(selector.dropped)
        cursor = selector.next_cursor()
        # The cursor last: a crash before it logs the same points again, which changes nothing.
        await self._tag(attempt, {describe.CURSOR: cursor.to_tag()})
        attempt.cursor = cursor

    async def _describe_script(self, attempt: Attempt, selector: points.Selector) -> None:
        """Log the parameters and tags that the script has set. A parameter keeps its first value, as MLflow has it."""
        new = describe.script_params(selector.params, attempt.params)
        if new:
            await self._call(self._store.log_params, attempt.page.mlflow_run_id, new)
            attempt.params |= new.keys()
        await self._tag(attempt, describe.script_tags(selector.tags))

    async def _finish(self, run: Run, attempt: Attempt, generation: int, last: bool) -> None:
        """Results, status and files, once there are any."""
        if not last:
            following = min(number for number in run.placements if number > generation)
            await self._end_attempt(attempt, "KILLED", run.placements[following].at_s)
            return
        if run.ended is not None:
            step = run.last_checkpoint.step if run.last_checkpoint else max(attempt.heads.values(), default=0)
            if isinstance(run.ended.fact, RunCompleted):
                result = points.result_points(run.ended.fact.metrics, "", step, _ms(run.ended.at_s))
                await self._log(attempt, [point for point in result if point.key not in attempt.heads])
            await self._end_attempt(attempt, STATUS[type(run.ended.fact)], run.ended.at_s)
            await self._copy(attempt, "ended", run.artifacts, "artifacts")
        if run.evaluated is not None:
            step = run.last_checkpoint.step if run.last_checkpoint else 0
            result = points.result_points(run.evaluated.fact.metrics, "test/", step, _ms(run.evaluated.at_s))
            await self._log(attempt, result)
            await self._copy(attempt, "evaluated", run.evaluated.fact.report, "evaluation")

    async def _log(self, attempt: Attempt, chosen: list[points.Point]) -> None:
        new = [point for point in chosen if attempt.heads.get(point.key, -1) < point.step]
        if new:
            await self._call(self._store.log_points, attempt.page.mlflow_run_id, new)
            attempt.heads.update({point.key: point.step for point in new})

    async def _end_attempt(self, attempt: Attempt, status: str, at_s: float) -> None:
        if attempt.status != status:
            await self._call(self._store.end, attempt.page.mlflow_run_id, status, _ms(at_s))
            attempt.status = status

    async def _copy(self, attempt: Attempt, mark: str, artifacts: tuple[Artifact, ...], folder: str) -> None:
        """Copy small files into MLflow, once. Large ones are linked by their tags alone."""
        done = [each for each in attempt.tags.get(describe.FILES, "").split(",") if each]
        if mark in done:
            return
        small = [each for each in artifacts if each.size_bytes <= self._settings.artifact_max_bytes]
        if small:
            with tempfile.TemporaryDirectory(prefix="tracking-") as scratch:
                async with ObjectStore(self._settings) as objects:
                    for artifact in small:
                        inner, name = describe.file_path(artifact.name, folder)
                        path = Path(scratch) / name
                        try:
                            await objects.download(artifact.uri, path, sha256=artifact.sha256)
                        except (ObjectNotFound, ValueError) as error:
                            log.warning("artifact cannot be copied to MLflow", uri=artifact.uri, error=str(error))
                            continue
                        await self._call(self._store.log_file, attempt.page.mlflow_run_id, path, inner)
                        path.unlink()
        await self._tag(attempt, {describe.FILES: ",".join([*done, mark])})

    async def _announce(self, run_id: str, page: Page, cause: Envelope | None) -> None:
        """Say where the page is, once."""
        if page.mlflow_run_id in self._announced:
            return
        tracked = RunTracked(run_id=run_id, mlflow_run_id=page.mlflow_run_id, mlflow_experiment_id=page.experiment_id)
        last = await self._bus.get_last_message(tracked.subject)
        if last is None or last.event.mlflow_run_id != page.mlflow_run_id:
            await self._bus.publish(tracked, cause)
        self._announced.add(page.mlflow_run_id)

    # -- registry -----------------------------------------------------------

    async def _promote(self, event: ModelPromoted) -> None:
        """Show a promotion in MLflow, after the earlier ones that it lacks: it numbers versions as they are made."""
        await self._catch_up_registry()
        highest = await self._call(self._store.find_highest_version, event.model)
        promotions = self._registry.models[event.model].promotions
        for version in sorted(number for number in promotions if highest < number < event.version):
            try:
                await self._show_promotion(promotions[version])
            except TrackingRefused as error:
                log.warning("a version is left out of MLflow", model=event.model, version=version, reason=str(error))
        await self._show_promotion(event)

    async def _show_promotion(self, event: ModelPromoted) -> None:
        async with self._lock:
            run, page = await self._find_page(event.run_id)
        mlflow_run_id = page.mlflow_run_id if page and not page.deleted else None
        tags = {
            **describe.model_tags(run, event.checkpoint_uri),
            describe.VERSION: str(event.version),
            "trainbus.dataset_id": event.dataset_id or "",
            "trainbus.reason": describe.clean_value(event.reason, describe.MAX_TAG_CHARS),
        }
        if run.accepted is not None and (init_from := run.accepted.spec.init_from) is not None:
            tags[describe.INIT_FROM] = init_from
        if run.accepted is not None and run.accepted.spec.checkpoints.dvc:
            async with ObjectStore(self._settings) as objects:
                tags[DVC_MD5] = await read_dvc_md5(objects, event.checkpoint_uri) or ""
        files: LoggedModel | None = None
        try:
            files = await self._log_model(event, run, mlflow_run_id)
            tags[describe.MODEL_FILES] = describe.FILES_LOGGED
        except (ModelLeftOut, TrackingRefused) as error:
            log.warning("a promoted model is not put into MLflow", model=event.model, reason=str(error))
            text = f"{describe.FILES_LEFT_OUT}: {error}"
            tags[describe.MODEL_FILES] = describe.clean_value(text, describe.MAX_TAG_CHARS)
        async with self._lock:
            await self._call(self._store.promote, event, mlflow_run_id, tags, files)

    async def _catch_up_registry(self) -> None:
        """Fold the facts of models that are new."""
        filters_of_models = tuple(
            event.subject_filter() for event in topology.TRACKING.events if issubclass(event, ModelFact)
        )
        for received in await self._bus.read_history(*filters_of_models, start_sequence=self._registry.sequence + 1):
            self._registry.apply(received.event, received.sequence)

    async def _show_aliases(self, model: str) -> None:
        """Make MLflow's aliases of a model be those of the facts."""
        await self._catch_up_registry()
        if changes := await self._compare_aliases(model):
            await self._call(self._store.change_aliases, model, changes)

    async def _compare_aliases(self, model: str) -> list[AliasChange]:
        known = self._registry.models.get(model, Model())
        return await self._call(self._store.compare_aliases, model, known.aliases, known.removed)

    async def _check_aliases(self) -> None:
        """Report the aliases that somebody has moved in MLflow, and move them back if the settings say so."""
        if await self._count_unhandled():
            return  # what differs may be what is not done yet
        await self._catch_up_registry()
        for model in sorted(self._registry.models):
            changes = await self._compare_aliases(model)
            for change in changes:
                log.warning(
                    "an alias was moved in MLflow: `trainbus models` changes aliases",
                    model=model,
                    alias=change.alias,
                    found=change.present,
                    expected=change.version,
                    repaired=self._settings.repair_aliases,
                )
                metrics.ALIASES_MOVED.labels("repaired" if self._settings.repair_aliases else "reported").inc()
            if changes and self._settings.repair_aliases:
                await self._call(self._store.change_aliases, model, changes)

    async def _find_page(self, run_id: str) -> tuple[Run, Page | None]:
        """Return a run and the page of its last attempt."""
        run = (await self._catch_up(run_id)).run
        if run.accepted is None:
            return run, None
        number, _ = run.attempts()[-1]
        return run, await self._call(self._store.find, run.accepted.spec.experiment, run_id, number)

    async def _log_model(self, event: ModelPromoted, run: Run, mlflow_run_id: str | None) -> LoggedModel:
        """Put the files of a promoted model into MLflow, once.

        Raises:
            ModelLeftOut: they cannot be put there.
        """
        if run.accepted is None:
            raise ModelLeftOut(
                f"run {event.run_id} was not accepted on this bus, so it is not known how its model loads"
            )
        spec, name = run.accepted.spec, describe.model_name(event.model)
        tags = describe.model_tags(run, event.checkpoint_uri)
        async with self._lock:
            model = await self._call(
                self._store.open_model, spec.experiment, name, mlflow_run_id, tags, describe.model_params(spec)
            )
        if not model.has_files:
            async with self._builder.build(run, event.checkpoint_uri, model.model_id, mlflow_run_id) as folder:
                await self._call(self._store.log_model_files, model, folder, thread=self._upload_thread)
            log.info("model is in MLflow", model=event.model, version=event.version, model_id=model.model_id)
        return model

    # -- calling MLflow -----------------------------------------------------

    async def _call(self, work: Callable[..., T], *args: Any, thread: ThreadPoolExecutor | None = None) -> T:
        """Run ``work`` in the one MLflow thread, or another one, again and again while MLflow is away.

        Waiting here rather than handing the message back keeps the facts in order.
        """
        delay_s = self._settings.retry_first_s
        loop = asyncio.get_running_loop()
        unclear = 0
        while True:
            if self._stopping.is_set():
                raise TransientError("the service is stopping")
            if self._role is not None:
                await self._role.wait_held()
            try:
                result = await loop.run_in_executor(thread or self._thread, partial(work, *args))
            except TrackingUnavailable as error:
                unclear += error.unclear
                if unclear >= UNCLEAR_TRIES and await loop.run_in_executor(self._thread, self._store.answers):
                    # Else one impossible call would keep every other run's facts waiting for ever.
                    raise TrackingRefused(f"MLflow works but failed {unclear} times at this: {error}") from error
                if not self.away:
                    log.warning("MLflow is away; facts wait", uri=self._store.uri, error=str(error))
                self.away = True
                metrics.OUTAGE.set(1)
                metrics.RETRIES.inc()
                await self._pause(delay_s)
                delay_s = min(delay_s * 2, self._settings.retry_max_s)
                continue
            if self.away:
                log.info("MLflow is back", uri=self._store.uri)
            self.away = False
            metrics.OUTAGE.set(0)
            return result


def _ms(time_s: float) -> int:
    return round(time_s * 1000)


def _import_at_low_priority() -> None:
    """Import mlflow, which takes seconds, at a lower priority than the other processes on the core."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), IMPORT_NICENESS)
    with suppress(Exception):  # the first use tries again and reports the error
        import_mlflow()


def build(settings: Settings, store: Store | None = None) -> Service:
    """The tracking service. ``store`` stands in for MLflow where a test needs another."""
    settings = TrackingSettings.of(settings)
    service = Service("tracking", settings)
    store = store or Store(settings.tracking_uri, settings.artifact_location)
    # Two instances would search for a page, find none, and both make one.
    role = service.add_resource(ExclusiveRole(service.bus, "tracking", settings))
    projector = service.add_resource(Projector(service.bus, settings, store, service.stopping, role))
    for event in topology.TRACKING.events:
        if issubclass(event, RunFact):
            service.bus.subscriber(topology.TRACKING, event)(projector.on_run_fact)
    service.bus.subscriber(topology.TRACKING, ModelPromoted)(projector.on_model_promoted)
    service.add_background_task(role.keep_lease)
    service.add_background_task(projector.warm_up)
    service.bus.subscriber(topology.TRACKING, ModelStaged)(projector.on_model_staged)
    service.add_background_task(projector.watch_aliases)
    service.add_background_task(projector.follow_live)
    service.add_background_task(projector.watch_behind)
    service.add_readiness_check("mlflow", lambda: not projector.away)
    return service
