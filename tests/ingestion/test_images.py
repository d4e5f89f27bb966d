"""Which images are broken, by named faults in real bytes."""

from __future__ import annotations

import struct
import zlib

import pytest

from contracts.spec.data import DataSource
from services.ingestion.core.records import InvalidRecord, ValidRecord
from services.ingestion.decoders import with_content
from services.ingestion.formats.images import ImageValidator, LabelledImage, reject_unread
from tests.support_data import image_bytes

JUDGE = ImageValidator(DataSource(source="s3://lake/x", format="images"))
MAX_BYTES = 64 * 2**20
PNG, JPEG = image_bytes(1, size=64), image_bytes(1, "JPEG", size=64)


def bomb() -> bytes:
    """Return a PNG of a few bytes whose header declares 40,000 x 40,000 pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("path", "content", "codes"),
    [
        ("a/cut.png", PNG[: len(PNG) // 2], {"truncated"}),
        ("a/cut.jpg", JPEG[: len(JPEG) // 2], {"truncated"}),
        ("a/text.png", b"<html>not found</html>", {"undecodable"}),
        ("a/header.png", PNG[:20], {"truncated", "undecodable"}),
        ("a/flipped.png", flipped(PNG, len(PNG) // 2), {"undecodable", "truncated"}),
        ("a/bomb.png", bomb(), {"too_many_pixels"}),
        ("a/lies.png", JPEG, {"wrong_extension"}),
    ],
)
def test_broken_images(path: str, content: bytes, codes: set[str]) -> None:
    found = JUDGE.validate(LabelledImage(path, "a"), content)
    assert isinstance(found, InvalidRecord)
    assert found.code in codes
    assert found.sha256
    assert "0x" not in found.detail, "an address in the text would make two runs differ"


@pytest.mark.parametrize(
    ("path", "size", "code"),
    [("a/x.txt", 3, "unknown_extension"), ("a/x.png", 0, "empty"), ("a/x.png", MAX_BYTES + 1, "oversized")],
)
def test_images_are_rejected_by_the_listing(path: str, size: int, code: str) -> None:
    found = reject_unread(path, size, MAX_BYTES)
    assert found is not None
    assert found.code == code


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_valid_images_keep_their_bytes(kind: str) -> None:
    content = image_bytes(2, kind)
    found = JUDGE.validate(LabelledImage(f"b/x.{kind.lower()}", "b"), content)
    assert isinstance(found, ValidRecord)
    assert (found.size, found.ext, found.label, found.key) == (len(content), kind.lower(), "b", "b/x")
    assert found.measures
    kept = with_content(found, content, 2**20)
    assert isinstance(kept, ValidRecord)
    assert kept.content == content
    assert with_content(found, content, 10) is found
