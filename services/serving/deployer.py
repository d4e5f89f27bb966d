"""Brings one model to the version that the log wants: fetched, started, warmed up, compared, then flipped to.

Whatever goes wrong on the way, the version that answers goes on, and ``deploy_failed`` has the stage and the reason.
Where the host is at fault and not the version, ``deploy_delayed`` has them, and the deployment is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

import structlog

from contracts.base import Fact
from contracts.envelope import Envelope
from contracts.events.model import ModelDeployDelayed, ModelDeployed, ModelDeployFailed, ModelPromoted
from contracts.model_process import is_host_error
from services.kit.bus import Message, TransientError
from services.kit.clock import Clock
from services.kit.concurrency import cancel_and_wait
from services.kit.packages.package_environment import PackagesError
from services.serving import metrics
from services.serving.core.versions import ModelVersions, share_artifact
from services.serving.core.watch import find_regression
from services.serving.process import LoadError, ModelProcess, ProcessError
from services.serving.router import Router, ServedModel
from services.serving.settings import ServingSettings
from services.serving.version import ServedVersion
from services.serving.version_start import StageError, VersionStart

log = structlog.get_logger(__name__)

#: Seconds in which a warm process must reply before it answers users again. A busy one takes longer.
#: Where it is later, another process is started, and this one goes on.
PING_S = 1.0
#: Seconds between two looks at a version that is watched.
WATCH_EVERY_S = 0.2
#: Ends of the process of a version that is watched, while it computes nothing or starts, after which it is taken back.
MAX_UNEXPLAINED_ENDS = 3
#: Seconds until a deployment that could not reach the object store or the bus is tried again.
RETRY_S = 2.0
#: Seconds until a deployment that failed for a reason of the host's is tried again; the last one repeats.
HOST_RETRY_DELAYS_S = (2.0, 5.0, 15.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class PromotionOrigin:
    """Where a promotion stands in the log."""

    envelope: Envelope
    stored_at: datetime


@dataclass(frozen=True, slots=True)
class DeploymentParts:
    """What every deployment needs."""

    settings: ServingSettings
    router: Router
    start: VersionStart
    clock: Clock
    publish: Callable[[Fact, Envelope], Awaitable[object]]
    #: The id of this instance of serving.
    instance: str


class ModelDeployer:
    """Deploys the versions of one model, one at a time."""

    def __init__(self, model: str, parts: DeploymentParts) -> None:
        self.versions = ModelVersions(parts.instance)
        self._parts = parts
        self._served = parts.router.models.setdefault(model, ServedModel(model))
        metrics.PROCESS_BYTES.labels(model).set_function(self._served.resident_bytes)
        self._origins: dict[int, PromotionOrigin] = {}
        self._news = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._drains: set[asyncio.Task[None]] = set()
        #: Whether the folder of a version that has ended is still there.
        self._has_unused = False
        #: Version -> attempts that failed for a reason of the host's; and the causes that were published.
        self._delayed_attempts: dict[int, int] = {}
        self._published_delays: set[tuple[int, str, str]] = set()
        #: Facts are published in the order of what they say.
        self._publishing = asyncio.Lock()

    # -- what is wanted -----------------------------------------------------

    def apply(self, message: Message[Fact]) -> None:
        """Fold a fact about this model."""
        stored_at = message.stored_at or self._parts.clock.now()
        self.versions.apply(message.event, stored_at)
        if isinstance(message.event, ModelPromoted):
            self._origins.setdefault(message.event.version, PromotionOrigin(message.envelope, stored_at))
        self._news.set()

    async def run(self) -> None:
        """Deploy whatever is wanted, until cancelled."""
        try:
            while True:
                self._news.clear()
                wanted = self.versions.wanted
                self._measure()
                if wanted is None or (self._served.primary and self._served.primary.version == wanted.version):
                    await self._remove_unused()
                    await self._news.wait()
                    continue
                await self._deploy_unless_superseded(wanted)
        finally:
            await self._stop()

    async def _deploy_unless_superseded(self, wanted: ModelPromoted) -> None:
        """Deploy a version; give it up where another one is wanted meanwhile."""
        deployment = asyncio.create_task(self._deploy_or_report(wanted))
        try:
            while not deployment.done():
                self._news.clear()
                news = asyncio.create_task(self._news.wait())
                await asyncio.wait({deployment, news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if (now := self.versions.wanted) is None or now.version != wanted.version:
                    break
        finally:
            await cancel_and_wait(deployment)

    async def _deploy_or_report(self, wanted: ModelPromoted) -> None:
        try:
            await self._deploy(wanted)
        except StageError as error:
            if await _is_host_failure(error.__cause__):
                await self._delay(wanted, error.stage, error.reason)
            else:
                await self._report_failure(wanted, error.stage, error.reason)
        except TransientError as error:
            self._served.problem = f"version {wanted.version} waits: {error}"
            log.warning("deployment waits", model=wanted.model, version=wanted.version, reason=str(error))
            await asyncio.sleep(RETRY_S)
        except (OSError, MemoryError) as error:
            await self._delay(wanted, "host", f"{type(error).__name__}: {error}")
        except Exception as error:
            # A defect of serving itself must not end the house; it is a reason like any other.
            log.exception("deployment failed", model=wanted.model, version=wanted.version)
            await self._report_failure(wanted, "serving", f"{type(error).__name__}: {error}")

    async def _delay(self, wanted: ModelPromoted, stage: str, reason: str) -> None:
        """Wait before the next attempt; publish why, once a cause. The version is not judged."""
        attempt = self._delayed_attempts[wanted.version] = self._delayed_attempts.get(wanted.version, 0) + 1
        retry_in_s = HOST_RETRY_DELAYS_S[min(attempt, len(HOST_RETRY_DELAYS_S)) - 1]
        self._served.problem = f"version {wanted.version} is not served yet ({stage}): {reason}"
        log.warning("deployment delayed", model=wanted.model, version=wanted.version, stage=stage, reason=reason)
        metrics.DEPLOY_DELAYS.labels(wanted.model, stage).inc()
        cause = (wanted.version, stage, reason)
        if cause not in self._published_delays:
            fact = ModelDeployDelayed(
                model=wanted.model,
                version=wanted.version,
                run_id=wanted.run_id,
                instance=self._parts.instance,
                attempt=attempt,
                stage=stage,
                reason=reason,
                retry_in_s=retry_in_s,
            )
            with contextlib.suppress(TransientError):
                await self._publish(fact, wanted)
                self._published_delays.add(cause)
        await asyncio.sleep(retry_in_s)

    # -- one deployment -----------------------------------------------------

    async def _deploy(self, promotion: ModelPromoted) -> None:
        served = self._served
        version = await self._reuse(promotion)
        is_new = version is None
        version = version or await self._parts.start.run(promotion)
        spare: ServedVersion | None = version
        try:
            if is_new and served.primary is not None:
                await self._roll_out(version)
            spare = served.flip(version)
        finally:
            served.candidate, served.canary_share, served.shadow_share = None, 0.0, 0.0
            if spare is not None and spare.host not in [each.host for each in served.versions()]:
                self._drain(spare)
        served.problem = ""
        replaced = served.previous
        await self._start_watch(version, replaced)
        await self._report_success(version, replaced)

    async def _reuse(self, promotion: ModelPromoted) -> ServedVersion | None:
        """Return the version of a process that runs already: a rollback, or the same checkpoint promoted again."""
        for each in self._served.versions():
            if share_artifact(each.promotion, promotion) and each.host.process is not None:
                with contextlib.suppress(ProcessError):
                    await each.host.process.ping(PING_S)
                    return ServedVersion(promotion, each.host, each.signature)
        return None

    async def _roll_out(self, version: ServedVersion) -> None:
        """Let the candidate answer its share, or see copies, before it takes over."""
        own, served = self._parts.settings, self._served
        if not own.serving_canary_share and not own.serving_shadow_share:
            return
        version.is_watched = True
        served.candidate, served.canary_share = version, own.serving_canary_share
        served.shadow_share = own.serving_shadow_share
        deadline = time.monotonic() + own.serving_rollout_s
        while time.monotonic() < deadline:
            if reason := self._find_regression(version, served.primary):
                raise StageError("canary", reason)
            await asyncio.sleep(min(WATCH_EVERY_S, own.serving_rollout_s))

    # -- after the flip -----------------------------------------------------

    async def _start_watch(self, version: ServedVersion, replaced: ServedVersion | None) -> None:
        """Watch a version for the rest of its time, which began when it was deployed: after a restart it is shorter."""
        if self._watcher is not None:
            await cancel_and_wait(self._watcher)
        watch_s = self._parts.settings.serving_watch_s
        if (deployed_at := self.versions.deployed_here.get(version.version)) is not None:
            watch_s -= (self._parts.clock.now() - deployed_at).total_seconds()
        is_restart = replaced is None and deployed_at is not None
        version.is_watched = watch_s > 0 and (replaced is not None or is_restart)
        if version.is_watched:
            self._watcher = asyncio.create_task(self._watch(version, replaced, time.monotonic() + watch_s))

    async def _watch(self, version: ServedVersion, replaced: ServedVersion | None, deadline: float) -> None:
        """Take the version back where it does worse than the one before."""
        replaced = replaced or await self._start_replaced(version)
        while replaced is not None and time.monotonic() < deadline and self._served.primary is version:
            if reason := self._find_regression(version, replaced):
                await self._take_back(version, replaced, reason)
                return
            await asyncio.sleep(WATCH_EVERY_S)
        version.is_watched = False

    async def _start_replaced(self, version: ServedVersion) -> ServedVersion | None:
        """Start the version before again, after a restart of the service; None where there is none."""
        promotion = self.versions.find_before(version.version)
        if promotion is None or share_artifact(promotion, version.promotion):
            return None
        try:
            replaced = await self._parts.start.run(promotion)
        except (StageError, TransientError, OSError) as error:
            log.warning("the version before does not start", model=promotion.model, reason=str(error))
            return None
        if self._served.primary is not version or self._served.previous is not None:
            await replaced.host.stop()
            return None
        self._served.previous = replaced
        return replaced

    def _find_regression(self, version: ServedVersion, other: ServedVersion | None) -> str:
        if version.unexplained_ends >= MAX_UNEXPLAINED_ENDS:
            return f"its process ended {version.unexplained_ends} times by itself; the last: {version.host.last_crash}"
        return find_regression(version.measure(), other.tally if other else None, self._parts.settings.watch_limits)

    async def _take_back(self, version: ServedVersion, replaced: ServedVersion, reason: str) -> None:
        served = self._served
        if served.primary is not version or served.previous is not replaced:
            return
        served.flip_back()
        if version.host is not replaced.host:
            self._drain(version)
        await self._report_failure(version.promotion, "watch", reason)

    # -- facts --------------------------------------------------------------

    async def _report_success(self, version: ServedVersion, replaced: ServedVersion | None) -> None:
        promotion = version.promotion
        origin = self._origins[promotion.version]
        seconds = max(0.0, (self._parts.clock.now() - origin.stored_at).total_seconds())
        self._measure()
        log.info("deployed", model=promotion.model, version=promotion.version, run_id=promotion.run_id)
        if promotion.version in self.versions.deployed_here:
            return  # after a restart
        metrics.DEPLOYED.labels(promotion.model).inc()
        metrics.DEPLOY_SECONDS.observe(seconds)
        fact = ModelDeployed(
            model=promotion.model,
            version=promotion.version,
            run_id=promotion.run_id,
            replaced_version=replaced.version if replaced is not None else None,
            seconds=round(seconds, 3),
            golden_samples=version.golden_samples,
            instance=self._parts.instance,
        )
        self.versions.apply(fact, self._parts.clock.now())
        await self._publish(fact, promotion)

    async def _report_failure(self, promotion: ModelPromoted, stage: str, reason: str) -> None:
        primary = self._served.primary
        fact = ModelDeployFailed(
            model=promotion.model,
            version=promotion.version,
            run_id=promotion.run_id,
            stage=stage,
            reason=reason,
            serving_version=primary.version if primary is not None else None,
            instance=self._parts.instance,
        )
        metrics.DEPLOY_FAILURES.labels(promotion.model, stage).inc()
        log.warning("not deployed", model=promotion.model, version=promotion.version, stage=stage, reason=reason)
        self._served.problem = f"version {promotion.version} is not served ({stage}): {reason}"
        self.versions.apply(fact, self._parts.clock.now())
        self._news.set()
        self._measure()
        await self._publish(fact, promotion)

    async def _publish(self, fact: Fact, promotion: ModelPromoted) -> None:
        async with self._publishing:
            await self._parts.publish(fact, self._origins[promotion.version].envelope)

    def _measure(self) -> None:
        served, champion = self._served, self.versions.champion
        version = served.primary.version if served.primary is not None else 0
        metrics.VERSION.labels(served.name).set(version)
        metrics.IS_CHAMPION.labels(served.name).set(int(champion is not None and champion.version == version))

    # -- end ----------------------------------------------------------------

    def _drain(self, version: ServedVersion) -> None:
        task = asyncio.create_task(self._drain_version(version))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _drain_version(self, version: ServedVersion) -> None:
        await version.host.drain()
        self._has_unused = True
        self._news.set()

    async def _remove_unused(self) -> None:
        """Remove the folders of versions that have ended. Nothing is deployed meanwhile, whose folder it might be."""
        if not self._has_unused:
            return
        self._has_unused = False
        kept = {each.host.artifact.folder for each in self._served.versions()}
        with contextlib.suppress(TransientError):
            await self._parts.start.fetcher.remove_others(self._served.name, kept)

    async def _stop(self) -> None:
        if self._watcher is not None:
            await cancel_and_wait(self._watcher)
        await cancel_and_wait(*self._drains)
        for each in self._served.versions():
            await each.host.stop()


async def _is_host_failure(error: BaseException | None) -> bool:
    """Return whether a process failed, or its packages could not be had, for a reason of the host's."""
    match error:
        case PackagesError():
            return not error.permanent
        case OSError():
            return is_host_error(error)
        case LoadError():
            return error.is_host_error
        case ProcessError(process=ModelProcess() as process):
            return await process.was_killed()
        case _:
            return False
