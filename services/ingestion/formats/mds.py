"""Folders of MosaicML's streaming library (MDS), decoded without it.

``index.json`` names the shards and their columns. A shard is ``uint32`` n, ``uint32[n + 1]`` offsets of its samples,
the columns as JSON, the samples; a sample is ``uint32`` sizes of its columns of no fixed size, then all columns. Text,
numbers and JSON become one JSON file of the sample, everything else a file of its own.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import zstandard
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contracts.spec.data import DataSource
from services.ingestion.core.keys import row_key, rows_key
from services.ingestion.core.records import InvalidRecord, RecordFault, ValidRecord, encode_json, parse_json
from services.ingestion.formats.tars import sample_of

INDEX = "index.json"
MAX_INDEX_BYTES = 256 * 2**20
#: A shard's offsets have 32 bits.
MAX_SHARD_BYTES = 2**32
MAX_WINDOW_BYTES = 2**27
CHUNK = 2**20

Records = Generator[ValidRecord | InvalidRecord, None, None]


class MdsFile(BaseModel):
    """A shard's file in the index."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    basename: str
    size: int = Field(alias="bytes", ge=0, le=MAX_SHARD_BYTES)
    hashes: dict[str, str] = Field(default_factory=dict)


class MdsShard(BaseModel):
    """One shard in an index."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    column_names: tuple[str, ...] = Field(max_length=10_000)
    column_encodings: tuple[str, ...]
    column_sizes: tuple[int | None, ...]
    compression: str | None = None
    format: str = "mds"
    raw_data: MdsFile
    samples: int = Field(ge=0, le=MAX_SHARD_BYTES // 4)
    zip_data: MdsFile | None = None


class MdsIndex(BaseModel):
    """``index.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int
    shards: tuple[MdsShard, ...]


def read_index(content: bytes) -> dict[str, MdsShard]:
    """Return the shards by the names of their files, compressed or not.

    Raises:
        ValueError: it is no index of MDS shards.
    """
    try:
        index = MdsIndex.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"it is no index.json of MDS: {first['msg']} at {'.'.join(map(str, first['loc']))}") from error
    found: dict[str, MdsShard] = {}
    for shard in index.shards:
        if not len(shard.column_names) == len(shard.column_encodings) == len(shard.column_sizes):
            raise ValueError(f"the columns of {shard.raw_data.basename!r} have not as many encodings and sizes")
        for file in (shard.raw_data, shard.zip_data):
            if file is not None and found.setdefault(file.basename, shard) is not shard:
                raise ValueError(f"two shards have the file {file.basename!r}")
    return found


def samples(data: DataSource, path: str, local: Path, shard: MdsShard) -> Records:
    """Yield the samples of one shard."""
    prefix = rows_key(path)
    unpacked = local.with_name(f"{local.name}-mds")
    try:
        packed = path.rpartition("/")[2] != shard.raw_data.basename
        if packed and shard.zip_data is not None:
            _check_file(shard.zip_data, local)
            _unpack(shard, local, unpacked)
        raw = unpacked if packed else local
        _check_file(shard.raw_data, raw)
        columns = _Columns(shard)
        with raw.open("rb") as file:
            offsets = _offsets(shard, file)
            for number in range(shard.samples):
                yield _sample(data, columns, file, offsets, number, row_key(prefix, number))
    except RecordFault as fault:
        yield InvalidRecord(fault.code, fault.detail, whole_object=True)
    finally:
        unpacked.unlink(missing_ok=True)


def _check_file(entry: MdsFile, local: Path) -> None:
    size = local.stat().st_size
    if size != entry.size:
        raise RecordFault("broken_mds", f"{entry.basename} has {size:,} bytes, {entry.size:,} in index.json")
    for name, expected in entry.hashes.items():
        if name in hashlib.algorithms_guaranteed and not name.startswith("shake"):
            with local.open("rb") as file:
                if hashlib.file_digest(file, name).hexdigest() != expected:
                    raise RecordFault("broken_mds", f"{entry.basename} has another {name} than in index.json")


