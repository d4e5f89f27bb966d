"""Files of many records (jsonl, text, tokens), read as streams from a local copy."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from pathlib import Path

from contracts.spec.data import DataSource
from services.ingestion.core.keys import row_key, rows_key
from services.ingestion.core.records import InvalidRecord, ValidRecord, parse_json_line
from services.ingestion.core.schema import FieldProfile

BOM = b"\xef\xbb\xbf"

Records = Generator[ValidRecord | InvalidRecord, None, None]


def lines(data: DataSource, path: str, local: Path, profile: FieldProfile) -> Records:
    """Yield the records of a jsonl file; ``profile`` counts the fields of all of them."""
    prefix, most = rows_key(path), data.checks.max_record_bytes
    number = offset = 0
    with local.open("rb") as file:
        if file.read(len(BOM)) == BOM:
            offset = len(BOM)
        file.seek(offset)
        while line := file.readline(most + 1):
            start, offset = offset, offset + len(line)
            if len(line) > most and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(min(most, 2**20))
                    offset += len(line)
                yield InvalidRecord("oversized", f"a line of {offset - start:,} bytes", start)
            elif line.strip():
                content = line.removesuffix(b"\n").removesuffix(b"\r")
                yield parse_json_line(content, row_key(prefix, number), start, data.label_field, profile.add)
            number += 1


def windows(data: DataSource, path: str, local: Path) -> Records:
    """Yield whole windows of bytes or tokens; an incomplete last one is dropped."""
    prefix = rows_key(path)
    token_bytes = data.token_bytes if data.format == "tokens" else 1
    if local.stat().st_size % token_bytes:
        detail = f"{local.stat().st_size:,} bytes are no whole number of tokens of {token_bytes} (data.token_bytes)"
        yield InvalidRecord("wrong_size", detail, whole_object=True)
        return
    size = data.window_length * token_bytes
    with local.open("rb") as file:
        number = 0
        while len(window := file.read(size)) == size:
            digest = hashlib.sha256(window).hexdigest()
            yield ValidRecord(row_key(prefix, number), "bin", window, size, digest, offset=number * size)
            number += 1
