"""Writes one shard on the local disk from rows and the places of their contents, with its offset index."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from contracts import shard_index
from contracts.events.dataset import ShardFile
from services.sharding.core import index as core_index
from services.sharding.core import tar
from services.sharding.core.index import Int64s
from services.sharding.core.rows import CLASS, Rows

#: Rows that are read at a time, and bytes that are written before the event loop runs again.
BATCH_ROWS, BATCH_BYTES = 16_384, 8 * 2**20
#: Samples are put together in memory that the processor's cache holds; a larger sample is copied in portions.
BUFFER_BYTES = 2**20
#: Of the key of a sample in a flat shard: digits of the hash that stands for its file.
SHORT_PREFIX = 10


#: Numbers of samples, and the offsets and sizes of one of their fields.
FieldPortion = tuple[Int64s, Int64s, Int64s]


class Contents(NamedTuple):
    """Where the contents of a batch's rows lie: open files, and offsets in them."""

    handles: Sequence[int]
    offsets: Sequence[int]


class ContentMismatch(ValueError):
    """A content does not match its hash; ``row`` is its number in the batch."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row}")
        self.row = row


class _ShardShape(NamedTuple):
    """The files that a sample has, sorted by extension."""

    #: Numbers of the fields, and how the files' names end.
    fields: list[int]
    suffixes: list[bytes]
    #: Which of them is the class, that is not part of the content; -1: none.
    class_at: int


class ShardWriter:
    """One shard: batches of rows in, a file and its index out. The same rows give the same bytes."""

    def __init__(
        self, path: Path, name: str, extensions: Sequence[str], class_contents: Sequence[bytes], *, flat: bool
    ) -> None:
        self._name, self._flat = name, flat
        self._extensions, self._class_contents = extensions, class_contents
        self.path = path
        self._file = path.open("wb", buffering=0)
        self._digest = hashlib.sha256()
        buffer = bytearray(BUFFER_BYTES)
        self._view, self._buffer = memoryview(buffer), np.frombuffer(buffer, dtype=np.uint8)
        self._offset = 0
        self._count = 0
        #: Keys joined, and their lengths, a portion a batch.
        self._keys: list[bytes] = []
        self._key_lengths: list[NDArray[np.int16]] = []
        #: Size of the samples of a flat file, and their field.
        self._window, self._window_ext = 0, ""
        self._field_numbers: dict[str, int] = {}
        #: By field, a portion a batch.
        self._fields: list[list[FieldPortion]] = []
        self._shapes: dict[tuple[str, ...], _ShardShape] = {}

    def close(self) -> None:
        """Close the file, complete or not."""
        self._file.close()

    def add(self, rows: Rows, extras: Mapping[int, Mapping[str, Any]], contents: Contents) -> None:
        """Append a batch of samples (see ``batches``).

        Raises:
            ContentMismatch: a content's hash is not that of its row.
            ValueError: a sample does not fit the format.
        """
        for begin, part in _runs(rows, BUFFER_BYTES):
            if self._flat:
                self._add_flat(part, begin, contents)
            else:
                self._add_archived(part, begin, extras, contents)

    def finish(self, index_path: Path) -> ShardFile:
        """Complete the shard and write its index."""
        if not self._flat:
            self._write(memoryview(tar.END))
        self.close()
        fields: dict[str, tuple[Int64s, Int64s] | shard_index.StridedField] = {
            ext: self._arrays(self._fields[number]) for ext, number in self._field_numbers.items()
        }
        if self._flat:
            fields = {self._window_ext: shard_index.StridedField(0, self._window, self._window)}
        index = core_index.encode(b"".join(self._keys), np.concatenate(self._key_lengths), fields)
        index_path.write_bytes(index)
        return ShardFile(
            path=f"{self._name}.{'bin' if self._flat else 'tar'}",
            sha256=self._digest.hexdigest(),
            size_bytes=self._offset,
            samples=self._count,
            index_path=f"{self._name}.idx",
            index_sha256=hashlib.sha256(index).hexdigest(),
            index_bytes=len(index),
        )

    # -- archives -----------------------------------------------------------------

    def _add_archived(
        self, rows: Rows, begin: int, extras: Mapping[int, Mapping[str, Any]], contents: Contents
    ) -> None:
        shapes, names, listed = self._members(rows, extras)
        sizes = np.array(listed, dtype=np.int64)
        blocks = 1 + -(-sizes // tar.BLOCK)
        starts = np.cumsum(blocks) - blocks
        self._note_fields(shapes, self._offset + (starts + 1) * tar.BLOCK, sizes)
        self._note_keys(rows["key"].tolist())
        headers = tar.headers(names, sizes)
        if int(rows["stored"][0]) > BUFFER_BYTES:
            self._copy_large(rows, begin, shapes[0], listed, headers, contents)
            return
        total = int(blocks.sum()) * tar.BLOCK
        grid = self._buffer[:total].reshape(-1, tar.BLOCK)
        # The last block of each is padded; what is not overwritten below stays zero.
        grid[starts + blocks - 1] = 0
        grid[starts] = headers
        view, at, member = self._view, ((starts + 1) * tar.BLOCK).tolist(), 0
        labels, checks, fast = rows["label"].tolist(), rows["check"].tobytes(), rows["fast"].tolist()
        for i, shape in enumerate(shapes):
            end = member + len(shape.fields)
            places = [view[at[m] : at[m] + listed[m]] for m in range(member, end)]
            member = end
            if shape.class_at >= 0:
                places.pop(shape.class_at)[:] = self._class_contents[labels[i]]
            _read(contents.handles[begin + i], contents.offsets[begin + i], places)
            if not _is_right(places, fast[i], checks[32 * i : 32 * i + 32]):
                raise ContentMismatch(begin + i)
        self._write(view[:total])

    def _members(
        self, rows: Rows, extras: Mapping[int, Mapping[str, Any]]
    ) -> tuple[list[_ShardShape], list[bytes], list[int]]:
        """Return the shape of each sample, and the names and sizes of all their files."""
        shapes: list[_ShardShape] = []
        names: list[bytes] = []
        sizes: list[int] = []
        columns = (rows[name].tolist() for name in ("key", "label", "size", "extra", "ext"))
        plain: dict[tuple[int, bool], _ShardShape] = {}
        for key, label, size, extra, ext in zip(*columns, strict=True):
            own = [size]
            if extra >= 0 and (fields := extras[extra]["fields"]):
                shape = self._shape(tuple(name for name, _ in fields), with_class=label >= 0)
                own = [part for _, part in fields]
            elif (found := plain.get((ext, label >= 0))) is not None:
                shape = found
            else:
                shape = plain[ext, label >= 0] = self._shape((self._extensions[ext],), with_class=label >= 0)
            if shape.class_at >= 0:
                own.insert(shape.class_at, len(self._class_contents[label]))
            shapes.append(shape)
            for suffix in shape.suffixes:
                names.append(key + suffix)
            sizes += own
        return shapes, names, sizes

    def _shape(self, exts: tuple[str, ...], *, with_class: bool) -> _ShardShape:
        """Return the shape of a sample of these files. The contents are in the order of extensions."""
        cached = (*exts, CLASS) if with_class else exts
        shape = self._shapes.get(cached)
        if shape is None:
            ordered = sorted(cached)
            fields = [self._field(ext) for ext in ordered]
            suffixes = [f".{ext}".encode() for ext in ordered]
            shape = _ShardShape(fields, suffixes, ordered.index(CLASS) if with_class else -1)
            self._shapes[cached] = shape
        return shape

    def _field(self, ext: str) -> int:
        if ext not in self._field_numbers:
            self._field_numbers[ext] = len(self._fields)
            self._fields.append([])
        return self._field_numbers[ext]

    def _note_fields(self, shapes: list[_ShardShape], offsets: Int64s, sizes: Int64s) -> None:
        """Record where each field of each sample is."""
        if len(set(map(id, shapes))) == 1:  # as nearly always
            numbers, width = self._count + np.arange(len(shapes), dtype=np.int64), len(shapes[0].fields)
            for place, field in enumerate(shapes[0].fields):
                self._fields[field].append((numbers, offsets[place::width].copy(), sizes[place::width].copy()))
            return
        counts = np.fromiter((len(shape.fields) for shape in shapes), dtype=np.int64, count=len(shapes))
        numbers = self._count + np.repeat(np.arange(len(shapes), dtype=np.int64), counts)
        fields = np.fromiter((field for shape in shapes for field in shape.fields), dtype=np.int64, count=len(sizes))
        for field in np.unique(fields).tolist():
            mine = fields == field
            self._fields[field].append((numbers[mine], offsets[mine], sizes[mine]))

    def _note_keys(self, keys: list[bytes]) -> None:
        self._keys.append(b"".join(keys))
        self._key_lengths.append(np.fromiter(map(len, keys), dtype=np.int16, count=len(keys)))
        self._count += len(keys)

    def _copy_large(
        self,
        rows: Rows,
        begin: int,
        shape: _ShardShape,
        sizes: list[int],
        headers: NDArray[np.uint8],
        contents: Contents,
    ) -> None:
        """Append one sample that does not fit the buffer."""
        digest, offset = _hasher(bool(rows["fast"][0])), contents.offsets[begin]
        for member, (size, header) in enumerate(zip(sizes, headers, strict=True)):
            self._write(memoryview(header.tobytes()))
            if member == shape.class_at:
                self._write(memoryview(self._class_contents[int(rows["label"][0])]))
            else:
                self._copy(contents.handles[begin], offset, size, digest)
                offset += size
            self._write(memoryview(bytes(-size % tar.BLOCK)))
        if not _equals(digest.digest(), rows["check"].tobytes()):
            raise ContentMismatch(begin)

    def _copy(self, handle: int, offset: int, size: int, digest: Any) -> None:
        for at in range(0, size, BUFFER_BYTES):
            portion = self._view[: min(BUFFER_BYTES, size - at)]
            _read(handle, offset + at, [portion])
            digest.update(portion)
            self._write(portion)

    # -- flat files ---------------------------------------------------------------

    def _add_flat(self, rows: Rows, begin: int, contents: Contents) -> None:
        """Append windows of one size, with nothing between them."""
        size, count = int(rows["size"][0]), len(rows)
        if (rows["size"] != size).any() or size != (self._window or size):
            raise ValueError("a flat file holds samples of one size")
        self._window, self._window_ext = size, self._extensions[int(rows["ext"][0])]
        self._note_keys([short_key(key) for key in rows["key"].tolist()])
        view, checks, fast = self._view, rows["check"].tobytes(), rows["fast"].tolist()
        if size > BUFFER_BYTES:
            digest = _hasher(fast[0])
            self._copy(contents.handles[begin], contents.offsets[begin], size, digest)
            if not _equals(digest.digest(), checks):
                raise ContentMismatch(begin)
            return
        for i in range(count):
            places = [view[i * size : (i + 1) * size]]
            _read(contents.handles[begin + i], contents.offsets[begin + i], places)
            if not _is_right(places, fast[i], checks[32 * i : 32 * i + 32]):
                raise ContentMismatch(begin + i)
        self._write(view[: count * size])

    # -- both ---------------------------------------------------------------------

    def _arrays(self, portions: list[FieldPortion]) -> tuple[Int64s, Int64s]:
        """Return offset and size for every sample; ``ABSENT`` for those without the field."""
        offsets = np.zeros(self._count, dtype=np.int64)
        sizes = np.full(self._count, shard_index.ABSENT, dtype=np.int64)
        for numbers, found, lengths in portions:
            offsets[numbers], sizes[numbers] = found, lengths
        return offsets, sizes

    def _write(self, content: memoryview) -> None:
        self._digest.update(content)
        self._offset += len(content)
        while content:
            content = content[self._file.write(content) :]


def short_key(key: bytes) -> bytes:
    """Return the key of a window: ten digits for its file, and its number in hexadecimal.

    ``corpus_txt-0a1b2c3d4e5f/000000031`` -> ``0a1b2c3d4e/1f``: a window has few bytes, and its key should have fewer.
    """
    file, _, number = key.rpartition(b"/")
    if not number.isdigit():
        return hashlib.sha256(key).hexdigest()[: 2 * SHORT_PREFIX].encode()
    return f"{hashlib.sha256(file).hexdigest()[:SHORT_PREFIX]}/{int(number):x}".encode()


def batches(rows: Rows) -> Iterator[Rows]:
    """Yield rows in batches of about ``BATCH_BYTES``."""
    return (part for _, part in _runs(rows, BATCH_BYTES))


def _runs(rows: Rows, size_bytes: int) -> Iterator[tuple[int, Rows]]:
    """Yield runs of rows of at most ``size_bytes``, and where each begins; a larger sample is a run by itself."""
    before = np.concatenate(([0], np.cumsum(rows["stored"])))
    begin = 0
    while begin < len(rows):
        end = int(np.searchsorted(before, before[begin] + size_bytes, side="right")) - 1
        end = max(end, begin + 1)
        yield begin, rows[begin:end]
        begin = end


def _hasher(fast: bool) -> Any:
    return xxhash.xxh3_128() if fast else hashlib.sha256()


def _is_right(places: list[memoryview], fast: bool, check: bytes) -> bool:
    """Return whether the content in these places matches the ingested record."""
    if fast and len(places) == 1:  # the usual case, in half the time of a hash object
        return _equals(xxhash.xxh3_128_digest(places[0]), check)
    digest = _hasher(fast)
    for place in places:
        digest.update(place)
    return _equals(digest.digest(), check)


def _equals(digest: bytes, check: bytes) -> bool:
    """Compare hashes; the shorter one fills the first half of its column."""
    return digest == check[: len(digest)]


def _read(handle: int, offset: int, places: list[memoryview]) -> None:
    """Fill ``places``, one after the other, from a file."""
    size = len(places[0]) if len(places) == 1 else sum(map(len, places))
    if os.preadv(handle, places, offset) == size:
        return
    # The system may read less at a time. The hash reveals a file that is too short.
    whole = bytearray()
    while len(whole) < size and (part := os.pread(handle, size - len(whole), offset + len(whole))):
        whole += part
    at = 0
    for place in places:
        place[:] = bytes(whole[at : at + len(place)]).ljust(len(place), b"\0")
        at += len(place)
