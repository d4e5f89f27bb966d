"""Two hosts on one machine: this process and its children in one network namespace, a second one beside it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000
OWN_NAMESPACE = Path("/proc/thread-self/ns/net")
#: Ends of the cable between the hosts.
HERE, THERE = "tbhere", "tbthere"
ADDRESSES = {4: ("10.213.7.1", "10.213.7.2"), 6: ("fd00:213:7::1", "fd00:213:7::2")}
PREFIX = {4: 24, 6: 64}
START_TIMEOUT_S = 30.0


class NamespacesUnavailable(Exception):
    """This user cannot make network namespaces on this machine."""


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """The addresses of the two hosts, and how to run something on the other one."""

    here: str
    there: str
    holder: int

    def on_the_other(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` on the other host."""
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net", "--", *command]

    def exchanged_bytes(self) -> int:
        """Return the bytes that have come from the other host."""
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[0] == f"{HERE}:")


@contextmanager
def two_hosts(version: int) -> Iterator[TwoHosts]:
    """Move this thread, and what it starts from now on, to a host that a cable connects with another one.

    Args:
        version: that of the addresses, 4 or 6.

    Raises:
        NamespacesUnavailable: this user cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open(OWN_NAMESPACE, os.O_RDONLY)
    if libc.unshare(CLONE_NEWNET) != 0:
        os.close(before)
        raise NamespacesUnavailable(os.strerror(ctypes.get_errno()))
    try:
        with _other_host() as holder:
            here, there = ADDRESSES[version]
            hosts = TwoHosts(here, there, holder)
            try:
                _connect(hosts, version)
            except (OSError, subprocess.CalledProcessError) as error:
                raise NamespacesUnavailable(str(error)) from error
            yield hosts
    finally:
        libc.setns(before, CLONE_NEWNET)
        os.close(before)


@contextmanager
def _other_host() -> Iterator[int]:
    """Yield the process id of what holds the other namespace."""
    try:
        process = subprocess.Popen(["unshare", "--net", "--", "cat"], stdin=subprocess.PIPE)
    except OSError as error:
        raise NamespacesUnavailable(str(error)) from error
    try:
        own, deadline = os.readlink(OWN_NAMESPACE), time.monotonic() + START_TIMEOUT_S
        while os.readlink(f"/proc/{process.pid}/ns/net") == own:
            if process.poll() is not None or time.monotonic() > deadline:
                raise NamespacesUnavailable("unshare made none")
            time.sleep(0.01)
        yield process.pid
    finally:
        process.communicate()


def _connect(hosts: TwoHosts, version: int) -> None:
    """Lay the cable, and give each end its address."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", HERE, "type", "veth", "peer", "name", THERE)
    _run("ip", "link", "set", THERE, "netns", str(hosts.holder))
    _run(*hosts.on_the_other("ip", "link", "set", "lo", "up"))
    for end, address, wrap in ((HERE, hosts.here, list), (THERE, hosts.there, lambda each: hosts.on_the_other(*each))):
        # Without the search for duplicates an address of IPv6 can be used at once.
        options = ["nodad"] if version == 6 else []
        _run(*wrap(["ip", "addr", "add", f"{address}/{PREFIX[version]}", "dev", end, *options]))
        _run(*wrap(["ip", "link", "set", end, "up"]))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
