"""The order of samples in a dataset: by a hash of their keys."""

from __future__ import annotations

import hashlib

PLACE_BYTES = 16


def place(seed: int, key: str) -> bytes:
    """Return a record's place in the order; it depends only on the key and the seed.

    Ingestion puts records into packs, and sharding into shards, by it: what comes into one shard lies in few packs.
    """
    return hashlib.sha256(f"order\0{seed}\0{key}".encode()).digest()[:PLACE_BYTES]


def group(seed: int, key: str, groups: int) -> int:
    """Return which of ``groups`` equal parts of the order the record is in."""
    return int.from_bytes(place(seed, key)[:8], "big") * groups >> 64
