"""Checkpoints for DVC: the files under the names that DVC reads, and the pointer file that names them.

With the remote ``s3://<models>/dvc``, ``dvc pull`` of the pointer file gives exactly the checkpoint's files. Layout and
fields are those of DVC 3: ``files/md5/<first two digits>/<the rest>`` under the remote, and ``outs`` of ``md5``,
``size``, ``hash`` and ``path`` in the pointer. DVC names files by MD5, which protects against accidents and not against
forgery: what is restored from is the manifest, by SHA-256. trainbus never deletes these copies.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

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
        outs.append((name, md5, size_bytes))
    pointer_uri = f"s3://{bucket}/{pointer_key}"
    await objects.put(pointer_uri, pointer_content(outs), content_type="application/yaml")
    return pointer_uri


def pointer_content(outs: Iterable[tuple[str, str, int]]) -> bytes:
    """Return the ``.dvc`` file for (path, md5, bytes) of each file."""
    lines = ["outs:"]
    for path, md5, size_bytes in outs:
        lines += [f"- md5: {md5}", f"  size: {size_bytes}", "  hash: md5", f"  path: {_quote(path)}"]
    return ("\n".join(lines) + "\n").encode()


def _quote(text: str) -> str:
    """Return a text as YAML has it in double quotes: as JSON does, but for characters beyond 16 bits.

    JSON escapes those as two surrogates, which YAML takes for two characters.
    """
    return '"' + "".join(_escape(each) for each in text) + '"'


def _escape(character: str) -> str:
    return json.dumps(character)[1:-1] if ord(character) < 0x10000 else f"\\U{ord(character):08x}"


def pointer_key(experiment: str, run_id: str, epoch: int, step: int, generation: int, node_id: str) -> str:
    """Return the pointer's key, next to the manifest's; each node has its own pointer."""
    return f"{experiment}/{run_id}/checkpoints/epoch_{epoch}/step_{step:08d}.g{generation}.{node_id}.dvc"


async def _is_stored(objects: ObjectStore, uri: str, size_bytes: int) -> bool:
    try:
        return (await objects.head(uri)).size_bytes == size_bytes
    except ObjectNotFound:
        return False


def _md5(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
        return digest.hexdigest(), file.tell()
