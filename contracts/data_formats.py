"""Which format data has, by the names of its files: the same in a folder of the user's and under an address."""

from __future__ import annotations

from collections.abc import Iterable

#: By the ending of a file's name: the format that it speaks for. Other files speak for none.
FORMAT_BY_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".tar": "webdataset",
    ".tgz": "webdataset",
    ".mds": "mds",
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"), "images"),
}
#: Files that describe others of a folder, and the format that they speak for.
DESCRIPTIONS = {
    "labels.csv": "images",
    "labels.parquet": "images",
    "manifest.jsonl": "binary",
    "manifest.csv": "binary",
    "index.json": "mds",
}
#: Names of files without an ending that say nothing of the data.
WITHOUT_DATA = frozenset({"readme", "license"})


def recognize_format(names: Iterable[str]) -> str | None:
    """Return the format of files by their names; None if none speaks for one.

    Raises:
        ValueError: they are of two formats.
    """
    examples: dict[str, str] = {}
    described = ""
    for name in names:
        last = name.rsplit("/", 1)[-1].lower()
        if last.startswith(".") or last.partition(".")[0] in WITHOUT_DATA:
            continue
        if (format_ := DESCRIPTIONS.get(last)) is not None:
            described = described or format_
        elif (format_ := FORMAT_BY_SUFFIX.get(_ending(last))) is not None:
            examples.setdefault(format_, name)
    if described == "binary" or (described and not examples):
        return described
    if described:
        examples.setdefault(described, "its description")
    if len(examples) > 1:
        (one, first), (other, second) = list(examples.items())[:2]
        raise ValueError(
            f"both {one} ({first}) and {other} ({second}) are there: keep one kind in a folder, or say which with "
            f"data.format (--format {one}); the other files are then put aside"
        )
    return next(iter(examples), None)


def _ending(name: str) -> str:
    if name.endswith(".tar.gz"):
        return ".tgz"
    stem, dot, ending = name.rpartition(".")
    return dot + ending if stem else ""
