"""Which format data has, by the names of its files: the same in a folder of the user's and under an address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
#: What is wrong with images of which no folder and no table says the class.
WITHOUT_LABELS = (
    "are in no folder: put each into one that is named after its class, or add a labels.csv (columns file, label)"
)
#: Names of files without an ending that say nothing of the data.
WITHOUT_DATA = frozenset({"readme", "license"})


#: Endings of files beside images that cannot be images: notes, tables, annotations, code, and what systems leave.
NO_IMAGE_SUFFIXES = frozenset(
    {
        *(".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".xml", ".yaml", ".yml", ".toml"),
        *(".ini", ".cfg", ".db", ".log", ".html", ".htm", ".py", ".ipynb", ".sh", ".parquet", ".pq"),
    }
)

#: Formats whose files are no text and no numbers, so that ``text`` and ``tokens`` would read noise.
ENCODED_FORMATS = frozenset({"images", "parquet", "webdataset", "mds"})


@dataclass(slots=True)
class FormatFiles:
    """The files that speak for a format."""

    example: str
    count: int = 1

    def __str__(self) -> str:
        return self.example if self.count == 1 else f"{self.count:,} files, such as {self.example}"


def recognize_format(names: Iterable[str]) -> str | None:
    """Return the format of files by their names; None if none speaks for one.

    Raises:
        ValueError: they are of two formats; what most files are is named first.
    """
    found: dict[str, FormatFiles] = {}
    described = ""
    for name in _without_readme(names):
        last = name.rsplit("/", 1)[-1].lower()
        if (format_ := DESCRIPTIONS.get(last)) is not None:
            described = described or format_
        elif (format_ := FORMAT_BY_SUFFIX.get(_ending(last))) is not None:
            _count(found, format_, name)
    if described == "binary" or (described and not found):
        return described
    if described:
        found.setdefault(described, FormatFiles("its description"))
    if len(found) > 1:
        (one, most), (other, fewer) = sorted(found.items(), key=lambda item: -item[1].count)[:2]
        # Any file has bytes: text leaves none out.
        rest = "the other files then count as broken records"
        if one == "text":
            rest = "all files are then read as text"
        elif one == "images" and all(cannot_be_image(each.example) for name, each in found.items() if name != one):
            rest = "the other files are then skipped"
        raise ValueError(
            f"both {one} ({most}) and {other} ({fewer}) are there: keep one kind in a folder, or say which is meant "
            f"with data.format (--format {one}); {rest}"
        )
    return next(iter(found), None)


def cannot_be_image(name: str) -> bool:
    """Return whether a file is no image by its name: it is skipped among images, and is not a broken one."""
    last = name.rsplit("/", 1)[-1].lower()
    return _ending(last) in NO_IMAGE_SUFFIXES or last.partition(".")[0] in WITHOUT_DATA


def find_format_mismatch(format_: str, names: Iterable[str]) -> str:
    """Return why files cannot be of a format, by their names; '' if they can.

    Files are taken for another format where most of them have its endings and none has one of ``format_``.
    """
    found: dict[str, FormatFiles] = {}
    total, is_described, has_folders = 0, False, False
    for name in _without_readme(names):
        last = name.rsplit("/", 1)[-1].lower()
        total += 1
        is_described |= DESCRIPTIONS.get(last) == format_
        has_folders |= "/" in name
        if (other := FORMAT_BY_SUFFIX.get(_ending(last))) is not None:
            _count(found, other, name)
    if format_ in found and format_ not in ("text", "tokens"):
        if format_ == "images" and not has_folders and not is_described:
            return f"images ({found[format_]}) {WITHOUT_LABELS}"
        return ""
    most = max(found, key=lambda each: found[each].count, default="")
    is_other = bool(most) and most != format_ and 2 * found[most].count > total
    if not is_other or is_described or format_ in ("auto", "binary"):
        return ""
    if format_ in ("text", "tokens") and most not in ENCODED_FORMATS:
        return ""
    return f"the format is to be {format_} (--format {format_}), but the files are {most} ({found[most]})"


def _count(found: dict[str, FormatFiles], format_: str, name: str) -> None:
    if format_ in found:
        found[format_].count += 1
    else:
        found[format_] = FormatFiles(name)


def _without_readme(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of files that may be data."""
    for name in names:
        last = name.rsplit("/", 1)[-1].lower()
        if not last.startswith(".") and last.partition(".")[0] not in WITHOUT_DATA:
            yield name


def _ending(name: str) -> str:
    if name.endswith(".tar.gz"):
        return ".tgz"
    stem, dot, ending = name.rpartition(".")
    return dot + ending if stem else ""