def _unpack(shard: MdsShard, packed: Path, unpacked: Path) -> None:
    """Decompress up to the size in the index."""
    kind = (shard.compression or "").partition(":")[0]
    if kind not in ("zstd", "gz"):
        raise RecordFault(
            "broken_mds", f"its compression {shard.compression!r} is not known here: use zstd, gz or none"
        )
    written = 0
    try:
        with packed.open("rb") as source, unpacked.open("wb") as target:
            for chunk in _zstd(source) if kind == "zstd" else _gzip(source):
                written += len(chunk)
                if written > shard.raw_data.size:
                    raise RecordFault(
                        "bomb", f"it unpacks to more than the {shard.raw_data.size:,} bytes of index.json"
                    )
                target.write(chunk)
    except (zstandard.ZstdError, zlib.error) as error:
        raise RecordFault("broken_mds", f"{type(error).__name__}: {error}") from error


def _zstd(source: BinaryIO) -> Iterator[bytes]:
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(source, read_across_frames=True)
    return iter(partial(reader.read, CHUNK), b"")


def _gzip(source: BinaryIO) -> Generator[bytes, None, None]:
    unpack = zlib.decompressobj(wbits=31)
    while content := source.read(CHUNK):
        while content:
            yield unpack.decompress(content, CHUNK)
            content = unpack.unconsumed_tail
    yield unpack.flush()


def _offsets(shard: MdsShard, file: BinaryIO) -> numpy.ndarray[Any, numpy.dtype[numpy.uint32]]:
    head = file.read(4 + 4 * (shard.samples + 1))
    if len(head) != 4 + 4 * (shard.samples + 1) or struct.unpack("<I", head[:4])[0] != shard.samples:
        raise RecordFault("broken_mds", f"it does not hold the {shard.samples:,} samples of index.json")
    offsets = numpy.frombuffer(head, "<u4", offset=4)
    if int(offsets[0]) < len(head) or int(offsets[-1]) > shard.raw_data.size or (offsets[1:] < offsets[:-1]).any():
        raise RecordFault("broken_mds", "the offsets of its samples are no offsets in it")
    return offsets


def _sample(
    data: DataSource,
    columns: _Columns,
    file: BinaryIO,
    offsets: numpy.ndarray[Any, numpy.dtype[numpy.uint32]],
    number: int,
    key: str,
) -> ValidRecord | InvalidRecord:
    start, end = int(offsets[number]), int(offsets[number + 1])
    try:
        if end - start > data.checks.max_record_bytes:
            raise RecordFault("oversized", f"a sample of {end - start:,} bytes")
        file.seek(start)
        files = columns.files(file.read(end - start))
        return sample_of(data, files, key, number, str(number))
    except RecordFault as fault:
        return InvalidRecord(fault.code, fault.detail, number)
    except (ValueError, OverflowError, MemoryError, struct.error) as error:
        return InvalidRecord("broken_mds", f"{type(error).__name__}: {error}", number)


class _Columns:
    """Decodes one shard's samples.

    Raises:
        RecordFault: an encoding that is not known, or that would run code.
    """

    def __init__(self, shard: MdsShard) -> None:
        self._columns = [
            (name, VALUES.get(encoding), _find_file(encoding), encoding, size)
            for name, encoding, size in zip(shard.column_names, shard.column_encodings, shard.column_sizes, strict=True)
        ]
        for name, value, file, encoding, _ in self._columns:
            if value is None and file is None:
                known = ", ".join(sorted({*VALUES, *FILES}))
                raise RecordFault("unsupported_type", f"column {name!r} is encoded as {encoding!r}; known: {known}")

    def files(self, sample: bytes) -> dict[str, bytes]:
        """Return the files of one sample, by extension."""
        at = 4 * sum(size is None for *_, size in self._columns)
        sizes = iter(struct.unpack(f"<{at // 4}I", sample[:at])) if len(sample) >= at else iter(())
        values: dict[str, Any] = {}
        files: dict[str, bytes] = {}
        for name, value, file, _, fixed in self._columns:
            size = fixed if fixed is not None else next(sizes, None)
            if size is None or size < 0 or at + size > len(sample):
                raise RecordFault("broken_mds", f"the sample ends within the column {name!r}")
            content, at = sample[at : at + size], at + size
            if value is not None:
                values[name] = _decode_column(name, value, content)
            elif file is not None:
                ext, convert = file
                files[f"{_safe(name)}.{ext}"] = convert(content)
        if at != len(sample):
            raise RecordFault("broken_mds", f"{len(sample) - at} bytes are left over behind the last column")
        if values:
            files["json"] = encode_json(values)
        return files


