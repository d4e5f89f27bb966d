"""How long torchrun and Ray Train take from the SIGKILL of a rank to the next step of the same loop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from services.kit.ports import free_ports

HERE = Path(__file__).parent
LIMIT_S = 150.0
#: Far more steps than a measurement lasts.
STEPS = 10_000_000


def torchrun(width: int, every: int, repeat: int) -> list[float]:
    """Seconds from SIGKILL to the first step afterwards, ``repeat`` times in one job."""
    with tempfile.TemporaryDirectory(prefix="trainbus-torchrun-") as scratch:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=2"]
        command += ["--master_addr=127.0.0.1", f"--master_port={free_ports(1)[0]}"]
        command += [f"--max_restarts={repeat + 1}", str(HERE / "torchrun_script.py")]
        return _killed(command, Path(scratch), [str(width), str(STEPS), str(every)], every, repeat)


def ray(python: Path, width: int, every: int, repeat: int) -> list[float]:
    """The same with Ray Train, in an environment of its own."""
    # Ray's sockets have long names below its folder.
    with tempfile.TemporaryDirectory(prefix="tbr", dir="/tmp") as scratch:
        arguments = [str(width), str(STEPS), str(every), f"{scratch}/r"]
        return _killed([str(python), str(HERE / "ray_script.py")], Path(scratch), arguments, every, repeat)


def _killed(command: Sequence[str], folder: Path, arguments: Sequence[str], every: int, repeat: int) -> list[float]:
    lines = folder / "lines.jsonl"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # gloo otherwise looks the host's name up; our agent sets this too.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    found = []
    with _running([*command, str(folder), *arguments], environment, folder / "output.log") as job:
        before: set[int] = set()
        for _ in range(repeat):
            _wait(lines, job, lambda seen, before=before: _newest(seen, before) >= 2 * every)
            victim = next(each["pid"] for each in reversed(_read(lines)) if each["rank"] == 1)
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            before = {each["pid"] for each in _read(lines)}
            _wait(lines, job, lambda seen, before=before: _newest(seen, before) > 0)
            found.append(min(each["time"] for each in _read(lines) if each["pid"] not in before) - killed)
    return found


def _newest(seen: list[dict[str, Any]], before: set[int]) -> int:
    """Steps that rank 1 has made in processes other than those of earlier attempts."""
    return sum(each["rank"] == 1 and each["pid"] not in before for each in seen)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _wait(lines: Path, job: subprocess.Popen[bytes], condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition(_read(lines)):
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"it did not go on: {(lines.parent / 'output.log').read_text()[-6000:]}")
        time.sleep(0.02)


@contextlib.contextmanager
def _running(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        job = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield job
    finally:
        with contextlib.suppress(psutil.Error):
            everything = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
            for process in everything:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        job.wait()
