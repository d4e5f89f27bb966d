"""Pauses of the tests' processes, to find what depends on how fast a machine is.

On a busy machine any process stands still for a moment at any place. A test that fails with pauses and passes without
them claims something about time, or the product does.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

#: Seconds between two pauses, at least and at most.
BETWEEN_S = (0.02, 0.2)


@contextmanager
def paused(process: psutil.Process) -> Iterator[None]:
    """Stop a process during the block; it may end meanwhile.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


@contextmanager
def pause_children(longest_s: float) -> Iterator[None]:
    """Stop one process below this one after the other for up to ``longest_s``, until the block ends."""
    stopping = threading.Event()
    thread = threading.Thread(target=_pause_until, args=(stopping, longest_s), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def _pause_until(stopping: threading.Event, longest_s: float) -> None:
    while not stopping.wait(random.uniform(*BETWEEN_S)):
        # What a test has stopped itself is not to be continued.
        children = [each for each in psutil.Process().children(recursive=True) if _may_pause(each)]
        if not children:
            continue
        with suppress(psutil.NoSuchProcess), paused(random.choice(children)):
            # Most pauses are short, as they are where processes wait for a core.
            stopping.wait(min(longest_s, random.expovariate(4 / longest_s)))


def _may_pause(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False
