"""Pointer files of DVC 3: written beside a checkpoint's manifest, and read for the hash of the checkpoint's folder.

A pointer lists ``outs`` with ``md5``, ``size``, ``hash`` and ``path`` of each file. MD5 protects against accidents and
not against forgery: what is restored from is the manifest, by SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import NamedTuple

POINTER_SUFFIX = ".dvc"
_OUT = re.compile(r"^- md5: ([0-9a-f]{32})\n  size: (\d+)\n  hash: md5\n  path: (\".*\")$", re.MULTILINE)
#: A backslash itself, or a character beyond 16 bits.
_ESCAPED = re.compile(r"\\\\|\\U([0-9a-f]{8})")


class TrackedFile(NamedTuple):
    """A file of a pointer."""

    path: str
    md5: str
    size_bytes: int


def pointer_content(files: Iterable[TrackedFile]) -> bytes:
    """Return the pointer file."""
    lines = ["outs:"]
    for path, md5, size_bytes in files:
        lines += [f"- md5: {md5}", f"  size: {size_bytes}", "  hash: md5", f"  path: {_quote(path)}"]
    return ("\n".join(lines) + "\n").encode()


def read_pointer(content: bytes) -> list[TrackedFile]:
    """Return the files of a pointer that ``pointer_content`` has made."""
    found = _OUT.findall(content.decode())
    return [TrackedFile(_unquote(path), md5, int(size_bytes)) for md5, size_bytes, path in found]


def pointers_prefix(manifest_uri: str) -> str:
    """Return how the addresses of a checkpoint's pointers begin; each node writes one."""
    return manifest_uri.removesuffix(".json") + "."


def hash_folder(files: Iterable[TrackedFile]) -> str:
    """Return the hash that DVC gives a folder with these files."""
    entries = sorted(({"md5": each.md5, "relpath": each.path} for each in files), key=lambda entry: entry["relpath"])
    listing = json.dumps(entries, sort_keys=True).encode()
    return hashlib.md5(listing, usedforsecurity=False).hexdigest() + ".dir"


def _quote(text: str) -> str:
    """Return a text as YAML has it in double quotes: as JSON does, but for characters beyond 16 bits.

    JSON escapes those as two surrogates, which YAML takes for two characters.
    """
    return '"' + "".join(_escape(each) for each in text) + '"'


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) < 0x10000 else f"\\U{ord(character):08x}"


def _unquote(quoted: str) -> str:
    text: str = json.loads(_ESCAPED.sub(lambda found: found[0] if found[1] is None else chr(int(found[1], 16)), quoted))
    return text
