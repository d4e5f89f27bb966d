"""The hash over a whole training state, from the hashes of its tensors.

Each rank writes ``digests-<rank>.json``: what it holds, by name, with a hash over type, shape and bytes. Which rank
holds what depends on their number; the union does not, and neither does its hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from contracts.base import Sha256
from contracts.datasets import canonical_json

DIGESTS = re.compile(r"^digests-(\d+)\.json$")
_DIGESTS = TypeAdapter(dict[str, Sha256])
#: More than any model's names take; what is larger is not read into memory.
MAX_DIGESTS_BYTES = 256 * 2**20


def parse(content: bytes) -> dict[str, str]:
    """Name -> hash.

    Raises:
        ValueError: it is something else.
    """
    try:
        return _DIGESTS.validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(": ".join([*map(repr, first["loc"]), first["msg"]])) from error


def union(by_path: Mapping[str, bytes]) -> dict[str, str]:
    """All ranks' digests in one.

    Raises:
        ValueError: a file is no list of digests, or two disagree about a tensor; the text names it.
    """
    found: dict[str, str] = {}
    sources: dict[str, str] = {}
    for path in sorted(by_path):
        try:
            digests = parse(by_path[path])
        except ValueError as error:
            raise ValueError(f"{path!r} holds no digests: {error}") from error
        for name, value in digests.items():
            if found.setdefault(name, value) != value:
                raise ValueError(
                    f"{sources[name]!r} and {path!r} disagree about {name!r}: the ranks have drifted apart"
                )
            sources.setdefault(name, path)
    return found


def state_digest(digests: Mapping[str, str]) -> str:
    """One hash for the whole state, the same however many ranks wrote it."""
    return hashlib.sha256(canonical_json(dict(digests))).hexdigest()


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, what is with it) for everything that is not the same in both, sorted by name."""
    found = {name: "differs" for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    found |= dict.fromkeys(ours.keys() - theirs.keys(), "only in the first")
    found |= dict.fromkeys(theirs.keys() - ours.keys(), "only in the second")
    return sorted(found.items())
