"""The first process of a container: it collects orphans, which a container without an init has nobody else for."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def leave_first_place() -> None:
    """Go on in a fork if this is process 1, which collects every process that ends and ends with the fork.

    Ranks and their launchers leave orphans, which become children of process 1. The agent itself must not collect them:
    it would take the exit codes of its own children from those who wait for them. Call it while there is one thread.
    """
    if os.getpid() != 1:
        return
    # Held until there is somebody to forward them to.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    agent = os.fork()
    if agent:
        os._exit(_collect_until(agent))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _collect_until(agent: int) -> int:
    """Forward signals to the agent and collect what ends, until the agent does; return its exit code, as shells do."""

    def forward(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(agent, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while True:
        pid, status = os.wait()
        if pid == agent:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
