"""The stack's object store, opened for a client."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from contracts.disk_space import DISK_FULL
from services.kit.messages import TransientError
from trainbus.client.address import StackAddress
from trainbus.client.errors import StackUnreachableError, TrainbusError

if TYPE_CHECKING:
    from services.kit.store.objects import ObjectStore

#: Seconds for which a request is repeated while the store does not answer.
PATIENCE_S = 5.0
#: Errors that come from this machine's disk, never from the store.
LOCAL_ERRORS = (*DISK_FULL, errno.EROFS, errno.EACCES)


@asynccontextmanager
async def open_object_store(address: StackAddress) -> AsyncIterator[ObjectStore]:
    """Open the object store.

    Raises:
        StackUnreachableError: the store does not answer.
        TrainbusError: this machine cannot write what the store sends.
    """
    # It loads what a command that reads no object need not wait for.
    from services.kit.store.objects import ObjectStore

    try:
        async with ObjectStore(address.settings(), patience_s=PATIENCE_S) as objects:
            yield objects
    except TransientError as error:
        if getattr(error.__cause__, "errno", None) in LOCAL_ERRORS:
            raise TrainbusError(str(error)) from error
        raise StackUnreachableError(
            f"the object store at {address.s3_endpoint} does not answer: {error} (`trainbus doctor` shows more)"
        ) from error