def _decode_column(name: str, decode: Callable[[bytes], Any], content: bytes) -> Any:
    try:
        return decode(content)
    except UnicodeDecodeError as error:
        raise RecordFault("invalid_utf8", f"column {name!r}: {error.reason}") from error


def _safe(name: str) -> str:
    """Return a column's name as part of an extension."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in name.lower())[:60]
    return safe or "_"


def _scalar(kind: str) -> Callable[[bytes], Any]:
    dtype = numpy.dtype(kind).newbyteorder("<")

    def decode(content: bytes) -> Any:
        if len(content) != dtype.itemsize:
            raise RecordFault("broken_mds", f"a {kind} of {len(content)} bytes")
        return numpy.frombuffer(content, dtype)[0].item()

    return decode


#: Encoding -> the value in the sample's JSON.
VALUES: Mapping[str, Callable[[bytes], Any]] = {
    "str": bytes.decode,
    "str_int": lambda content: int(content.decode()),
    "str_float": lambda content: float(content.decode()),
    "str_decimal": bytes.decode,
    "json": parse_json,
    "int": _scalar("int64"),
    **{f"{kind}{bits}": _scalar(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": _scalar(f"float{bits}") for bits in (16, 32, 64)},
}


def _pil(content: bytes) -> bytes:
    """Return raw pixels as PNG."""
    if len(content) < 12:
        raise RecordFault("truncated", "an image of less than 12 bytes")
    width, height, mode_size = struct.unpack("<III", content[:12])
    mode = content[12 : 12 + min(mode_size, 16)].decode("ascii", "replace")
    if width * height > 8 * len(content):
        raise RecordFault("truncated", f"{len(content):,} bytes for {width} x {height} pixels")
    try:
        image = Image.frombytes(mode, (width, height), content[12 + mode_size :])
        target = io.BytesIO()
        image.save(target, "PNG")
    except Exception as error:  # Pillow raises many types on corrupt files
        raise RecordFault("undecodable", f"{type(error).__name__}: {error}") from error
    return target.getvalue()


#: Encoding -> extension of the file, and what turns the column's bytes into it.
FILES: Mapping[str, tuple[str, Callable[[bytes], bytes]]] = {
    "bytes": ("bin", bytes),
    "jpeg": ("jpg", bytes),
    "png": ("png", bytes),
    "pil": ("png", _pil),
}
#: The codes of the data types of arrays.
DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}


def _find_file(encoding: str) -> tuple[str, Callable[[bytes], bytes]] | None:
    name, _, settings = encoding.partition(":")
    if name == "ndarray":
        return "npy", _array(settings)
    return FILES.get(name)


def _array(settings: str) -> Callable[[bytes], bytes]:
    """Return the decoder of ``ndarray``, ``ndarray:float32`` or ``ndarray:float32:3,4`` to a NumPy file."""
    dtype_text, _, shape_text = settings.partition(":")
    if dtype_text and dtype_text not in DTYPES.values():
        raise RecordFault("unsupported_type", f"an array of {dtype_text!r}")
    try:
        declared = tuple(int(part) for part in shape_text.split(",")) if shape_text else None
    except ValueError as error:
        raise RecordFault("broken_mds", f"an array of shape {shape_text!r}") from error

    def convert(content: bytes) -> bytes:
        at, shape = 0, declared
        dtype_name = dtype_text
        if not dtype_name:
            dtype_name, at = DTYPES.get(content[0], "") if content else "", 1
        if not dtype_name:
            raise RecordFault("broken_mds", "an array of no known type")
        if shape is None:
            if len(content) <= at:
                raise RecordFault("broken_mds", "an array without a shape")
            ndim, width = content[at] >> 2, 1 << (content[at] & 3)
            part = content[at + 1 : at + 1 + ndim * width]
            if len(part) < ndim * width:
                raise RecordFault("broken_mds", "an array without a shape")
            shape = tuple(numpy.frombuffer(part, f"<u{width}").tolist())
            at += 1 + len(part)
        array = numpy.frombuffer(content[at:], numpy.dtype(dtype_name).newbyteorder("<")).reshape(shape)
        target = io.BytesIO()
        numpy.save(target, array, allow_pickle=False)
        return target.getvalue()

    return convert
