"""Images: decoded to the last pixel, since what does not decode here would stop a training."""

from __future__ import annotations

import hashlib
import io
import warnings

from PIL import Image, UnidentifiedImageError

from services.ingestion.core.keys import extension, file_key
from services.ingestion.core.records import Broken, Fault, Sound

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
MAX_IMAGE_BYTES = 64 * 2**20
#: Decoded, 4 bytes a pixel at most: 400 MB.
MAX_PIXELS = 100_000_000

# The limit above is checked on every header; Pillow's own warning would only repeat it.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def refuse_unread(path: str, size: int) -> Broken | None:
    """What can be said about an image from the listing alone."""
    if extension(path) not in EXTENSIONS:
        known = ", ".join(sorted(EXTENSIONS))
        return Broken("unknown_extension", f"extension {extension(path)!r} is none of {known}", whole_object=True)
    if size == 0:
        return Broken("empty", "the file has no bytes", whole_object=True)
    if size > MAX_IMAGE_BYTES:
        return Broken("oversized", f"{size:,} bytes, more than {MAX_IMAGE_BYTES:,}", whole_object=True)
    return None


def judge(path: str, content: bytes, label: str, keep_below: int) -> Sound | Broken:
    """Decode one image fully. Its content is kept with the record if it has less than ``keep_below`` bytes."""
    digest = hashlib.sha256(content).hexdigest()
    try:
        _decode(content, extension(path))
    except Fault as fault:
        return Broken(fault.code, fault.detail, sha256=digest, whole_object=True)
    kept = content if len(content) < keep_below else None
    return Sound(file_key(path), extension(path), kept, len(content), digest, label)


def _decode(content: bytes, claimed: str) -> None:
    try:
        with Image.open(io.BytesIO(content), formats=sorted(set(EXTENSIONS.values()))) as image:
            found = image.format
            if found != EXTENSIONS[claimed]:
                raise Fault("wrong_extension", f"named .{claimed} but the content is {found}: rename it")
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise Fault("too_many_pixels", f"{width} x {height} pixels, more than {MAX_PIXELS:,}")
            image.load()
        if found == "PNG":
            # load() does not look at the checksums of the pixel data, verify() does.
            with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
                image.verify()
    except Fault:
        raise
    except Image.DecompressionBombError as error:
        raise Fault("too_many_pixels", str(error)) from error
    except UnidentifiedImageError as error:
        raise Fault("undecodable", "no image of a known format") from error
    except Exception as error:
        # Decoders raise whatever comes up in broken bytes: OSError, SyntaxError, struct.error, ValueError...
        code = "truncated" if "truncated" in str(error).lower() else "undecodable"
        raise Fault(code, f"{type(error).__name__}: {error}") from error
