"""Notices that the machine will be taken away: from clouds, Slurm and Kubernetes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import structlog

from services.worker.notices.azure import AzureSource
from services.worker.notices.base import MetadataServer, Notice, NoticeSource
from services.worker.notices.ec2 import Ec2Source
from services.worker.notices.gcp import GcpSource
from services.worker.notices.kubernetes import KubernetesSource
from services.worker.notices.slurm import SlurmSource

__all__ = ["Notice", "Source", "find_sources"]

log = structlog.get_logger(__name__)

DMI = Path("/sys/class/dmi/id")
#: Vendor names in the firmware of the clouds' machines.
VENDORS: dict[str, type[Ec2Source] | type[GcpSource] | type[AzureSource]] = {
    "amazon": Ec2Source,
    "google": GcpSource,
    "microsoft corporation": AzureSource,
}


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


def _clouds(dmi: Path) -> list[type[Ec2Source] | type[GcpSource] | type[AzureSource]]:
    """Return the cloud that the firmware names; all clouds if it cannot be read."""
    words = ""
    for name in ("sys_vendor", "board_vendor", "bios_vendor", "product_name"):
        try:
            words += (dmi / name).read_text().lower() + "\n"
        except OSError:
            continue
    if not words:
        return [Ec2Source, GcpSource, AzureSource]
    return [cloud for vendor, cloud in VENDORS.items() if vendor in words]
