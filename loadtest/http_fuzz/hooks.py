"""Names of what is there, so that random requests get past the look-up. schemathesis imports it by itself."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import schemathesis  # type: ignore[import-not-found]

#: Parameter of an address -> a value that exists.
NAMES: dict[str, str] = json.loads(os.environ["HTTP_FUZZ_NAMES"])
SHARE_OF_KNOWN = 0.5


@schemathesis.hook  # type: ignore[untyped-decorator]
def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    if not path_parameters or random.random() > SHARE_OF_KNOWN:
        return path_parameters
    return {**path_parameters, **{name: NAMES[name] for name in path_parameters if name in NAMES}}


@schemathesis.hook  # type: ignore[untyped-decorator]
def map_query(context: Any, query: Any) -> Any:
    """A stream of events ends only when its run does, or the reader."""
    follows = any(each.name == "follow" for each in context.operation.query)
    return {**query, "follow": "false"} if follows and isinstance(query, dict) else query


@schemathesis.serializer("application/gzip")  # type: ignore[untyped-decorator]
def pass_on(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else bytes(str(value), "utf-8", "replace")
