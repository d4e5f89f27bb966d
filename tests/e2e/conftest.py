"""One embedded stack for the faults and the bad input; each test has runs of its own on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.support import Stack, connected
from trainbus.embedded.launch import StackProcess
from trainbus.embedded.layout import StackOptions


# It ends with this folder's tests: even an idle stack takes time from those that come after.
@pytest.fixture(scope="package")
def stack_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("stack")
    with StackProcess(StackOptions(folder / "data"), output=folder / "output.log") as process:
        process.wait_ready()
        asyncio.run(_fill(folder / "data"))
        yield folder / "data"


async def _fill(data_dir: Path) -> None:
    async with connected(data_dir) as stack:
        await stack.fill_lake()


@pytest_asyncio.fixture
async def stack(stack_folder: Path) -> AsyncIterator[Stack]:
    async with connected(stack_folder) as stack:
        yield stack
        await stack.end_runs()
