"""Code packages over HTTP: a client without credentials for the object store uploads what its run executes."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, HTTPException, Request
from fastapi import Path as PathParameter

from services.gateway import views
from services.kit.code_package import MAX_BYTES, PackageError, check_package, package_uri
from services.kit.messages import TransientError
from services.kit.settings import Settings
from services.kit.store.errors import ObjectExists
from services.kit.store.objects import ObjectStore

CONTENT_TYPES = ("application/gzip", "application/x-gzip", "application/octet-stream")
#: Seconds for which an upload is repeated while the store does not answer: a client waits behind it.
PATIENCE_S = 10.0
SHA256_PATTERN = "^[0-9a-f]{64}$"
#: Uploads at a time; each needs up to MAX_BYTES of disk.
MAX_UPLOADS = 4


def package_routes(settings: Settings) -> APIRouter:
    """Return the routes of ``/packages``."""
    router, places = APIRouter(), asyncio.Semaphore(MAX_UPLOADS)

    @router.post(
        "/packages",
        status_code=201,
        response_model=views.StoredPackage,
        openapi_extra={
            "requestBody": {
                "required": True,
                "description": f"a gzipped tar of a project, of at most {MAX_BYTES // 2**20} MiB",
                "content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}},
            }
        },
    )
    async def post_package(request: Request) -> views.StoredPackage:
        """Store a gzipped tar of a project under its hash; the answer is the `code` of a request that runs it."""
        # A form or plain text is what a web page may send across sites without asking.
        if request.headers.get("content-type", "").split(";")[0].strip().lower() not in CONTENT_TYPES:
            raise HTTPException(415, "send a gzipped tar with Content-Type: application/gzip")
        async with places:
            with tempfile.TemporaryDirectory(prefix="package.", dir=_scratch_dir(settings)) as folder:
                path = Path(folder) / "package.tar.gz"
                sha256 = await _receive(request, path)
                await asyncio.to_thread(_check, path)
                uri = package_uri(settings.bucket_code, sha256)
                await _store(settings, path, uri, sha256)
        return views.StoredPackage(uri=uri, sha256=sha256)

    @router.get("/packages/{sha256}", response_model=views.StoredPackage)
    async def get_package(sha256: Annotated[str, PathParameter(pattern=SHA256_PATTERN)]) -> views.StoredPackage:
        """Where the package with this hash is, if it is stored: it need not be sent again."""
        uri = package_uri(settings.bucket_code, sha256)
        try:
            async with ObjectStore(settings, patience_s=PATIENCE_S) as objects:
                is_stored = await objects.exists(uri)
        except TransientError as error:
            raise HTTPException(503, "the object store does not answer: ask again") from error
        if not is_stored:
            raise HTTPException(404, f"there is no package {sha256}: send it with POST /packages")
        return views.StoredPackage(uri=uri, sha256=sha256)

    return router


def _scratch_dir(settings: Settings) -> Path:
    folder = settings.data_dir / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def _receive(request: Request, path: Path) -> str:
    """Write the body into a file and return its SHA-256."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        async for chunk in request.stream():
            size_bytes += len(chunk)
            if size_bytes > MAX_BYTES:
                raise HTTPException(
                    413, f"the package has more than {MAX_BYTES // 2**20} MiB: leave out data and results"
                )
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _check(path: Path) -> None:
    with path.open("rb") as file:
        try:
            check_package(file)
        except PackageError as error:
            raise HTTPException(422, str(error)) from error


async def _store(settings: Settings, path: Path, uri: str, sha256: str) -> None:
    try:
        async with ObjectStore(settings, patience_s=PATIENCE_S) as objects:
            await objects.put_file(path, uri, sha256=sha256, if_absent=True)
    except ObjectExists:
        return
    except TransientError as error:
        raise HTTPException(503, "the object store does not answer: send the package again") from error
