"""The address of data, from what a user types."""

from __future__ import annotations

import re
from pathlib import Path

from trainbus.client.errors import UsageError


def resolve_source(text: str) -> str:
    """Return the address of a source: ``s3://bucket/prefix`` and ``file:///`` as they are, a local path as ``file:///``.

    Raises:
        UsageError: the text is neither an address nor an existing path.
    """
    if re.match(r"s3://[^/]+/", text) or text.startswith("file:///"):
        return text
    if "://" not in text and (path := Path(text)).exists():
        return path.resolve().as_uri()
    raise UsageError(f"there is no data at {text!r}: give s3://bucket/prefix, or a folder or file that is here")
