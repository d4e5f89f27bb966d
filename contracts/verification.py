"""What the gateway finds when it reads stored files back and compares them with their hashes."""

from __future__ import annotations

from pydantic import BaseModel


class CheckpointVerification(BaseModel):
    """How many checkpoints were read back, and those with blobs that are missing or differ from their hash."""

    checkpoints: int
    #: Address of a manifest -> what of it is rotten; the manifest itself by its own address.
    rotten: dict[str, list[str]]
    #: The runs of the rotten ones.
    runs: list[str]


class DamagedFile(BaseModel):
    """A file of a dataset that differs from its manifest."""

    uri: str
    problem: str
    #: Its path in the manifest; '' for the manifest itself.
    path: str = ""


class DatasetVerification(BaseModel):
    """What was verified, and the damage by dataset."""

    datasets: int = 0
    shards: int = 0
    samples: int = 0
    size_bytes: int = 0
    damaged: dict[str, list[DamagedFile]] = {}
