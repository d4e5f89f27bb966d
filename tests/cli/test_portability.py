"""A client works on Windows and macOS: nothing on its way needs what only POSIX, or only Linux, has."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainbus.client
import trainbus.commands

#: The libraries have code of their own for Windows: they are loaded first.
BLOCK = """
import asyncio, ctypes, logging, multiprocessing, os, pathlib, signal, socket, subprocess, sys, tempfile, threading
import aiohttp, blake3, httpx, nats, pathspec, platformdirs, prometheus_client, pydantic_settings, re2, rich.console
import numpy, structlog, typer.testing, zstandard

for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog"):
    sys.modules[name] = None
for name in ("SIGKILL", "SIGHUP", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGSTOP", "SIGCONT"):
    delattr(signal, name)
for name in (
    "fork", "setsid", "killpg", "getuid", "geteuid", "pwrite", "pread", "preadv", "register_at_fork", "memfd_create",
    "copy_file_range", "O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW", "WNOHANG", "getpgid", "setpgid",
):
    delattr(os, name)
delattr(socket, "AF_UNIX")

real_open = open

def open_portably(path, *arguments, **options):
    text = os.fsdecode(path) if not isinstance(path, int) else ""
    assert not text.startswith(("/proc", "/dev/shm", "/sys")), text + " is Linux only"
    return real_open(path, *arguments, **options)

import builtins, io
builtins.open = io.open = open_portably
"""
IMPORT = """
import importlib
for name in {modules}:
    importlib.import_module(name)
from trainbus.commands.main import app
result = typer.testing.CliRunner().invoke(app, ["stacks"])
assert result.exit_code == 0, result.output
"""
WRITE = """
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from services.kit.chunks import FileRange, _copy_range
from services.kit.store.files import FileSink

target, source = Path("target"), Path("source")
target.write_bytes(bytes(64_000))
source.write_bytes(b"".join(bytes([number]) * 1000 for number in range(64)))

def write(number):
    with FileSink(target, number * 1000) as sink:
        sink(memoryview(bytes([number]) * 400))
        sink(memoryview(bytes([number]) * 600))

with ThreadPoolExecutor(8) as pool:
    list(pool.map(write, range(64)))
assert target.read_bytes() == source.read_bytes()
assert _copy_range(FileRange(source, 3000, 2000), target, 10_000)
assert FileRange(target, 10_000, 2000).read() == source.read_bytes()[3000:5000]
"""


def modules_of_the_client() -> list[str]:
    packages = (trainbus.client, trainbus.commands)
    return [
        "trainbus",
        # Commands import these when they run, also without the extras of services.
        "trainbus.operate.dead_letters",
        "trainbus.operate.history.explanation",
        *(each.name for one in packages for each in pkgutil.walk_packages(one.__path__, f"{one.__name__}.")),
    ]


@pytest.mark.shell
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(IMPORT.replace("{modules}", repr(modules_of_the_client())), id="import"),
        pytest.param(WRITE, id="write"),
    ],
)
def test_the_client_needs_nothing_of_one_system(script: str, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n" + BLOCK + script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
