"""The listener of notices: finds the sources of the machine, and forwards their notices to the handler."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import aiohttp
import structlog

from services.worker.notices.clouds import AzureSource, CloudSource, Ec2Source, GcpSource, MetadataServer
from services.worker.notices.cluster_managers import KubernetesSource, SlurmSource
from services.worker.notices.notice import Notice, NoticeSource
from services.worker.settings import WorkerSettings

log = structlog.get_logger(__name__)

DMI = Path("/sys/class/dmi/id")
#: Vendor names in the firmware of the clouds' machines.
VENDORS: dict[str, type[CloudSource]] = {
    "amazon": Ec2Source,
    "google": GcpSource,
    "microsoft corporation": AzureSource,
}


class NoticeHandler(Protocol):
    """Acts on notices."""

    async def handle_notice(self, notice: Notice) -> None: ...
    async def wait_until_idle(self) -> None: ...


async def listen_for_notices(settings: WorkerSettings, handler: NoticeHandler) -> None:
    """Listen to every source of this machine, for ever."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        sources = await find_sources(session, settings.metadata_url, settings.notice_interval_s, settings.prestop_file)
        async with asyncio.TaskGroup() as group:
            for source in sources:
                group.create_task(forward_notices(source, handler))
            await asyncio.Event().wait()


async def find_sources(
    session: aiohttp.ClientSession,
    metadata_url: str,
    interval_s: float,
    prestop_file: Path,
    environment: Mapping[str, str] = os.environ,
    dmi: Path = DMI,
) -> list[NoticeSource]:
    """Return the sources that exist on this machine, within a second or two and without a request to another one."""
    metadata = MetadataServer(session, metadata_url, interval_s)
    candidates: list[NoticeSource] = [SlurmSource(environment), KubernetesSource(environment, prestop_file, interval_s)]
    candidates += [cloud(metadata) for cloud in _clouds(dmi)]
    applying = await asyncio.gather(*(source.applies() for source in candidates))
    found = [source for source, applies in zip(candidates, applying, strict=True) if applies]
    log.info("notices come from", sources=["SIGTERM", *(source.name for source in found)])
    return found


async def forward_notices(source: NoticeSource, handler: NoticeHandler) -> None:
    """Forward each notice of a source, and acknowledge it once no run is left on the node."""

    async def acknowledge(notice: Notice) -> None:
        await handler.wait_until_idle()
        await source.acknowledge(notice)

    async with asyncio.TaskGroup() as group:
        async for notice in source.watch():
            await handler.handle_notice(notice)
            if notice.leave:
                group.create_task(acknowledge(notice))


def _clouds(dmi: Path) -> list[type[CloudSource]]:
    """Return the cloud that the firmware names; all clouds if it cannot be read."""
    words = ""
    for name in ("sys_vendor", "board_vendor", "bios_vendor", "product_name"):
        with suppress(OSError):
            words += (dmi / name).read_text().lower() + "\n"
    return [cloud for vendor, cloud in VENDORS.items() if vendor in words or not words]
