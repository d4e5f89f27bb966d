"""Free ports of this machine, for servers that will listen in a moment."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

#: Below the kernel's range of ephemeral ports (Linux: from 32768). An outgoing connection can take a port of that
#: range while its server restarts, and a client that keeps connecting to it can connect to itself.
PORT_RANGE = (15_000, 32_000)
#: Seconds for which a port is left to its finder, who may not listen yet.
CLAIM_S = 120.0


class PortsError(RuntimeError):
    """There are not as many free ports."""


def port_is_free(port: int, address: str = "127.0.0.1") -> bool:
    """Whether a server could listen on ``port`` now.

    Raises:
        OSError: this machine does not have that address.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        # As servers do: an earlier connection in TIME_WAIT does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            return False
    return True


def free_ports(count: int, address: str = "127.0.0.1", *, besides: Iterable[int] = ()) -> list[int]:
    """Return ``count`` different free ports, which no other process of this user is given for ``CLAIM_S`` seconds.

    Args:
        besides: ports that the caller has already; nobody is given them either.

    Raises:
        PortsError: there are fewer.
        OSError: this machine does not have that address.
    """
    # Not from the state of ``random``: a Task with the same seed in two processes would draw the same ports.
    # Scattered, too: SeaweedFS takes the next port by itself where it thinks that one is taken.
    candidates = random.Random().sample(range(*PORT_RANGE), k=PORT_RANGE[1] - PORT_RANGE[0])
    with _claims() as claimed:
        claimed.update(dict.fromkeys(besides, time.monotonic()))
        unclaimed = (port for port in candidates if port not in claimed and port_is_free(port, address))
        found = list(itertools.islice(unclaimed, count))
        claimed.update(dict.fromkeys(found, time.monotonic()))
    if len(found) < count:
        raise PortsError(f"no {count} free ports between {PORT_RANGE[0]} and {PORT_RANGE[1]}")
    return found


@contextlib.contextmanager
def _claims() -> Iterator[dict[int, float]]:
    """Open this user's list of the ports that were given away lately, with the time; what is changed is kept.

    A machine where there can be no such file goes without: a port may then be taken before its finder listens.
    """
    descriptor = _open_list()
    if descriptor is None:
        yield {}
        return
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        claimed = _read_claims(file.read())
        yield claimed
        with contextlib.suppress(OSError):  # a full disk: the ports are free all the same
            file.seek(0)
            file.truncate()
            file.write(json.dumps(claimed).encode())


def _open_list() -> int | None:
    """Open and lock the list; None where there can be none, or where something else has its name."""
    try:
        import fcntl  # not on Windows
    except ImportError:
        return None
    try:
        path = Path(tempfile.gettempdir()) / f"trainbus-ports-{os.geteuid()}"
        # Others can write to the folder of temporary files. Their pipe or their lock would stop every start here.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        return None
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _read_claims(text: bytes) -> dict[int, float]:
    """Return the claims that still count; none if their writer was killed in the middle."""
    now = time.monotonic()
    try:
        # A time to come is from before the machine was started.
        return {int(port): at for port, at in json.loads(text).items() if 0 <= now - at < CLAIM_S}
    except (ValueError, AttributeError, TypeError):
        return {}
