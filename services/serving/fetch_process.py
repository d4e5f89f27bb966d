"""The process that fetches models for serving: ``python -m services.serving.fetch_process``.

Its stdin has the settings in the first line, and requests in those that follow (``fetch_messages.py``); the replies are
on stdout. It ends when stdin closes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections import defaultdict

import pyarrow.parquet  # noqa: F401  (imported on first use it would hold up the first model)

from services.kit import telemetry
from services.kit.bus import Bus
from services.kit.concurrency import cancel_and_wait
from services.kit.store.objects import ObjectStore
from services.serving.fetch_messages import MAX_LINE_BYTES, FetchReply, FetchRequest
from services.serving.golden_samples import GoldenSamples
from services.serving.model_source import ModelSource
from services.serving.priority import LOADING_NICENESS
from services.serving.settings import ServingSettings


class FetchRequests:
    """Fulfils requests, those for one model one after the other: they write to one folder."""

    def __init__(self, source: ModelSource, golden: GoldenSamples) -> None:
        self._source, self._golden = source, golden
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin_request(self, request: FetchRequest) -> None:
        """Begin with a request, or cancel one."""
        if request.op == "cancel":
            if (task := self._tasks.get(request.id)) is not None:
                task.cancel()
            return
        task = self._tasks[request.id] = asyncio.create_task(self._reply(request))
        task.add_done_callback(lambda _: self._tasks.pop(request.id, None))

    async def close(self) -> None:
        """Cancel those that are open."""
        await cancel_and_wait(*self._tasks.values())

    async def _reply(self, request: FetchRequest) -> None:
        model = request.promotion.model if request.promotion is not None else request.model
        try:
            async with self._locks[model]:
                reply = await self._fulfil(request)
        except Exception as error:
            reply = FetchReply.of_error(request.id, error)
        print(reply.model_dump_json(), flush=True)

    async def _fulfil(self, request: FetchRequest) -> FetchReply:
        if request.promotion is None:
            await self._source.remove_others(request.model, set(request.kept))
            return FetchReply(id=request.id)
        fetched, golden = await asyncio.gather(
            self._source.fetch(request.promotion), self._golden.fetch(request.promotion)
        )
        return FetchReply(id=request.id, fetched=fetched, golden=golden)


async def run(settings: ServingSettings, lines: asyncio.StreamReader) -> None:
    """Fulfil requests until there are no more lines."""
    bus, folder = Bus("serving-fetch", settings), settings.data_dir.resolve()
    try:
        await bus.connect(reconcile_topology=False)
        async with ObjectStore(settings) as objects:
            requests = FetchRequests(
                ModelSource(bus, objects, folder / "models"),
                GoldenSamples(
                    bus, objects, settings.bucket_datasets, settings.serving_golden_samples, folder / "golden"
                ),
            )
            gc.collect()
            gc.freeze()
            try:
                while line := await lines.readline():
                    requests.begin_request(FetchRequest.model_validate_json(line))
            finally:
                await requests.close()
    finally:
        await bus.close()


class RequestLines(asyncio.StreamReaderProtocol):
    """The lines of stdin. ``closed``: there are no more, also where nobody reads them yet."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        self.closed = asyncio.Event()
        super().__init__(self.reader)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.closed.set()


async def _main() -> None:
    lines = RequestLines()
    await asyncio.get_running_loop().connect_read_pipe(lambda: lines, sys.stdin)
    settings = ServingSettings(**json.loads(await lines.reader.readline()))
    telemetry.set_up("serving-fetch", settings)
    work = asyncio.create_task(run(settings, lines.reader))
    end = asyncio.create_task(lines.closed.wait())
    await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        work.result()
    # Who wanted the models has ended, and the bus may be away: it must not be waited for.
    await cancel_and_wait(work, end)


def main() -> None:
    """Fetch, at a low priority."""
    os.nice(LOADING_NICENESS)
    asyncio.run(_main())


if __name__ == "__main__":
    main()
