"""The hash over a whole training state, from the hashes of its tensors.

Each rank writes ``digests-<rank>.json``: what it holds, by name, with a hash over type, shape and bytes. Which rank
holds what depends on their number; the union does not, and neither does its hash.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from contracts.datasets import canonical_json

DIGESTS = re.compile(r"^digests-(\d+)\.json$")
SHA256 = re.compile(r"^[0-9a-f]{64}$")
#: More than any model's names take; what is larger is not read into memory.
MAX_DIGESTS_BYTES = 256 * 2**20


def parse(content: bytes) -> dict[str, str]:
    """Name -> hash.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("no JSON object of names and hashes")
    for name, value in found.items():
        if not isinstance(value, str) or not SHA256.match(value):
            raise ValueError(f"{name!r} has no SHA-256")
    return found


def union(by_path: Mapping[str, bytes]) -> dict[str, str]:
    """All ranks' digests in one.

    Raises:
        ValueError: a file is no list of digests, or two disagree about a tensor; the text names it.
    """
    found: dict[str, str] = {}
    told_by: dict[str, str] = {}
    for path in sorted(by_path):
        try:
            digests = parse(by_path[path])
        except ValueError as error:
            raise ValueError(f"{path!r} holds no digests: {error}") from error
        for name, value in digests.items():
            if found.setdefault(name, value) != value:
                raise ValueError(
                    f"{told_by[name]!r} and {path!r} disagree about {name!r}: the ranks have drifted apart"
                )
            told_by.setdefault(name, path)
    return found


def state_digest(digests: Mapping[str, str]) -> str:
    """One hash for the whole state, the same however many ranks wrote it."""
    return hashlib.sha256(canonical_json(dict(digests))).hexdigest()


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, what is with it) for everything that is not the same in both, sorted by name."""
    words = []
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            words.append((name, "only in the first"))
        elif name not in ours:
            words.append((name, "only in the second"))
        elif ours[name] != theirs[name]:
            words.append((name, "differs"))
    return words
