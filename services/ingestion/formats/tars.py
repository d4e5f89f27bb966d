"""Tar archives as WebDataset reads them: files side by side that differ in the extension alone are one sample."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from contracts.spec.data import DataSource
from services.ingestion.core.keys import UnsafePath, check_path, row_key, rows_key
from services.ingestion.core.records import (
    MAX_LABEL_CHARS,
    InvalidRecord,
    RecordFault,
    ValidRecord,
    find_label,
    parse_json,
    record_of_files,
)

BLOCK = 512
#: Names and headers of headers are no longer than this.
MAX_HEADER_BYTES = 2**20
#: The member that holds a sample's class.
CLASS = "cls"
#: What a gzipped archive may become.
MAX_UNPACKED_RATIO, MAX_UNPACKED_BYTES = 200, 64 * 2**30
MAX_EXTENSION_CHARS = 20
GZIPPED = (".tar.gz", ".tgz")

Records = Generator[ValidRecord | InvalidRecord, None, None]


class Member(NamedTuple):
    """A plain file in an archive."""

    name: str
    #: Of its header, and of its content.
    header: int
    offset: int
    size: int


class BrokenTar(ValueError):
    """The rest of the archive cannot be read; the message gives the reason."""

    def __init__(self, text: str, follows: str | None = None) -> None:
        """Set ``follows``: the sample that would come next, '' for none, None if it is unknown."""
        super().__init__(text)
        self.follows = follows


def samples(data: DataSource, path: str, local: Path) -> Records:
    """Yield the samples of one archive, plain or gzipped, up to a fault."""
    prefix = rows_key(path)
    if not path.lower().endswith(GZIPPED):
        yield from _samples(data, prefix, local)
        return
    unpacked = local.with_name(f"{local.name}-tar")
    try:
        _gunzip(local, unpacked)
        yield from _samples(data, prefix, unpacked)
    except RecordFault as fault:
        yield InvalidRecord(fault.code, fault.detail, whole_object=True)
    finally:
        unpacked.unlink(missing_ok=True)


def _samples(data: DataSource, prefix: str, local: Path) -> Records:
    number = 0
    with local.open("rb") as file:
        group: list[Member] = []
        try:
            for member in members(file):
                if group and stem(member.name) != stem(group[0].name):
                    yield _sample(data, file, group, row_key(prefix, number))
                    number, group = number + 1, []
                group.append(member)
            if group:
                yield _sample(data, file, group, row_key(prefix, number))
            elif number == 0:
                yield InvalidRecord("empty", "the archive has no files", whole_object=True)
        except BrokenTar as error:
            # Where the next sample is unknown, the last one may lack a file.
            if group and error.follows is not None and error.follows != stem(group[0].name):
                yield _sample(data, file, group, row_key(prefix, number))
                group = []
            yield InvalidRecord("broken_tar", str(error), group[0].header if group else None, whole_object=True)


def stem(name: str) -> str:
    """Return the name up to the first dot of its last part, as WebDataset does."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _sample(data: DataSource, file: BinaryIO, group: list[Member], key: str) -> ValidRecord | InvalidRecord:
    offset = group[0].header
    try:
        files: dict[str, bytes] = {}
        check_path(stem(group[0].name).removeprefix("./"))
        if (size := sum(member.size for member in group)) > data.checks.max_record_bytes:
            raise RecordFault("oversized", f"a sample of {size:,} bytes")
        for member in group:
            ext = _extension(member.name)
            if ext in files:
                raise RecordFault("duplicate_file", f"the sample {stem(member.name)!r} has two files .{ext}")
            file.seek(member.offset)
            files[ext] = file.read(member.size)
        return sample_of(data, files, key, offset, stem(group[0].name))
    except UnsafePath as error:
        return InvalidRecord("unsafe_key", f"the name {group[0].name[:100]!r} {error}", offset)
    except RecordFault as fault:
        return InvalidRecord(fault.code, fault.detail, offset)


def sample_of(data: DataSource, files: dict[str, bytes], key: str, offset: int, name: str) -> ValidRecord:
    """Return a record of files and its label: the file ``cls``, or ``data.label_field`` of its JSON.

    Raises:
        RecordFault: its JSON or its label cannot be read, or nothing else is in it.
    """
    value: dict[str, Any] = {"__key__": name}
    if "json" in files:
        parsed = parse_json(files["json"])
        value |= parsed if isinstance(parsed, dict) else {}
    label: str | None = None
    continuous = False
    if data.label_field not in (None, CLASS):
        label, continuous = find_label(value, data.label_field)
    elif CLASS in files:
        label = _class(files.pop(CLASS))
    elif data.label_field == CLASS:
        raise RecordFault("missing_label", "the sample has no file .cls (data.label_field)")
    # Sharding writes the class itself.
    files.pop(CLASS, None)
    if not files:
        raise RecordFault("empty", "the sample has no file")
    return record_of_files(key, files, label, offset, value, continuous)


def _class(content: bytes) -> str:
    try:
        label = content.decode().strip()
    except UnicodeDecodeError as error:
        raise RecordFault("invalid_utf8", f"the file .cls: {error.reason}") from error
    if not label or len(label) > MAX_LABEL_CHARS:
        raise RecordFault("invalid_label", f"the file .cls holds {len(label)} characters")
    return label


