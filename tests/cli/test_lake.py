"""``trainbus put`` and ``trainbus ls``, through the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from services.gateway.files import RunFiles
from services.gateway.lake import lake_routes
from services.kit.settings import Settings
from services.kit.store.etags import PART_BYTES
from services.kit.store.objects import ObjectStore
from trainbus.client import lake_transfer
from trainbus.client.address import StackAddress
from trainbus.client.errors import NotFoundError, StackUnreachableError, TrainbusError, UsageError
from trainbus.client.lake import Lake, list_objects
from trainbus.client.lake_transfer import put_files


@pytest.fixture
async def address(
    objects: ObjectStore, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StackAddress]:
    app, client = FastAPI(), httpx.AsyncClient
    async with RunFiles(s3_settings) as files:
        app.include_router(lake_routes(s3_settings, files))
        monkeypatch.setattr(
            httpx, "AsyncClient", lambda **options: client(transport=httpx.ASGITransport(app), **options)
        )
        yield StackAddress(gateway_url="http://gateway")


@pytest.fixture
def lake(s3_settings: Settings) -> str:
    return f"s3://{s3_settings.bucket_lake}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "houses"
    (folder / "north side").mkdir(parents=True)
    (folder / "a.csv").write_text("rooms,price\n1,2\n")
    (folder / "empty.csv").write_text("")
    (folder / "north side" / "ü+b.csv").write_text("rooms,price\n3,4\n")
    (folder / ".hidden").write_text("no data")
    return folder


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.bin"
    path.write_bytes(b"".join(bytes([number]) * PART_BYTES for number in range(2)) + b"end")
    return path


async def list_uris(address: StackAddress, uri: str, **options: bool) -> list[str]:
    pages = [page async for page in list_objects(address, uri, **options)]  # type: ignore[arg-type]
    return sorted(
        [each.uri for page in pages for each in page.objects] + [uri for page in pages for uri in page.folders]
    )


async def test_only_what_differs_is_sent(address: StackAddress, objects: ObjectStore, lake: str, folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    first = await put_files(address, folder, f"{lake}/houses", lambda done, total: seen.append((done, total)))
    assert (first.uri, first.files, first.sent, first.left_out) == (f"{lake}/houses/", 3, 3, (".hidden",))
    assert seen[-1] == (first.size_bytes, first.size_bytes)
    assert await objects.get(f"{lake}/houses/north side/ü+b.csv") == b"rooms,price\n3,4\n"
    assert (await put_files(address, folder, f"{lake}/houses/")).sent == 0
    # Of the same size, and written in the same second.
    (folder / "a.csv").write_text("rooms,price\n1,9\n")
    third = await put_files(address, folder, f"{lake}/houses")
    assert (third.sent, third.sent_bytes) == (1, 16)
    assert await objects.get(f"{lake}/houses/a.csv") == b"rooms,price\n1,9\n"


async def test_a_list_has_folders_and_pages(address: StackAddress, lake: str, folder: Path) -> None:
    await put_files(address, folder, f"{lake}/houses")
    houses = f"{lake}/houses/"
    assert await list_uris(address, lake) == [houses]
    assert await list_uris(address, f"{lake}/houses") == [
        f"{houses}a.csv",
        f"{houses}empty.csv",
        f"{houses}north side/",
    ]
    recursive = await list_uris(address, houses, recursive=True)
    assert recursive == [f"{houses}a.csv", f"{houses}empty.csv", f"{houses}north side/ü+b.csv"]
    assert await list_uris(address, f"{houses}a.csv") == [f"{houses}a.csv"]
    found, cursor = list[str](), ""
    while True:
        (page,) = [each async for each in list_objects(address, houses, recursive=True, limit=1, cursor=cursor)]
        found += [each.uri for each in page.objects]
        if not (cursor := page.next_cursor):
            break
    assert found == recursive
    with pytest.raises(NotFoundError, match="nothing at"):
        await list_uris(address, f"{lake}/hous")


async def test_a_large_file_goes_on_where_it_broke_off(
    address: StackAddress, objects: ObjectStore, lake: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_part = Lake.put_part

    async def break_off(self: Lake, uri: str, upload_id: str, number: int, body: bytes) -> None:
        if number == 3:
            raise TrainbusError("the connection is lost")
        await put_part(self, uri, upload_id, number, body)

    monkeypatch.setattr(Lake, "put_part", break_off)
    monkeypatch.setattr(lake_transfer, "CONCURRENCY", 1)
    with pytest.raises(TrainbusError, match="lost"):
        await put_files(address, large, f"{lake}/large.bin")
    assert await list_uris(address, lake) == []
    monkeypatch.setattr(Lake, "put_part", put_part)
    again = await put_files(address, large, f"{lake}/large.bin")
    assert (again.sent, again.sent_bytes) == (1, 3)
    assert await objects.get(f"{lake}/large.bin") == large.read_bytes()
    assert (await put_files(address, large, f"{lake}/large.bin")).sent == 0


async def test_two_clients_may_send_the_same_large_file(
    address: StackAddress, objects: ObjectStore, lake: str, large: Path
) -> None:
    await asyncio.gather(*(put_files(address, large, f"{lake}/large.bin") for _ in range(2)))
    assert await objects.get(f"{lake}/large.bin") == large.read_bytes()


async def test_another_client_may_end_the_upload_before_all_parts_are_read(
    address: StackAddress, objects: ObjectStore, lake: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_part = Lake.put_part
    others = iter([put_files])

    async def come_second(self: Lake, uri: str, upload_id: str, number: int, body: bytes) -> None:
        for put_by_another in others:
            await put_by_another(address, large, uri)
        await put_part(self, uri, upload_id, number, body)

    monkeypatch.setattr(Lake, "put_part", come_second)
    monkeypatch.setattr(lake_transfer, "CONCURRENCY", 1)
    assert (await put_files(address, large, f"{lake}/large.bin")).sent == 1
    assert await objects.get(f"{lake}/large.bin") == large.read_bytes()


async def test_a_file_that_changes_meanwhile_is_not_stored(
    address: StackAddress, lake: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_part = lake_transfer._read_part

    def read_and_write(file: Path, offset: int, size_bytes: int) -> bytes:
        body = read_part(file, offset, size_bytes)
        file.write_bytes(b"other")
        return body

    monkeypatch.setattr(lake_transfer, "_read_part", read_and_write)
    with pytest.raises(TrainbusError, match=r"large\.bin was written to while it was sent"):
        await put_files(address, large, f"{lake}/large.bin")
    assert await list_uris(address, lake) == []


async def test_what_cannot_be_put(address: StackAddress, lake: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / ".hidden").write_text("")
    (folder / "line\nbreak").write_text("")
    for path, uri, problem in (
        (tmp_path / "absent", f"{lake}/x", "no file or folder"),
        (tmp_path / "bare", f"{lake}/x", "no files but hidden ones"),
        (folder, "lake/x", "give s3://lake/NAME"),
        (folder, "s3://models/x", "is not in the lake"),
        (folder, f"{lake}/x", "cannot be printed"),
        (folder / "a.csv", f"{lake}/../x", "cannot be stored"),
    ):
        with pytest.raises(UsageError, match=problem):
            await put_files(address, path, uri)
    assert await list_uris(address, lake) == []


@pytest.mark.parametrize(
    ("uri", "target"),
    [
        ("s3://lake/x", "s3://lake/x/a.csv"),
        ("s3://lake/x/", "s3://lake/x/a.csv"),
        ("s3://lake/", "s3://lake/a.csv"),
        ("s3://lake/b.csv", "s3://lake/b.csv"),
    ],
)
def test_where_a_file_goes(folder: Path, uri: str, target: str) -> None:
    assert lake_transfer._choose_target(folder / "a.csv", uri) == target


async def test_the_gateway_checks_what_arrives(
    s3_settings: Settings, objects: ObjectStore, lake: str, large: Path
) -> None:
    app = FastAPI()
    async with RunFiles(s3_settings) as files:
        app.include_router(lake_routes(s3_settings, files))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            wrong = {"Content-MD5": "1B2M2Y8AsgTpgAmY7PhCfg=="}
            for path, headers, status in (
                ("/lake/objects/a/%2e%2e/b", {}, 422),
                ("/lake/objects/a//b", {}, 422),
                ("/lake/objects/a", wrong, 422),
                ("/lake/objects/a", {"Content-MD5": "!"}, 422),
                ("/lake/objects/a", {"Content-Type": "text/plain"}, 415),
                ("/lake/uploads/parts/1?key=a&upload_id=none", {}, 404),
            ):
                answer = await client.put(path, content=b"something", headers=headers)
                assert answer.status_code == status, path
            # A stream of any size, as `curl -T` sends it; one that is damaged leaves nothing.
            damaged = await client.put("/lake/objects/large.bin", content=large.read_bytes(), headers=wrong)
            assert damaged.status_code == 422
            assert [each async for each in objects.list(f"{lake}/")] == []
            stored = await client.put("/lake/objects/large.bin", content=large.read_bytes())
            assert stored.status_code == 201
    assert await objects.get(f"{lake}/large.bin") == large.read_bytes()


async def test_without_a_gateway_there_is_no_lake() -> None:
    with pytest.raises(StackUnreachableError, match="set TRAINBUS_GATEWAY_URL"):
        await list_uris(StackAddress(nats_url="nats://n"), "s3://lake")
