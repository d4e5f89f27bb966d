"""The layout of a checkpoint that holds the plain files of a script.

A checkpoint lists its files in one fact, with names of a plain alphabet. A tree of many small files, and names outside
that alphabet, are therefore packed into one tar; reading the checkpoint unpacks it. ``trainbus.json`` beside the files
says which of them belong into the output folder. A checkpoint of several nodes has a pack of each.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, Field

from contracts.node_outputs import NODE_PACK_NAME, OUTPUTS_FOLDER, REQUESTED_FOLDER, node_pack_name

#: The description of the tree; a checkpoint without it was not made of a script's files.
LAYOUT_NAME = "trainbus.json"
PACK_NAME = "trainbus-files.tar"
#: Files that a checkpoint lists one by one; of more, those below ``SMALL_BYTES`` are packed.
MAX_LISTED_FILES = 100
SMALL_BYTES = 2**20
#: The names that a checkpoint can list.
LISTABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,200}")
#: Names of other nodes have a folder before them, whose name is not known where they are packed.
MAX_NODE_NAME_CHARS = 180


class KeptLayout(BaseModel):
    """What the files of a checkpoint are."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: The folder with the content of the output folder; '': all files are. None: there is none.
    outputs: str | None = ""
    #: Files of the output folder that are artifacts of the run.
    artifacts: tuple[str, ...] = ()
    #: How often each metric pattern had matched, in all attempts: the next attempt counts on from there.
    matches: dict[str, int] = Field(default_factory=dict)
    #: Packs of nodes without rank 0 -> the paths in them that do not belong to the checkpoint. Paths begin with
    #: ``outputs/``, for the output folder, or with ``requested/``, for this one.
    node_packs: dict[str, tuple[str, ...]] = Field(default_factory=dict)


def pack_files(files: Mapping[str, Path], layout: KeptLayout, folder: Path) -> None:
    """Write the files by name into a new folder as a checkpoint holds them: linked, or packed.

    The files must be on the folder's file system, and must not change.
    """
    packed = {name for name, path in files.items() if _is_packed(name, path, len(files))}
    _write_folder(files, packed, folder, PACK_NAME)
    (folder / LAYOUT_NAME).write_text(layout.model_dump_json())


def pack_node_files(files: Mapping[str, Path], node_rank: int, folder: Path) -> set[str]:
    """Do as ``pack_files`` for a node without rank 0; return the paths in its pack.

    Args:
        files: their paths begin with ``outputs/`` or ``requested/``, which is no part of their name in a checkpoint.
    """
    packed = set()
    for path, file in files.items():
        name = path.partition("/")[2]
        if len(name) > MAX_NODE_NAME_CHARS or _is_packed(name, file, len(files)):
            packed.add(path)
    _write_folder(files, packed, folder, node_pack_name(node_rank))
    return packed


def _write_folder(files: Mapping[str, Path], packed: Collection[str], folder: Path, pack_name: str) -> None:
    folder.mkdir(parents=True)
    for name in files.keys() - set(packed):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(files[name], target)
    if packed:
        with tarfile.open(folder / pack_name, "w", format=tarfile.PAX_FORMAT) as pack:
            for name in sorted(packed):
                # Name and content alone: equal files make equal bytes.
                info = tarfile.TarInfo(name)
                info.size = files[name].stat().st_size
                info.mode = 0o644
                with files[name].open("rb") as content:
                    pack.addfile(info, content)


def _is_packed(name: str, path: Path, count: int) -> bool:
    if name in (PACK_NAME, LAYOUT_NAME) or NODE_PACK_NAME.fullmatch(name) or not LISTABLE_NAME.fullmatch(name):
        return True
    return count > MAX_LISTED_FILES and path.stat().st_size < SMALL_BYTES


def unpack_files(folder: Path) -> KeptLayout | None:
    """Replace the packs in a fetched checkpoint by their files; return the layout, None where a script made none.

    Raises:
        ValueError: the checkpoint was not written by trainbus.
    """
    described = folder / LAYOUT_NAME
    if not described.is_file():
        return None
    layout = KeptLayout.model_validate_json(described.read_bytes())
    packs = [name for name in (PACK_NAME, *layout.node_packs) if (folder / name).is_file()]
    # Moved aside: a pack may hold a file of its own name.
    for name in packs:
        (folder / name).replace(_path_aside(folder, name))
    described.unlink()
    for name in packs:
        aside = _path_aside(folder, name)
        with tarfile.open(aside) as archive:
            for member in archive:
                target = member.name if name == PACK_NAME else _place_in_checkpoint(member.name, layout, name)
                if target is not None:
                    _extract(archive, member, target, folder, name)
        aside.unlink()
    return layout


def _path_aside(folder: Path, pack_name: str) -> Path:
    if not (pack_name == PACK_NAME or NODE_PACK_NAME.fullmatch(pack_name)):
        raise ValueError(f"{pack_name!r} is no name of a pack")
    return folder / f".{pack_name}.partial"


def _place_in_checkpoint(path: str, layout: KeptLayout, pack_name: str) -> str | None:
    """Return where a file of another node's pack belongs; None if another node's file is there."""
    if path in layout.node_packs[pack_name]:
        return None
    kind, _, name = path.partition("/")
    if kind == REQUESTED_FOLDER:
        return name
    if kind != OUTPUTS_FOLDER or layout.outputs is None:
        raise ValueError(f"{path!r} in {pack_name} has no place in the checkpoint")
    return f"{layout.outputs}/{name}" if layout.outputs else name


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, folder: Path, pack_name: str) -> None:
    name = PurePosixPath(path)
    if not member.isfile() or name.is_absolute() or ".." in name.parts:
        raise ValueError(f"{member.name!r} in {pack_name} leaves the folder")
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
