"""Unpacks a dataset's shards into plain files. A process of its own: it takes memory and processors, and may crash.

    python -m services.worker.data_folders.unpack DATASET TARGET NICENESS

``DATASET`` has the manifest and all shards. Files are below ``TARGET/<split>``: of images and other files one a sample,
in the folder of its class; rows as one Parquet file a shard, all of one schema; text and tokens one flat file a shard.
Prints ``{"files": ..., "size_bytes": ...}``.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import polars

from contracts import shard_index
from contracts.base import short_hash
from contracts.datasets import Manifest
from contracts.events.dataset import ShardFile
from services.worker.core.plain_paths import (
    CLASS_FIELD,
    EXIT_INVALID,
    FILE_TIME_S,
    ROW_FIELD,
    SPLIT_FOLDERS,
    are_rows,
    class_folder,
    sample_paths,
)

FILE_MODE = 0o444
#: How the flat files of a format end.
FLAT_SUFFIXES = {"text": "txt", "tokens": "bin"}


@dataclass
class FileCount:
    """How much was written."""

    files: int = 0
    size_bytes: int = 0

    def add(self, path: Path) -> None:
        """Count a file, and make it read-only."""
        os.utime(path, (FILE_TIME_S, FILE_TIME_S))
        self.files += 1
        self.size_bytes += path.stat().st_size


def unpack_dataset(dataset: Path, target: Path) -> FileCount:
    """Write the files of every split that has samples.

    Raises:
        ValueError: the manifest or a shard is not what it should be.
        OSError: there is no room.
    """
    manifest = Manifest.model_validate_json((dataset / "manifest.json").read_bytes())
    written = FileCount()
    schema = _merge_schemas(dataset, manifest)
    for split, folder in SPLIT_FOLDERS.items():
        for number, shard in enumerate(manifest.splits[split].shards if split in manifest.splits else ()):
            below = target / folder
            below.mkdir(parents=True, exist_ok=True)
            if suffix := FLAT_SUFFIXES.get(manifest.format):
                written.add(_copy(dataset / shard.path, below / f"{number:05d}.{suffix}"))
            elif schema is not None:
                written.add(_write_rows(dataset, shard, schema, below / f"{number:05d}.parquet"))
            else:
                for path in _write_samples(dataset, shard, manifest.classes, below):
                    written.add(path)
    return written


def _copy(source: Path, path: Path) -> Path:
    shutil.copyfile(source, path)
    path.chmod(FILE_MODE)
    return path


# -- rows -----------------------------------------------------------------------------


def _merge_schemas(dataset: Path, manifest: Manifest) -> polars.Schema | None:
    """Return the columns of all rows, each of a type that holds its values in every shard; None: they are no rows."""
    schemas: list[polars.Schema] = []
    for shard in (shard for split in manifest.splits.values() for shard in split.shards):
        if manifest.format in FLAT_SUFFIXES or not _has_rows(dataset, shard):
            return None
        schemas.append(_read_rows(dataset, shard).schema)
    return polars.concat([schema.to_frame() for schema in schemas], how="diagonal_relaxed").schema if schemas else None


def _has_rows(dataset: Path, shard: ShardFile) -> bool:
    return are_rows(shard_index.decode((dataset / shard.index_path).read_bytes()).fields)


def _read_rows(dataset: Path, shard: ShardFile, schema: polars.Schema | None = None) -> polars.DataFrame:
    with _open_shard(dataset, shard) as (index, content):
        places = (index.places(row)[ROW_FIELD] for row in range(index.samples))
        lines = b"\n".join(content[offset : offset + size] for offset, size in places)
    return polars.read_ndjson(lines, infer_schema_length=None, schema=schema)


def _write_rows(dataset: Path, shard: ShardFile, schema: polars.Schema, path: Path) -> Path:
    _read_rows(dataset, shard, schema).write_parquet(path)
    path.chmod(FILE_MODE)
    return path


# -- files ----------------------------------------------------------------------------


def _write_samples(dataset: Path, shard: ShardFile, classes: Sequence[str], folder: Path) -> Iterator[Path]:
    """Write each field of each sample as a file. Every class has its folder, so that all splits number them alike."""
    for each in classes:
        (folder / class_folder(each)).mkdir(exist_ok=True)
    made = {folder}
    with _open_shard(dataset, shard) as (index, content):
        for row in range(index.samples):
            key = index.key(row)
            fields = {ext: content[at : at + size] for ext, (at, size) in index.places(row).items()}
            number = fields.pop(CLASS_FIELD, None) if classes else None
            label = None if number is None else classes[int(number)]
            for extension, name in sample_paths(key, label, list(fields)).items():
                path = _below(folder, name)
                if path.parent not in made:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    made.add(path.parent)
                if path.exists():
                    # Two keys that differ in nothing but the folder of their class.
                    path = path.with_stem(f"{path.stem}-{short_hash(key)}")
                yield _write(path, fields[extension])


def _below(folder: Path, name: PurePosixPath) -> Path:
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"the key of sample {str(name)!r} leads out of its folder")
    return folder / name


def _write(path: Path, content: bytes) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return path


@contextmanager
def _open_shard(dataset: Path, shard: ShardFile) -> Iterator[tuple[shard_index.ShardIndex, mmap.mmap]]:
    index = shard_index.decode((dataset / shard.index_path).read_bytes())
    with (
        (dataset / shard.path).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        yield index, content


def main() -> None:
    os.nice(int(sys.argv[3]))
    try:
        written = unpack_dataset(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ValueError, polars.exceptions.ComputeError) as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_INVALID)
    print(json.dumps({"files": written.files, "size_bytes": written.size_bytes}))


if __name__ == "__main__":
    main()
