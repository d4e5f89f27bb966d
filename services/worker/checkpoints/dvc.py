"""Checkpoints for DVC: the files under the names that DVC reads, and the pointer file that names them.

With the remote ``s3://<models>/dvc``, ``dvc pull`` of the pointer file gives exactly the checkpoint's files. The layout
is that of DVC 3: ``files/md5/<first two digits>/<the rest>`` under the remote. trainbus never deletes these copies.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path

from contracts.dvc import POINTER_SUFFIX, TrackedFile, pointer_content
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore

REMOTE = "dvc"


async def write_pointer(objects: ObjectStore, bucket: str, pointer_key: str, files: Mapping[str, Path]) -> str:
    """Store the files and then their pointer; return the pointer's address."""
    outs = []
    for name, path in sorted(files.items()):
        md5, size_bytes = await asyncio.to_thread(_md5, path)
        uri = f"s3://{bucket}/{REMOTE}/files/md5/{md5[:2]}/{md5[2:]}"
        if not await _is_stored(objects, uri, size_bytes):
            await objects.upload(path, uri)
        outs.append(TrackedFile(name, md5, size_bytes))
    pointer_uri = f"s3://{bucket}/{pointer_key}"
    await objects.put(pointer_uri, pointer_content(outs), content_type="application/yaml")
    return pointer_uri


def pointer_key(experiment: str, run_id: str, epoch: int, step: int, generation: int, node_id: str) -> str:
    """Return the pointer's key, next to the manifest's; each node has its own pointer."""
    return f"{experiment}/{run_id}/checkpoints/epoch_{epoch}/step_{step:08d}.g{generation}.{node_id}{POINTER_SUFFIX}"


async def _is_stored(objects: ObjectStore, uri: str, size_bytes: int) -> bool:
    try:
        return (await objects.head(uri)).size_bytes == size_bytes
    except ObjectNotFound:
        return False


def _md5(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
        return digest.hexdigest(), file.tell()
