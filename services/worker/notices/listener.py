"""Brings what the sources say to the agent."""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp

from services.worker.notices import find_sources
from services.worker.notices.base import Notice, NoticeSource
from services.worker.settings import WorkerSettings


class NoticeHandler(Protocol):
    """Who is to know of notices."""

    async def handle_notice(self, notice: Notice) -> None: ...
    async def wait_until_idle(self) -> None: ...


async def listen_for_notices(settings: WorkerSettings, agent: NoticeHandler) -> None:
    """Listen to every source that applies here, for ever."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        sources = await find_sources(session, settings.metadata_url, settings.notice_interval_s, settings.prestop_file)
        async with asyncio.TaskGroup() as group:
            for source in sources:
                group.create_task(listen(source, agent))
            await asyncio.Event().wait()


async def listen(source: NoticeSource, agent: NoticeHandler) -> None:
    """Heed each notice of a source, and acknowledge it when nothing runs here any more."""
    async with asyncio.TaskGroup() as group:
        async for notice in source.watch():
            await agent.handle_notice(notice)
            if notice.leave:
                group.create_task(_acknowledge(source, notice, agent))


async def _acknowledge(source: NoticeSource, notice: Notice, agent: NoticeHandler) -> None:
    await agent.wait_until_idle()
    await source.acknowledge(notice)
