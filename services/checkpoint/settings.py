"""The checkpoint service's own settings."""

from __future__ import annotations

from pydantic import Field

from services.kit.settings import Settings
from services.kit.store.objects import REUSE_AGE_S


class CheckpointSettings(Settings):
    #: Where the store keeps no hash of its own: blobs up to this size are read back and hashed before a commit; of
    #: larger ones the size alone is compared.
    checkpoint_verify_bytes: int = Field(256 * 2**20, ge=0)
    #: Blobs of one checkpoint that are verified at the same time.
    checkpoint_verify_parallel: int = Field(16, ge=1)
    #: Every so often all that is committed is read back and hashed; 0: only on request.
    checkpoint_scrub_every_s: float = Field(7 * 86_400.0, ge=0)
    #: How fast, at most: others use the store too.
    checkpoint_scrub_bytes_per_s: float = Field(32.0 * 2**20, gt=0)
    checkpoint_gc_every_s: float = Field(6 * 3600.0, gt=0)
    #: What was written more lately than this is never garbage. It must leave room for the slowest upload.
    checkpoint_gc_grace_s: float = Field(48 * 3600.0, ge=4 * REUSE_AGE_S)
