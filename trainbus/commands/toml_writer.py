"""Writing TOML, as far as a policy's file needs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def dumps(content: dict[str, Any]) -> str:
    """Return the content as a TOML file without its None values, which TOML does not have."""
    return "\n".join(_table(content, ())).strip() + "\n"


def _table(content: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Write the values first: a table ends where the next one begins."""
    tables = {name: value for name, value in content.items() if isinstance(value, dict) or _rows(value)}
    for name, value in content.items():
        if value is not None and name not in tables:
            yield f"{_key(name)} = {_value(value)}"
    for name, value in tables.items():
        inner = (*path, _key(name))
        for row in value if _rows(value) else [value]:
            yield ""
            yield f"[[{'.'.join(inner)}]]" if _rows(value) else f"[{'.'.join(inner)}]"
            yield from _table(row, inner)


def _rows(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, dict) for row in value)


def _key(name: str) -> str:
    bare = name and all(char.isascii() and (char.isalnum() or char in "_-") for char in name)
    return name if bare else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(each) for each in value)}]"
    # Strings, numbers and truth values are written in TOML as in JSON.
    return json.dumps(value, ensure_ascii=False)
