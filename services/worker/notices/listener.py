"""The listener of notices: forwards them from all sources of the machine to the handler."""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp

from services.worker.notices import find_sources
from services.worker.notices.base import Notice, NoticeSource
from services.worker.settings import WorkerSettings


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


async def forward_notices(source: NoticeSource, handler: NoticeHandler) -> None:
    """Forward each notice of a source, and acknowledge it once no run is left on the node."""
    async with asyncio.TaskGroup() as group:
        async for notice in source.watch():
            await handler.handle_notice(notice)
            if notice.leave:
                group.create_task(_acknowledge(source, notice, handler))


async def _acknowledge(source: NoticeSource, notice: Notice, handler: NoticeHandler) -> None:
    await handler.wait_until_idle()
    await source.acknowledge(notice)
