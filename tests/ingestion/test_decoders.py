"""Processes that decode may die: of the images they were given only the culprit is set aside."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass

import psutil
import pytest

from contracts.spec.data import DataSource
from services.ingestion import decoders as decoders_module
from services.ingestion.core.records import InvalidRecord, ValidRecord
from services.ingestion.decoders import DecoderPool
from services.ingestion.formats.images import ImageValidator, LabelledImage
from services.ingestion.isolated_process import MEMORY_BYTES
from services.kit.bus import TransientError
from tests.kit.support import until
from tests.support_data import image_bytes

pytestmark = pytest.mark.shell

DATA = DataSource(source="s3://lake/x", format="images")


class Deadly(ImageValidator):
    """Decodes, but for three kinds of content that decoders in C might meet."""

    def validate(self, image: LabelledImage, content: bytes) -> ValidRecord | InvalidRecord:
        if content == b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if content == b"hang":
            signal.setitimer(signal.ITIMER_PROF, 0.05)  # stands for the time that was up
            while True:
                pass
        if content == b"eat":
            eaten = bytearray(MEMORY_BYTES)
            return InvalidRecord("bomb", f"{len(eaten)} bytes could be had")
        return super().validate(image, content)


@dataclass
class Batch:
    images: list[tuple[LabelledImage, bytes]]
    sound: int


def batch(number: int, *planted: bytes) -> Batch:
    contents = [image_bytes(number * 10 + i) for i in range(4)]
    images = [(LabelledImage(f"a/{number}-{i}.png", "a"), content) for i, content in enumerate([*contents, *planted])]
    return Batch(images, len(contents))


async def test_only_the_fatal_image_is_quarantined() -> None:
    batches = [batch(0), batch(1, b"crash", b"hang"), batch(2)]
    async with DecoderPool(2) as decoders:
        results = await asyncio.gather(*(decoders.validate(Deadly(DATA), one.images) for one in batches))
        for one, found in zip(batches, results, strict=True):
            assert all(isinstance(result, ValidRecord) for result in found[: one.sound])
            assert all(
                isinstance(result, InvalidRecord) and result.code == "undecodable" for result in found[one.sound :]
            )
            assert len(found) == len(one.images)
        # And it goes on.
        again = await decoders.validate(Deadly(DATA), batches[0].images)
        assert again == results[0]


async def test_no_image_is_blamed_when_no_process_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders_module, "limit_resources", _refuse)
    async with DecoderPool(2) as decoders:
        with pytest.raises(TransientError, match="no process can be started"):
            await decoders.validate(Deadly(DATA), batch(0).images)


def _refuse() -> None:
    os._exit(1)


async def test_memory_is_bounded() -> None:
    async with DecoderPool(1) as decoders:
        with pytest.raises(MemoryError):
            await decoders.validate(Deadly(DATA), [(LabelledImage("a/x.png", "a"), b"eat")])


async def test_no_process_outlives_the_service() -> None:
    decoders = DecoderPool(1)
    async with decoders:
        await decoders.validate(Deadly(DATA), batch(0).images)
        pool = decoders._pool
        assert pool is not None
        pids = list(pool._processes)
        assert pids
    # By their ids: a thread of the pool reaps them, so another wait for a process may fail.
    await until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the pool's processes")
