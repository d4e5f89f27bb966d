"""Brings what the sources say to the agent."""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp

from services.worker.notices import find_sources
from services.worker.notices.base import Notice, Source
from services.worker.settings import WorkerSettings


class Heeding(Protocol):
    """Who is to know of notices."""

    async def heed(self, notice: Notice) -> None: ...
    async def emptied(self) -> None: ...


async def heed_notices(settings: WorkerSettings, agent: Heeding) -> None:
    """Listen to every source that applies here, for ever."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        sources = await find_sources(session, settings.metadata_url, settings.notice_interval_s, settings.prestop_file)
        async with asyncio.TaskGroup() as group:
            for source in sources:
                group.create_task(listen(source, agent))
            await asyncio.Event().wait()


async def listen(source: Source, agent: Heeding) -> None:
    """Heed each notice of a source, and acknowledge it when nothing runs here any more."""
    async with asyncio.TaskGroup() as group:
        async for notice in source.watch():
            await agent.heed(notice)
            if notice.leave:
                group.create_task(_acknowledge(source, notice, agent))


async def _acknowledge(source: Source, notice: Notice, agent: Heeding) -> None:
    await agent.emptied()
    await source.acknowledge(notice)
