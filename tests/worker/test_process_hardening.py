"""Processes of the agent's user cannot read the agent's keys; its children stay inspectable."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Root reads everything, so as root another user takes its part.
PLAY = """
import ctypes, os, subprocess, sys
from services.worker.app import PR_SET_DUMPABLE, protect_credentials

def look(pid):
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if b"THE_KEY=" in open(f"/proc/{pid}/environ", "rb").read() else 1)
        except PermissionError:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
before = look(os.getpid())
protect_credentials()
rank = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, env={"THE_KEY": "of a rank"})
print(before, look(os.getpid()), look(rank.pid))
rank.communicate()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_ranks_cannot_read_the_agents_environment() -> None:
    environment = {**os.environ, "THE_KEY": "to the store"}
    done = subprocess.run([sys.executable, "-c", PLAY], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "2", "0"], done.stderr
