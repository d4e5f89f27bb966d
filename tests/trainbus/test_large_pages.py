"""Large pages change nothing but the time that a fork takes."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os

from trainbus.ranks.large_pages import use_large_pages

content = os.urandom(2**20) * 16
kept = bytearray(content)
print(use_large_pages())
assert kept == content
child = os.fork()
if child == 0:
    kept[::4096] = bytes(len(kept) // 4096)
    os._exit(0 if kept != content else 1)
assert os.waitpid(child, 0)[1] == 0
assert kept == content
"""


def test_memory_is_the_same_afterwards_and_in_a_fork() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 0
