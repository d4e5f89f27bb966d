"""Where data is, as people say it on the command line."""

from __future__ import annotations

import re
from pathlib import Path

from trainbus.client.errors import USAGE, CliError


def data_location(text: str) -> str:
    """The address of a source: ``s3://bucket/prefix`` and ``file:///folder`` as they are, a path here as ``file:///``.

    Raises:
        CliError: it is neither an address nor there.
    """
    if re.match(r"s3://[^/]+/", text) or text.startswith("file:///"):
        return text
    if "://" not in text and (path := Path(text)).exists():
        return path.resolve().as_uri()
    raise CliError(f"there is no data at {text!r}: give s3://bucket/prefix, or a folder or file that is here", USAGE)
