"""A client imports on Windows: nothing on its way needs what only POSIX has."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: The libraries have code of their own for Windows: they are loaded first.
SCRIPT = """
import asyncio, ctypes, logging, multiprocessing, os, signal, socket, subprocess, sys, tempfile, threading
import aiohttp, blake3, httpx, nats, pathspec, platformdirs, prometheus_client, pydantic_settings, re2, rich.console
import structlog, typer.testing

for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog"):
    sys.modules[name] = None
for name in ("SIGKILL", "SIGHUP", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGSTOP", "SIGCONT"):
    delattr(signal, name)
for name in ("fork", "setsid", "killpg", "getuid", "geteuid", "pwrite", "pread", "register_at_fork"):
    delattr(os, name)

import importlib
for name in {modules}:
    importlib.import_module(name)
from trainbus.commands.main import app
result = typer.testing.CliRunner().invoke(app, ["stacks"])
assert result.exit_code == 0, result.output
"""
MODULES = [
    "trainbus",
    "trainbus.client.client",
    "trainbus.client.submission",
    "trainbus.client.checkpoints",
    "trainbus.client.ingestion",
    "trainbus.commands.main",
    "trainbus.commands.doctor",
    "trainbus.commands.run_tables",
    "trainbus.commands.dataset_tables",
]


@pytest.mark.shell
def test_the_client_needs_nothing_of_posix() -> None:
    script = SCRIPT.replace("{modules}", repr(MODULES))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
