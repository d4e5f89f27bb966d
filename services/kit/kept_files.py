"""The layout of a checkpoint that holds the plain files of a script.

A checkpoint lists its files in one fact, with names of a plain alphabet. A tree of many small files, and names outside
that alphabet, are therefore packed into one tar; reading the checkpoint unpacks it. ``trainbus.json`` beside the files
says which of them belong into the output folder.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, Field

#: The description of the tree; a checkpoint without it was not made of a script's files.
LAYOUT_NAME = "trainbus.json"
PACK_NAME = "trainbus-files.tar"
#: Files that a checkpoint lists one by one; of more, those below ``SMALL_BYTES`` are packed.
MAX_LISTED_FILES = 100
SMALL_BYTES = 2**20
#: The names that a checkpoint can list.
LISTABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,200}")


class KeptLayout(BaseModel):
    """What the files of a checkpoint are."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: The folder with the content of the output folder; '': all files are. None: there is none.
    outputs: str | None = ""
    #: Files of the output folder that are artifacts of the run.
    artifacts: tuple[str, ...] = ()
    #: How often each metric pattern had matched, in all attempts: the next attempt counts on from there.
    matches: dict[str, int] = Field(default_factory=dict)


def pack_files(files: Mapping[str, Path], layout: KeptLayout, folder: Path) -> None:
    """Write the files by name into a new folder as a checkpoint holds them: linked, or packed.

    The files must be on the folder's file system, and must not change.
    """
    folder.mkdir(parents=True)
    packed = sorted(name for name, path in files.items() if _is_packed(name, path, len(files)))
    for name in files.keys() - set(packed):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(files[name], target)
    if packed:
        with tarfile.open(folder / PACK_NAME, "w", format=tarfile.PAX_FORMAT) as pack:
            for name in packed:
                # Name and content alone: equal files make equal bytes.
                info = tarfile.TarInfo(name)
                info.size = files[name].stat().st_size
                info.mode = 0o644
                with files[name].open("rb") as content:
                    pack.addfile(info, content)
    (folder / LAYOUT_NAME).write_text(layout.model_dump_json())


def _is_packed(name: str, path: Path, count: int) -> bool:
    if name in (PACK_NAME, LAYOUT_NAME) or not LISTABLE_NAME.fullmatch(name):
        return True
    return count > MAX_LISTED_FILES and path.stat().st_size < SMALL_BYTES


def unpack_files(folder: Path) -> KeptLayout | None:
    """Replace the pack in a fetched checkpoint by its files; return the layout, None where a script made none.

    Raises:
        ValueError: the checkpoint was not written by trainbus.
    """
    described = folder / LAYOUT_NAME
    if not described.is_file():
        return None
    layout = KeptLayout.model_validate_json(described.read_bytes())
    pack = folder / PACK_NAME
    if pack.is_file():
        # Moved aside: it may hold a file of its own name.
        aside = folder / f".{PACK_NAME}.partial"
        pack.replace(aside)
        described.unlink()
        with tarfile.open(aside) as archive:
            for member in archive:
                _extract(archive, member, folder)
        aside.unlink()
    else:
        described.unlink()
    return layout


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    name = PurePosixPath(member.name)
    if not member.isfile() or name.is_absolute() or ".." in name.parts:
        raise ValueError(f"{member.name!r} in {PACK_NAME} leaves the folder")
    source = archive.extractfile(member)
    assert source is not None
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file)


def copy_outputs(folder: Path, layout: KeptLayout, target: Path) -> None:
    """Copy the content of the output folder out of an unpacked checkpoint; a script may write into the copies."""
    target.mkdir(parents=True, exist_ok=True)
    if layout.outputs is None:
        return
    source = folder / layout.outputs if layout.outputs else folder
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)


def list_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of every file below a folder; links are left out."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if not path.is_symlink() and path.is_file():
                yield path.relative_to(folder).as_posix(), path
