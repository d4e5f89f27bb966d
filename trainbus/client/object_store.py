"""The object store, for commands that read it themselves."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.kit.bus import TransientError
from services.kit.store.objects import ObjectStore
from trainbus.client.address import Address
from trainbus.client.connection import hush
from trainbus.client.errors import CliError

PATIENCE_S = 5.0
#: What a file of this machine fails with, and the store never.
OURS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


@asynccontextmanager
async def store(address: Address) -> AsyncIterator[ObjectStore]:
    """The object store; when it is away, or this machine cannot keep what it sends, the command ends in words."""
    hush()
    try:
        async with ObjectStore(address.settings(), patience_s=PATIENCE_S) as objects:
            yield objects
    except TransientError as error:
        if getattr(error.__cause__, "errno", None) in OURS:
            raise CliError(str(error)) from error
        raise CliError(f"the object store at {address.s3_endpoint} does not answer: {error}") from error
