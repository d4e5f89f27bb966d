"""Other libraries that read samples, each as its documentation says, in one process, into batches of arrays.

What is not installed is left out. None of them may bring another torch:
``pip install -r requirements-peers.txt --no-deps``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.data.sets import SHARD_BYTES, Written, content

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Peer:
    """A library, how data is written for it, and how all of it is read once."""

    name: str
    module: str
    write: Callable[[Path, int, int, Written], None]
    #: (folder, batch, order): the order is for those that take one; others shuffle on their own where it is given.
    read: Callable[[Path, int, Ids | None], None]
    shuffles: bool = True

    #: Imported before the clock runs.
    imports: tuple[str, ...] = ()

    def load(self) -> None:
        """Import the library."""
        if self.name == "MDS":
            _stub_what_mds_imports()
        for name in self.imports or (self.module,):
            importlib.import_module(name)

    def missing(self) -> str | None:
        """Return why it cannot be measured; None: it can."""
        return None if importlib.util.find_spec(self.module) is not None else "not installed"


def _collate(samples: Iterable[bytes], batch: int) -> None:
    """Every ``batch`` samples become one array."""
    iterator = (sample for sample in samples)  # LitData's own begins anew when it is asked after its end
    while chunk := list(islice(iterator, batch)):
        np.stack([np.frombuffer(sample, dtype=np.uint8) for sample in chunk])


# --- WebDataset -----------------------------------------------------------------------------------


def _write_webdataset(folder: Path, samples: int, size: int, ours: Written) -> None:
    folder.mkdir()
    for path in ours.paths:  # it reads our shards
        (folder / path.name).symlink_to(path)


def _read_webdataset(folder: Path, batch: int, order: Ids | None) -> None:
    import webdataset

    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    dataset = webdataset.WebDataset(urls, shardshuffle=len(urls) if order is not None else False)
    if order is not None:
        dataset = dataset.shuffle(1000)
    _collate((sample["bin"] for sample in dataset), batch)


# --- MosaicML streaming ---------------------------------------------------------------------------


def _write_mds(folder: Path, samples: int, size: int, ours: Written) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"bin": "bytes"}, compression=None, size_limit=SHARD_BYTES) as out:
        for number in range(samples):
            out.write({"bin": content(number, size)})


def _read_mds(folder: Path, batch: int, order: Ids | None) -> None:
    import streaming

    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(local=str(folder), batch_size=batch, shuffle=order is not None)
    _collate((sample["bin"] for sample in dataset), batch)


class _Stub(types.ModuleType):
    """A module of which any name can be imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Stubs:
    """Finds modules that MDS imports for what is not used here: images, tokenizers, cloud stores."""

    names = ("transformers", "torchvision", "oci", "paramiko", "google", "azure", "snappy", "brotli", "zstd")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


def _stub_what_mds_imports() -> None:
    if not any(isinstance(finder, _Stubs) for finder in sys.meta_path):
        sys.meta_path.append(_Stubs())  # after the real ones


# --- LitData --------------------------------------------------------------------------------------


def _write_litdata(folder: Path, samples: int, size: int, ours: Written) -> None:
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_bytes=SHARD_BYTES)
    for number in range(samples):
        writer.add_item(number, content(number, size))
    writer.done()
    writer.merge()


def _read_litdata(folder: Path, batch: int, order: Ids | None) -> None:
    from litdata import StreamingDataset

    _collate(StreamingDataset(str(folder), shuffle=order is not None), batch)


# --- ArrayRecord ----------------------------------------------------------------------------------


def _write_array_record(folder: Path, samples: int, size: int, ours: Written) -> None:
    from array_record.python import array_record_module

    folder.mkdir()
    per_shard = SHARD_BYTES // size
    for first in range(0, samples, per_shard):
        path = folder / f"part-{first // per_shard:05d}.array_record"
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for number in range(first, min(first + per_shard, samples)):
            writer.write(content(number, size))
        writer.close()


def _read_array_record(folder: Path, batch: int, order: Ids | None) -> None:
    from array_record.python import array_record_data_source

    source = array_record_data_source.ArrayRecordDataSource([str(path) for path in sorted(folder.iterdir())])
    order = np.arange(len(source)) if order is None else order
    for start in range(0, len(order), batch):
        found = source.__getitems__(order[start : start + batch].tolist())
        np.stack([np.frombuffer(sample, dtype=np.uint8) for sample in found])


# --- Parquet --------------------------------------------------------------------------------------


def _write_parquet(folder: Path, samples: int, size: int, ours: Written) -> None:
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    per_group = 1024
    schema = pyarrow.schema([("bin", pyarrow.binary(size))])
    options = {"compression": "none", "use_dictionary": False}
    with parquet.ParquetWriter(folder / "all.parquet", schema, **options) as out:
        for first in range(0, samples, per_group):
            values = [content(number, size) for number in range(first, min(first + per_group, samples))]
            out.write_table(pyarrow.table({"bin": pyarrow.array(values, pyarrow.binary(size))}, schema))


def _read_parquet(folder: Path, batch: int, order: Ids | None) -> None:
    from pyarrow import parquet

    file = parquet.ParquetFile(folder / "all.parquet", memory_map=True)
    size = file.schema_arrow.field("bin").type.byte_width
    for group in range(file.num_row_groups):
        for column in file.read_row_group(group, use_threads=False).column(0).chunks:
            rows = np.frombuffer(column.buffers()[1], dtype=np.uint8).reshape(-1, size)
            for start in range(column.offset, column.offset + len(column), batch):
                rows[start : min(start + batch, column.offset + len(column))].copy()


_RECORDS = "array_record.python.array_record_data_source"

PEERS = (
    Peer("WebDataset", "webdataset", _write_webdataset, _read_webdataset),
    Peer("MDS", "streaming", _write_mds, _read_mds),
    Peer("LitData", "litdata", _write_litdata, _read_litdata),
    Peer("ArrayRecord", "array_record", _write_array_record, _read_array_record, imports=(_RECORDS,)),
    Peer("Parquet", "pyarrow", _write_parquet, _read_parquet, shuffles=False, imports=("pyarrow.parquet",)),
)