def _extension(name: str) -> str:
    ext = name.rpartition("/")[2].partition(".")[2].lower()
    if not ext or len(ext) > MAX_EXTENSION_CHARS or not all(part.isascii() and _plain(part) for part in ext.split(".")):
        raise RecordFault("unknown_extension", f"the file {name[:100]!r} has no extension that can be a field's name")
    return ext


def _plain(part: str) -> bool:
    return bool(part) and part.replace("_", "").replace("-", "").isalnum()


# -- the archive ------------------------------------------------------------------


def members(file: BinaryIO) -> Iterator[Member]:
    """Yield the regular files of an untrusted archive (ustar, pax, GNU).

    Raises:
        BrokenTar: it is damaged, or ends before its end.
    """
    total = file.seek(0, 2)
    at = 0
    name: str | None = None
    declared_size: int | None = None
    while True:
        start = at
        header = _read(file, at, BLOCK, total)
        at += BLOCK
        if not any(header):
            if not _zeros_from(file, at):
                raise BrokenTar(f"there is more behind the mark of its end, at {start:,}", "")
            return
        size, kind = _parse_size(header), header[156:157]
        if kind in (b"x", b"L"):
            if size > MAX_HEADER_BYTES:
                raise BrokenTar(f"a header of {size:,} bytes")
            content = _read(file, at, size, total)
            at += -(-size // BLOCK) * BLOCK
            if kind == b"L":
                name = _text(content)
            else:
                records = _pax(content)
                name = records.get("path", name)
                declared_size = _number(records["size"]) if "size" in records else declared_size
            continue
        if kind in (b"g", b"K"):
            at += -(-size // BLOCK) * BLOCK
            continue
        if kind in (b"0", b"\0", b"7"):
            size = size if declared_size is None else declared_size
            member = Member(_name(header) if name is None else name, start, at, size)
            at += -(-size // BLOCK) * BLOCK
            if member.offset + size > total:
                raise BrokenTar(f"it ends within {member.name[:100]!r}: {total:,} bytes", stem(member.name))
            if not member.name.endswith("/"):
                yield member
        elif kind in (b"S", b"M", b"V"):
            raise BrokenTar(f"a member of kind {kind!r} (sparse or in volumes): write it again with plain tar")
        # Links, folders and devices have no content.
        name = declared_size = None


def _zeros_from(file: BinaryIO, at: int) -> bool:
    file.seek(at)
    while chunk := file.read(2**20):
        if chunk.count(0) != len(chunk):
            return False
    return True


def _read(file: BinaryIO, at: int, size: int, total: int) -> bytes:
    if at + size > total:
        raise BrokenTar(f"it ends after {total:,} bytes, without the mark of its end")
    file.seek(at)
    return file.read(size)


def _parse_size(header: bytes) -> int:
    """Return the size in a header whose checksum is right."""
    checksum = _octal(header[148:156])
    body = header[:148] + b" " * 8 + header[156:]
    signed = sum(body) - 256 * sum(byte > 127 for byte in body)
    if checksum not in (sum(body), signed):
        raise BrokenTar("the checksum of a header does not fit: it is damaged")
    field = header[124:136]
    # A size beyond the octal digits is a binary number, after a marker bit.
    return int.from_bytes(field[1:], "big") if field[0] == 0x80 else _octal(field)


def _octal(field: bytes) -> int:
    text = field.split(b"\0", 1)[0].strip()
    try:
        number = int(text or b"0", 8)
    except ValueError as error:
        raise BrokenTar("a header has an invalid number") from error
    if number < 0:
        raise BrokenTar("a header has a number below 0")
    return number


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise BrokenTar("a header has an invalid size")
    return int(text)


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(content: bytes) -> str:
    return content.split(b"\0", 1)[0].decode(errors="backslashreplace")


def _pax(content: bytes) -> dict[str, str]:
    """Return the records of an extended header: ``length key=value\\n`` each."""
    found: dict[str, str] = {}
    at = 0
    while at < len(content) and content[at]:
        length_text, _, rest = content[at : at + 24].partition(b" ")
        if not rest or not length_text.isdigit():
            raise BrokenTar("an extended header is invalid")
        length = int(length_text)
        key, equals, value = content[at + len(length_text) + 1 : at + length].partition(b"=")
        if not equals or length <= len(length_text) or not value.endswith(b"\n"):
            raise BrokenTar("an extended header is invalid")
        found[key.decode(errors="replace")] = value[:-1].decode(errors="backslashreplace")
        at += length
    return found


def _gunzip(packed: Path, unpacked: Path) -> None:
    most = min(MAX_UNPACKED_BYTES, max(2**26, MAX_UNPACKED_RATIO * packed.stat().st_size))
    written = 0
    try:
        with gzip.open(packed) as source, unpacked.open("wb") as target:
            while chunk := source.read(2**20):
                written += len(chunk)
                if written > most:
                    raise RecordFault("bomb", f"{packed.stat().st_size:,} bytes unpack to more than {most:,}")
                target.write(chunk)
    except (OSError, EOFError, zlib.error) as error:
        raise RecordFault("broken_tar", f"{type(error).__name__}: {error}") from error
