"""Writes one split's samples into shards on the local disk, with an offset index each."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from contracts.datasets import canonical_json
from contracts.events.dataset import ShardFile
from services.sharding.core import tar


class ShardWriter:
    """Samples in, shards of at most about ``shard_bytes`` out. Same samples, same bytes."""

    def __init__(self, folder: Path, split: str, shard_bytes: int) -> None:
        self._folder, self._split, self._shard_bytes = folder, split, shard_bytes
        self.shards: list[ShardFile] = []
        self._file: BinaryIO | None = None
        (folder / split).mkdir(parents=True, exist_ok=True)

    def add(self, key: str, files: list[tuple[str, bytes]]) -> None:
        """Append one sample: its files by extension."""
        size = sum(tar.member_bytes(len(content)) for _, content in files)
        if self._file is not None and self._offset + size + len(tar.END) > self._shard_bytes:
            self.finish()
        if self._file is None:
            self._open()
        fields: dict[str, list[int]] = {}
        for ext, content in files:
            fields[ext] = [self._offset + tar.BLOCK, len(content)]
            self._write(tar.header(f"{key}.{ext}", len(content)) + content + tar.padding(len(content)))
        # Encoded at once: a shard of tiny samples has 100,000 of them.
        self._samples.append(canonical_json({"fields": fields, "key": key}))

    def finish(self) -> None:
        """Complete the shard that is open, if one is."""
        if self._file is None:
            return
        self._write(tar.END)
        self._file.close()
        self._file = None
        index = b'{"samples":[' + b",".join(self._samples) + b'],"version":1}'
        index_path = f"{self._name}.idx.json"
        (self._folder / index_path).write_bytes(index)
        self.shards.append(
            ShardFile(
                path=f"{self._name}.tar",
                sha256=self._digest.hexdigest(),
                size_bytes=self._offset,
                samples=len(self._samples),
                index_path=index_path,
                index_sha256=hashlib.sha256(index).hexdigest(),
            )
        )

    def _open(self) -> None:
        self._name = f"{self._split}/shard-{len(self.shards):05d}"
        self._file = (self._folder / f"{self._name}.tar").open("wb", buffering=2**20)
        self._digest = hashlib.sha256()
        self._offset = 0
        self._samples: list[bytes] = []

    def _write(self, content: bytes) -> None:
        assert self._file is not None
        self._file.write(content)
        self._digest.update(content)
        self._offset += len(content)
