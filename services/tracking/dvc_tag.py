"""The tag of a promoted version with the hash that DVC gives its checkpoint."""

from __future__ import annotations

from contracts.dvc import POINTER_SUFFIX, hash_folder, pointers_prefix, read_pointer
from services.kit.store.objects import ObjectStore

DVC_MD5 = "trainbus.dvc_md5"


async def read_dvc_md5(objects: ObjectStore, checkpoint_uri: str) -> str | None:
    """Return what ``dvc add`` gives a folder with the files of a checkpoint; None where no node has written a pointer.

    Raises:
        TransientError: the object store does not answer.
    """
    prefix = pointers_prefix(checkpoint_uri)
    uris = [each.uri async for each in objects.list(prefix) if each.uri.endswith(POINTER_SUFFIX)]
    files = {file.path: file for uri in uris for file in read_pointer(await objects.get(uri))}
    return hash_folder(files.values()) if uris else None
