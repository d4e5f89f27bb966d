"""The process that fetches models for serving."""

from __future__ import annotations

import asyncio
import errno
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from loadtest.served_models import draw_rows
from services.kit.messages import TransientError
from services.kit.model_folder import ModelFolderError
from services.kit.ports import free_ports
from services.serving.fetch_messages import FetchReply
from services.serving.fetcher import encode_settings
from services.serving.settings import ServingSettings
from tests.serving.conftest import House, wait_until

[ROW] = draw_rows(1, seed=9)
MODULE = "services.serving.fetch_process"


def find_fetchers() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended meanwhile
            found += [each] if MODULE in each.cmdline() else []
    return found


@pytest.mark.parametrize("error", [ModelFolderError("no commit"), TransientError("no store"), OSError(28, "full")])
def test_errors_arrive_as_they_were_raised(error: Exception) -> None:
    reply = FetchReply.model_validate_json(FetchReply.of_error(1, error).model_dump_json())
    with pytest.raises(type(error)) as caught:
        reply.check()
    assert str(caught.value) == str(error)


def test_a_full_disk_is_still_known_as_one() -> None:
    reply = FetchReply.of_error(1, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left") as caught:
        reply.check()
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.shell
async def test_another_process_takes_over_where_it_is_killed(house: House) -> None:
    await house.deploy("r1")
    [fetcher] = find_fetchers()
    assert fetcher.nice() > psutil.Process().nice()
    fetcher.send_signal(signal.SIGKILL)
    assert (await house.predict(ROW))["version"] == 1
    await house.deploy("r2")
    assert (await house.predict(ROW))["version"] == 2


@pytest.mark.shell
async def test_only_the_folders_of_versions_that_may_answer_are_kept(house: House) -> None:
    for run_id in ("r1", "r2", "r3", "r4"):
        await house.deploy(run_id)
    folder = house.settings.data_dir / "models" / house.store.model
    await wait_until(lambda: len(list(folder.glob("[!.]*/"))) == 2, "two folders")


async def test_it_ends_with_the_service_also_where_no_bus_answers(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    settings = ServingSettings(nats_url=f"nats://127.0.0.1:{port}", data_dir=tmp_path)
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", MODULE, stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(encode_settings(settings))
    await process.stdin.drain()
    process.stdin.close()
    assert await process.wait() == 0
