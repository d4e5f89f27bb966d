"""Small sources of every format in which some of the files are spoiled, and what must come out of them all the same."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import zstandard
from PIL import Image

from contracts.datasets import canonical_json

SOUND_FILES, SPOILED_FILES = 4, 21
ROWS = 12


@dataclass
class Case:
    """A source, which of its files are spoiled, and what is known of the others."""

    format: str
    files: dict[str, bytes] = field(default_factory=dict)
    spoiled: set[str] = field(default_factory=set)
    #: SHA-256 of every sample that nobody touched.
    sound: set[str] = field(default_factory=set)
    #: Records there are, where that can be told of spoiled files too.
    listed: int | None = None
    #: Files that are no data themselves.
    naming: set[str] = field(default_factory=set)
    settings: dict[str, Any] = field(default_factory=dict)
    #: What names the files was spoiled itself: the job may be refused as a whole, with a reason.
    may_be_refused: bool = False


# -- spoiling -------------------------------------------------------------------------


def spoil(rng: random.Random, content: bytes) -> bytes:
    """Something like ``content`` that is not ``content``."""
    while True:
        spoiled = content
        for _ in range(rng.choice((1, 1, 1, 3, 10))):
            spoiled = rng.choice(SPOILERS)(rng, spoiled)
        if spoiled != content:
            return spoiled


def _flip(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(min(len(changed), rng.choice((1, 1, 4, 32)))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _place(rng: random.Random, content: bytes) -> int:
    # Headers and footers are where formats are delicate.
    where = rng.random()
    if where < 0.3:
        return rng.randrange(min(64, len(content)) + 1)
    if where < 0.6:
        return max(0, len(content) - rng.randrange(min(256, len(content)) + 1))
    return rng.randrange(len(content) + 1)


def _number(rng: random.Random, content: bytes) -> bytes:
    """A number where some length may have been."""
    at = _place(rng, content)
    value = rng.choice((0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, rng.getrandbits(32)))
    order = rng.choice("<>")
    return content[:at] + struct.pack(f"{order}I", value) + content[at + 4 :]


def _cut(rng: random.Random, content: bytes) -> bytes:
    return content[: _place(rng, content)]


def _remove(rng: random.Random, content: bytes) -> bytes:
    at = _place(rng, content)
    return content[:at] + content[at + rng.choice((1, 4, 100)) :]


def _insert(rng: random.Random, content: bytes) -> bytes:
    at = _place(rng, content)
    return content[:at] + rng.randbytes(rng.choice((1, 4, 100))) + content[at:]


def _repeat(rng: random.Random, content: bytes) -> bytes:
    at = _place(rng, content)
    part = content[at : at + rng.choice((1, 16, 512))]
    return content[:at] + part * rng.choice((2, 10)) + content[at:]


def _zeros(rng: random.Random, content: bytes) -> bytes:
    at, size = _place(rng, content), rng.choice((1, 16, 512))
    return content[:at] + bytes(min(size, len(content) - at)) + content[at + size :]


def _junk(rng: random.Random, content: bytes) -> bytes:
    return rng.choice((b"", b"\0", b"<html>404</html>", b"\xff" * 100, rng.randbytes(200), b"[" * 5000, content[::-1]))


SPOILERS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_flip, _flip, _flip, _number, _number, _cut, _cut, _remove, _insert, _repeat, _zeros, _junk),
)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# -- images ---------------------------------------------------------------------------


def image(rng: random.Random, kind: str) -> bytes:
    size = rng.choice(((8, 8), (31, 17), (64, 48)))
    mode = rng.choice(("L", "RGB"))
    pixels = rng.randbytes(size[0] * size[1] * len(mode))
    target = io.BytesIO()
    Image.frombytes(mode, size, pixels).save(target, kind)
    return target.getvalue()


KINDS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP", "bmp": "BMP", "gif": "GIF", "tif": "TIFF"}


def bomb_png() -> bytes:
    """A few bytes that say they are 40,000 x 40,000 pixels."""
    head = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(2**20))), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def images(rng: random.Random) -> Case:
    case = Case("images")
    for number in range(SOUND_FILES * 3 + SPOILED_FILES):
        ext = rng.choice(list(KINDS))
        content = image(rng, KINDS[ext])
        path = f"{number % 3}/{number:03d}.{ext}"
        if number < SPOILED_FILES:
            content = spoil(rng, content) if number else bomb_png()
            case.spoiled.add(path)
        else:
            case.sound.add(sha256(content))
        case.files[path] = content
    case.listed = len(case.files)
    return case


def labelled(rng: random.Random) -> Case:
    """Images whose table of labels is spoiled."""
    case = Case("images", may_be_refused=True)
    lines = ["file,label,site"]
    for number in range(SPOILED_FILES):
        case.files[f"{number}.png"] = image(rng, "PNG")
        lines.append(f"{number}.png,{'ab'[number % 2]},{number % 5}")
    case.files["labels.csv"] = spoil(rng, "\n".join(lines).encode())
    case.naming = {"labels.csv"}
    case.settings = {"split": {"by": "group", "group_field": "site"}} if rng.random() < 0.3 else {}
    return case


def binary(rng: random.Random) -> Case:
    """Files whose manifest is spoiled."""
    case = Case("binary", may_be_refused=True)
    lines = []
    for number in range(SPOILED_FILES):
        case.files[f"d/{number}.dat"] = rng.randbytes(50)
        lines.append(json.dumps({"file": f"d/{number}.dat", "label": "ab"[number % 2], "n": number}))
    case.files["manifest.jsonl"] = spoil(rng, "\n".join(lines).encode())
    case.naming = {"manifest.jsonl"}
    return case


# -- rows -----------------------------------------------------------------------------


def _row(rng: random.Random) -> dict[str, Any]:
    return {
        "id": rng.getrandbits(60),
        "x": rng.random(),
        "text": "".join(rng.choice("aäß漢 z") for _ in range(rng.randrange(20))),
        "y": rng.choice("abc"),
        "list": [rng.randrange(9) for _ in range(rng.randrange(3))],
    }


def jsonl(rng: random.Random) -> Case:
    """Lines are spoiled one by one: the others of the same file must come through."""
    case = Case("jsonl", settings={"label_field": "y"}, listed=0)
    for number in range(SOUND_FILES):
        lines: list[bytes] = []
        for _ in range(ROWS):
            row = _row(rng)
            line = json.dumps(row).encode()
            if rng.random() < SPOILED_FILES / (SOUND_FILES * ROWS):
                line = spoil(rng, line).replace(b"\n", b" ")
                case.spoiled.add(f"{number}.jsonl:{len(lines)}")
            else:
                case.sound.add(sha256(canonical_json(row)))
            lines.append(line)
        case.files[f"{number}.jsonl"] = b"\n".join(lines)
        case.listed = (case.listed or 0) + sum(bool(line.strip()) for line in lines)
    return case


def parquet(rng: random.Random) -> Case:
    case = Case("parquet", settings={"label_field": "y"})
    for number in range(SOUND_FILES * 2 + SPOILED_FILES):
        rows = [_row(rng) for _ in range(ROWS)]
        target = io.BytesIO()
        table = pyarrow.Table.from_pylist(rows)
        codec = rng.choice(("zstd", "snappy", "gzip", "none"))
        # With checksums of pages, so that what was flipped in them is found.
        pyarrow.parquet.write_table(table, target, row_group_size=5, compression=codec, write_page_checksum=True)
        content, path = target.getvalue(), f"{number:03d}.parquet"
        if number < SPOILED_FILES:
            content = spoil(rng, content)
            case.spoiled.add(path)
        else:
            case.sound |= {sha256(canonical_json(row)) for row in rows}
        case.files[path] = content
    return case


# -- shards of others -----------------------------------------------------------------


def webdataset(rng: random.Random) -> Case:
    case = Case("webdataset")
    for number in range(SOUND_FILES * 2 + SPOILED_FILES):
        target = io.BytesIO()
        samples = []
        kind = rng.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
        with tarfile.open(fileobj=target, mode="w", format=kind) as archive:
            for row in range(4):
                long = "very-" * 30 if rng.random() < 0.2 and kind != tarfile.USTAR_FORMAT else ""
                files = {"png": image(rng, "PNG"), "json": json.dumps(_row(rng)).encode(), "cls": b"ab"[row % 2 :][:1]}
                for ext, content in files.items():
                    info = tarfile.TarInfo(f"{long}{number}-{row}.{ext}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
                samples.append(sha256(files["json"] + files["png"]))
        content, path = target.getvalue(), f"{number:03d}.tar"
        if rng.random() < 0.3:
            content, path = gzip.compress(content, mtime=0), f"{path}.gz"
        if number < SPOILED_FILES:
            content = spoil(rng, content)
            case.spoiled.add(path)
        else:
            case.sound |= set(samples)
        case.files[path] = content
    return case


def mds(rng: random.Random) -> Case:
    case = Case("mds", settings={"label_field": "y"}, naming={"index.json"})
    shards = []
    columns = {"image": ("png", None), "y": ("str", None), "n": ("int", 8), "v": ("ndarray:float32:3", 12)}
    packed = rng.random() < 0.5
    for number in range(SOUND_FILES * 2 + SPOILED_FILES):
        samples = []
        hashes = []
        for row in range(4):
            picture, vector = image(rng, "PNG"), numpy.array([rng.random() for _ in range(3)], "<f4")
            label = "ab"[row % 2]
            fixed = struct.pack("<q", row) + vector.tobytes()
            samples.append(struct.pack("<II", len(picture), 1) + picture + label.encode() + fixed)
            array = io.BytesIO()
            numpy.save(array, vector)
            values = canonical_json({"n": row, "y": label})
            hashes.append(sha256(picture + values + array.getvalue()))  # image.png, json, v.npy
        raw = mds_shard(samples, columns)
        name = f"shard.{number:05d}.mds"
        entry = mds_entry(name, raw, len(samples), columns)
        content = raw
        if packed:
            content, name = zstandard.compress(raw), f"{name}.zstd"
            entry["zip_data"] = {"basename": name, "bytes": len(content), "hashes": {}}
            entry["compression"] = "zstd"
        shards.append(entry)
        if number < SPOILED_FILES:
            content = spoil(rng, content)
            if rng.random() < 0.5:  # so that the size alone does not tell
                entry["zip_data" if packed else "raw_data"]["bytes"] = len(content)
            case.spoiled.add(name)
        else:
            case.sound |= set(hashes)
        case.files[name] = content
    index = json.dumps({"version": 2, "shards": shards}).encode()
    if rng.random() < 0.1:
        index, case.may_be_refused, case.sound = spoil(rng, index), True, set()
    case.files["index.json"] = index
    return case


def mds_shard(samples: list[bytes], columns: dict[str, tuple[str, int | None]]) -> bytes:
    """A shard as MosaicML's writer lays it out."""
    config = json.dumps({"column_names": list(columns)}).encode()
    head = 4 + 4 * (len(samples) + 1) + len(config)
    offsets = numpy.cumsum([head, *map(len, samples)]).astype("<u4")
    return struct.pack("<I", len(samples)) + offsets.tobytes() + config + b"".join(samples)


def mds_entry(name: str, raw: bytes, samples: int, columns: dict[str, tuple[str, int | None]]) -> dict[str, Any]:
    """What ``index.json`` tells of a shard."""
    return {
        "column_names": list(columns),
        "column_encodings": [encoding for encoding, _ in columns.values()],
        "column_sizes": [size for _, size in columns.values()],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": name, "bytes": len(raw), "hashes": {}},
        "samples": samples,
        "version": 2,
        "zip_data": None,
    }


MAKERS: tuple[Callable[[random.Random], Case], ...] = (images, jsonl, parquet, webdataset, mds, labelled, binary)


def make(seed: int) -> Case:
    """One case, a function of its number."""
    return MAKERS[seed % len(MAKERS)](random.Random(seed))
