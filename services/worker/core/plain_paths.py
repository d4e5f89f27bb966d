"""Where the samples of a dataset lie as plain files: as torchvision's ImageFolder and Ultralytics expect them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

#: Split of a dataset -> its folder.
SPLIT_FOLDERS = {"train": "train", "validation": "val", "test": "test"}
#: All files have this time, so that one which was written to is recognised: 1 January 1980, the first that zip knows.
FILE_TIME_S = 315_532_800
#: Exit code of the process that unpacks where the dataset itself is at fault; it is the same on every node.
EXIT_INVALID = 65  # EX_DATAERR
#: Field of a sample that holds the number of its class.
CLASS_FIELD = "cls"
#: Field that is a whole row, as JSON.
ROW_FIELD = "json"


def class_folder(label: str) -> str:
    """Return the folder of a class: its name, with ``%2F`` and the like for what a folder's name cannot have."""
    escaped = "".join(f"%{ord(char):02X}" if char in "/%\0" else char for char in label)
    return f"%{ord('.'):02X}{escaped[1:]}" if escaped.startswith(".") else escaped or "%20"


def are_rows(fields: Iterable[str]) -> bool:
    """Whether samples of these fields are rows of a table, and not files."""
    return set(fields) == {ROW_FIELD}


def sample_paths(key: str, label: str | None, extensions: Sequence[str]) -> dict[str, PurePosixPath]:
    """Return extension -> the path of that file of a sample, below the folder of its split.

    A sample of a class lies below the class's folder; where its key names the class as its folder, only once.
    """
    stem = PurePosixPath(key)
    if label is not None:
        parts = stem.parts
        below = parts[:-2] + parts[-1:] if len(parts) > 1 and parts[-2] == label else parts
        stem = PurePosixPath(class_folder(label), *below)
    return {extension: stem.with_name(f"{stem.name}.{extension}") for extension in extensions}
