"""What can be wrong with an object or the store. What passes by itself is ``TransientError``, as on the bus."""

from __future__ import annotations


class ObjectNotFound(Exception):
    """There is no such object (or bucket)."""


class ObjectExists(Exception):
    """A conditional put found the object already there."""


class ObjectChanged(Exception):
    """The object is no longer the version that was listed."""


class ObjectCorrupted(ValueError):
    """The content does not match its hash or size."""


class StoreRefused(Exception):
    """The store refuses this request, and a repetition would be refused too."""
