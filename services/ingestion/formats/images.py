"""Images: decoded to the last pixel, since what does not decode here would stop a training."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageFile, UnidentifiedImageError

from contracts.spec.data import DataSource
from services.ingestion.core import statistics
from services.ingestion.core.keys import extension, file_key
from services.ingestion.core.reasons import Code
from services.ingestion.core.records import InvalidRecord, RecordFault, ValidRecord
from services.ingestion.core.splits import SplitKeys

#: Extension -> what Pillow calls the format.
EXTENSIONS = {
    "png": "PNG",
    "jpg": "JPEG",
    "jpeg": "JPEG",
    "webp": "WEBP",
    "bmp": "BMP",
    "gif": "GIF",
    "tif": "TIFF",
    "tiff": "TIFF",
}
FORMATS = sorted(set(EXTENSIONS.values()))
#: Decoded, 4 bytes a pixel at most: 400 MB.
MAX_PIXELS = 100_000_000

# The limit above is checked on every header; Pillow's own warning would only repeat it.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)
# The result shows what TIFF and EXIF readers warn of in broken files.
warnings.filterwarnings("ignore", module=r"PIL\..*")
ImageFile.LOAD_TRUNCATED_IMAGES = False


@dataclass(frozen=True, slots=True)
class LabelledImage:
    """An image to validate, with its label."""

    path: str
    label: str
    #: The other columns of its row in the table of labels.
    value: Mapping[str, Any] | None = None


def reject_unread(path: str, size: int, max_bytes: int) -> InvalidRecord | None:
    """Reject an image that cannot be used, by its name and size; None if it has to be read."""
    if extension(path) not in EXTENSIONS:
        known = ", ".join(sorted(EXTENSIONS))
        return InvalidRecord(
            "unknown_extension", f"extension {extension(path)!r} is none of {known}", whole_object=True
        )
    if size == 0:
        return InvalidRecord("empty", "the file has no bytes", whole_object=True)
    if size > max_bytes:
        return InvalidRecord("oversized", f"{size:,} bytes, more than {max_bytes:,}", whole_object=True)
    return None


class ImageValidator:
    """Decodes images. It is pickled for the decoder processes and holds the settings alone."""

    def __init__(self, data: DataSource) -> None:
        self._split_keys = SplitKeys(data)
        self._statistics = data.statistics

    def validate(self, image: LabelledImage, content: bytes) -> ValidRecord | InvalidRecord:
        """Decode one image fully. The result comes without the content."""
        digest = hashlib.sha256(content).hexdigest()
        try:
            split_key, measures = self._decode(image, content)
        except RecordFault as fault:
            return InvalidRecord(fault.code, fault.detail, sha256=digest, whole_object=True, label=image.label)
        key, ext = file_key(image.path), extension(image.path)
        return ValidRecord(
            key,
            ext,
            None,
            len(content),
            digest,
            image.label,
            value=image.value,
            split_key=split_key,
            measures=measures,
        )

    def _decode(self, labelled: LabelledImage, content: bytes) -> tuple[str, bytes]:
        try:
            with decode_image(content, EXTENSIONS[extension(labelled.path)]) as image:
                split_key = self._split_keys.image(image, labelled.value or {})
                return split_key, statistics.measure_image(image) if self._statistics else b""
        except RecordFault:
            raise
        except Exception as error:
            raise _fault(error) from error


def decode_image(content: bytes, claimed: str) -> Image.Image:
    """Decode an image, every pixel of it.

    Raises:
        RecordFault: it is no image, has too many pixels or is another format than ``claimed``.
        Exception: decoders raise many others on broken bytes: OSError, SyntaxError, struct.error, ValueError...
    """
    image = Image.open(io.BytesIO(content), formats=FORMATS)
    if image.format != claimed:
        raise RecordFault("wrong_extension", f"named as {claimed} but the content is {image.format}: rename it")
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise RecordFault("too_many_pixels", f"{width} x {height} pixels, more than {MAX_PIXELS:,}")
    if claimed == "PNG":
        # load() does not check the checksums of the pixel data, verify() does.
        with Image.open(io.BytesIO(content), formats=["PNG"]) as unread:
            unread.verify()
    image.load()
    return image


def _fault(error: Exception) -> RecordFault:
    if isinstance(error, Image.DecompressionBombError):
        return RecordFault("too_many_pixels", str(error))
    if isinstance(error, UnidentifiedImageError):
        return RecordFault("undecodable", "no image of a known format")
    if isinstance(error, MemoryError):
        return RecordFault("bomb", "its decoder asks for more memory than an image should need")
    code: Code = "truncated" if "truncated" in str(error).lower() else "undecodable"
    return RecordFault(code, f"{type(error).__name__}: {error}")
