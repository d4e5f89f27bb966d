"""Decoding of untrusted images, over all cores, in processes whose death does not affect the service."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Self

import structlog

from contracts.machine_limits import usable_cores
from services.ingestion.core.records import InvalidRecord, ValidRecord
from services.ingestion.formats.images import ImageValidator, LabelledImage
from services.ingestion.isolated_process import ATTEMPTS, CPU_S, limit_cpu, limit_resources

log = structlog.get_logger(__name__)

MAX_PROCESSES = 8


class DecoderPool:
    """Processes that validate images; use it as an async context manager. They start with the first image."""

    def __init__(self, processes: int | None = None) -> None:
        self._processes = processes or min(MAX_PROCESSES, usable_cores())
        self._pool: ProcessPoolExecutor | None = None
        self._isolation = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pool, self._pool = self._pool, None
        _kill(pool)

    async def validate(
        self,
        validator: ImageValidator,
        images: list[tuple[LabelledImage, bytes]],
    ) -> list[ValidRecord | InvalidRecord]:
        """Validate a batch. The results depend on neither the number of processes nor the death of one."""
        self._pool = pool = self._pool or _pool(self._processes)
        try:
            return await asyncio.wrap_future(pool.submit(_validate, validator, images))
        except BrokenProcessPool:
            log.warning("a process died of decoding; its images are validated one by one", images=len(images))
            if self._pool is pool:
                self._pool = None
            _kill(pool)
        # One of the batches under way killed the process. Validating one image at a time identifies the image.
        async with self._isolation:
            return await self._validate_each(validator, images)

    async def _validate_each(
        self,
        validator: ImageValidator,
        images: list[tuple[LabelledImage, bytes]],
    ) -> list[ValidRecord | InvalidRecord]:
        results: list[ValidRecord | InvalidRecord] = []
        pool = await _start_checked_pool()
        try:
            for image, content in images:
                for attempt in range(ATTEMPTS):
                    try:
                        results += await asyncio.wrap_future(pool.submit(_validate, validator, [(image, content)]))
                        break
                    except BrokenProcessPool:
                        _kill(pool)
                        # A lack of memory kills too: no image is blamed unless others could be validated.
                        pool = await _start_checked_pool()
                        if attempt == ATTEMPTS - 1:
                            detail = "its decoder dies, or does not come to an end"
                            results.append(InvalidRecord("undecodable", detail, whole_object=True, label=image.label))
        finally:
            _kill(pool)
        return results


async def _start_checked_pool() -> ProcessPoolExecutor:
    """Start a pool of one process and check that it works.

    Raises:
        TransientError: none can be started.
    """
    pool = _pool(1)
    try:
        await asyncio.wrap_future(pool.submit(os.getpid))
    except (BrokenProcessPool, OSError) as error:
        _kill(pool)
        # Imported here: most of what a process would import at its start is the bus, which it has no use for.
        from services.kit.bus import TransientError

        raise TransientError(f"no process can be started that decodes images: {error!r}") from error
    return pool


def _pool(processes: int) -> ProcessPoolExecutor:
    # Spawned: the service has threads, which a forked child would find in any state.
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), limit_resources)


def _kill(pool: ProcessPoolExecutor | None) -> None:
    if pool is not None:
        processes = list((getattr(pool, "_processes", None) or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


def _validate(
    validator: ImageValidator,
    images: list[tuple[LabelledImage, bytes]],
) -> list[ValidRecord | InvalidRecord]:
    results = []
    for image, content in images:
        limit_cpu(CPU_S)
        results.append(validator.validate(image, content))
        limit_cpu(0)
    return results


def with_content(
    result: ValidRecord | InvalidRecord,
    content: bytes,
    keep_below: int | None,
) -> ValidRecord | InvalidRecord:
    """Put the content back that a result came without, if it is to be copied."""
    if isinstance(result, ValidRecord) and (keep_below is None or len(content) < keep_below):
        return replace(result, content=content)
    return result
