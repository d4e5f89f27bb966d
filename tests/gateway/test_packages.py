"""``POST /packages``: what curl sends becomes the ``code`` of a run, and nothing else gets into the store."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from services.gateway.packages import package_routes
from services.kit import code_package
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from trainbus.client.address import StackAddress
from trainbus.client.package import pack_project
from trainbus.client.submission import upload_package

HEADERS = {"Content-Type": "application/gzip"}


@pytest.fixture
def client(s3_settings: Settings, objects: ObjectStore) -> httpx.AsyncClient:
    from fastapi import FastAPI

    app = FastAPI()
    app.include_router(package_routes(s3_settings))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def pack(**files: bytes) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return plain.getvalue()


def pack_link(target: str) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w:gz") as tar:
        entry = tarfile.TarInfo("link")
        entry.type, entry.linkname = tarfile.SYMTYPE, target
        tar.addfile(entry)
    return plain.getvalue()


def pack_long_header() -> bytes:
    """A name of 200 MB in an extended header: 200 kB on the way."""
    header = tarfile.TarInfo("././@PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, 200_000_000
    return gzip.compress(header.tobuf() + bytes(header.size))


async def test_a_package_is_stored_under_its_hash_and_is_the_code_of_a_run(
    client: httpx.AsyncClient, objects: ObjectStore, s3_settings: Settings
) -> None:
    body = pack(**{"train.py": b"print('hello')"})
    sha256 = hashlib.sha256(body).hexdigest()
    expected = {"uri": f"s3://{s3_settings.bucket_code}/packages/{sha256}.tar.gz", "sha256": sha256}
    for _ in range(2):
        answer = await client.post("/packages", content=body, headers=HEADERS)
        assert (answer.status_code, answer.json()) == (201, expected)
    assert await objects.get(expected["uri"]) == body
    assert list((s3_settings.data_dir / "packages").iterdir()) == []


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: b"", "gzipped tar"),
        (lambda: b"no tar", "gzipped tar"),
        (lambda: pack(**{"a.py": b"x" * 5000})[:-20], "gzipped tar"),
        (lambda: pack(), "holds no files"),
        (lambda: pack(**{"../a.py": b""}), "leads out of the package"),
        (lambda: pack(**{"/etc/passwd": b""}), "absolute path"),
        (lambda: pack_link("../../etc"), "is a link to"),
        (lambda: pack(**{f"f{number}": b"" for number in range(code_package.MAX_FILES + 1)}), "more than 5,000 files"),
        (lambda: pack(zeros=bytes(code_package.MAX_BYTES + 1)), "64 MiB"),
        (pack_long_header, "64 MiB"),
    ],
)
async def test_what_a_node_would_refuse_is_not_stored(
    client: httpx.AsyncClient, objects: ObjectStore, s3_settings: Settings, make: Callable[[], bytes], text: str
) -> None:
    answer = await client.post("/packages", content=make(), headers=HEADERS)
    assert answer.status_code == 422
    assert text in answer.json()["detail"]
    assert [each async for each in objects.list(f"s3://{s3_settings.bucket_code}/")] == []


async def test_a_body_that_is_too_large_ends_early(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.packages.MAX_BYTES", 1000)
    answer = await client.post("/packages", content=bytes(1001), headers=HEADERS)
    assert answer.status_code == 413


async def test_a_form_names_the_header_that_is_missing(client: httpx.AsyncClient) -> None:
    answer = await client.post("/packages", data={"a": "b"})
    assert answer.status_code == 415
    assert "Content-Type: application/gzip" in answer.json()["detail"]


async def test_a_client_uploads_through_the_gateway(
    client: httpx.AsyncClient, objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    async def note(request: httpx.Request) -> None:
        sent.append(request.method)

    opened = httpx.AsyncClient
    options = {"transport": client._transport, "base_url": "http://gateway", "event_hooks": {"request": [note]}}
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: opened(**options))  # type: ignore[arg-type]
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print()")
    package = pack_project(tmp_path / "code")
    address = StackAddress(nats_url="nats://nowhere", gateway_url="http://gateway")
    uri = await upload_package(address, package)
    assert await objects.get(uri) == package.body
    assert sent == ["GET", "POST"]
    # What is there is not sent again.
    assert await upload_package(address, package) == uri
    assert sent == ["GET", "POST", "GET"]
    assert (await client.get("/packages/no-hash")).status_code == 422
