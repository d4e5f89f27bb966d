"""The object store (S3), once: retries, conditional puts, content-addressed blobs, streaming.

Errors that pass (connection refused, 5xx, time-outs) become ``TransientError``; a missing object becomes
``ObjectNotFound``. aioboto3 is imported on first use, so a service without objects does not pay for it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog

from services.kit import metrics
from services.kit.bus import TransientError
from services.kit.settings import Settings
from services.kit.store.errors import ObjectExists, ObjectNotFound

log = structlog.get_logger(__name__)
T = TypeVar("T")

CHUNK = 2**20
#: Read at a time where hashing is done in a thread: less would be spent on changing threads.
READ_BYTES = 4 * 2**20
#: Seconds to keep trying while the store is away.
PATIENCE_S = 60.0
#: A blob that is there already is written anew when it is older than this, so that garbage collection,
#: which spares what is young, never takes one that an upload has just relied upon.
FRESHEN_S = 6 * 3600.0
MISSING = {"404", "NoSuchKey", "NoSuchBucket", "NotFound"}
EXISTS = {"PreconditionFailed", "412", "ConditionalRequestConflict"}
#: The store received other bytes than were announced to it.
DAMAGED = {"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
BLOB_KEY = re.compile(r"^blobs/sha256/[0-9a-f]{2}/([0-9a-f]{64})$")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    bucket: str
    key: str
    size_bytes: int
    etag: str
    modified_at: datetime
    #: What the store itself hashed when it took the object in; '' where it does not say.
    sha256: str = ""

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def split_uri(uri: str) -> tuple[str, str]:
    """``s3://bucket/key`` -> (bucket, key)."""
    if not uri.startswith("s3://") or "/" not in uri[5:]:
        raise ValueError(f"{uri!r} is not of the form s3://bucket/key")
    bucket, _, key = uri[5:].partition("/")
    return bucket, key


def is_young(written_at: datetime) -> bool:
    """Whether an upload may rely on a blob without writing it anew."""
    return datetime.now(UTC) - written_at < timedelta(seconds=FRESHEN_S)


def blob_key(sha256: str) -> str:
    """The key of a content-addressed blob."""
    return f"blobs/sha256/{sha256[:2]}/{sha256}"


def blob_sha256(uri: str) -> str:
    """The hash that a blob's name promises; '' for any other object."""
    match = BLOB_KEY.match(split_uri(uri)[1])
    return match[1] if match else ""


def write_at(handle: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of ``content`` at ``offset``; the system may take less at a time."""
    view = memoryview(content)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def hash_file(path: Path) -> str:
    """Lower-case hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def aws_session(settings: Settings) -> Any:
    """An aioboto3 session with the credentials of the settings, else those that boto finds by itself."""
    import aioboto3

    secret = settings.s3_secret_key
    return aioboto3.Session(
        aws_access_key_id=settings.s3_access_key,
        aws_secret_access_key=secret.get_secret_value() if secret else None,
        region_name=settings.s3_region,
    )


def _parse_time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # an HTTP date, in headers
        from botocore.utils import parse_timestamp

        parsed: datetime = parse_timestamp(text)
        return parsed


class ObjectStore:
    """An S3 client for one service; use it as an async context manager."""

    def __init__(self, settings: Settings, *, patience_s: float = PATIENCE_S) -> None:
        self._settings, self._patience_s = settings, patience_s
        self._stack = AsyncExitStack()
        self._client: Any = None

    async def __aenter__(self) -> Self:
        from botocore.config import Config

        from services.kit.store.bulk import Bulk

        session = aws_session(self._settings)
        self._bulk = Bulk(self._settings, session)
        self._stack.push_async_callback(self._bulk.close)
        # Listings hold a time an object; boto's general parser would take half of the time they cost.
        session._session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_parse_time)
        config = Config(
            connect_timeout=3,
            read_timeout=30,
            retries={"mode": "standard", "max_attempts": 2},
            max_pool_connections=32,
            s3={"addressing_style": "path"},
            # Not every S3 store knows the newer checksum trailers.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        self._client = await self._stack.enter_async_context(
            session.client("s3", endpoint_url=self._settings.s3_endpoint, config=config)
        )
        hashed = config.merge(Config(s3={"addressing_style": "path", "payload_signing_enabled": False}))

        def sign_its_hash(request: Any, **_: Any) -> None:
            # The signature covers the announced hash, which the store compares with what it receives: hashing the
            # body once more for the signature would protect nothing else.
            if "x-amz-checksum-sha256" in request.headers:
                request.context["client_config"] = hashed

        self._client.meta.events.register("before-sign.s3.PutObject", sign_its_hash)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    # -- whole objects ------------------------------------------------------

    async def put(self, uri: str, body: bytes, *, if_absent: bool = False, content_type: str = "") -> None:
        """Store ``body``. With ``if_absent``, raise ``ObjectExists`` instead of replacing anything.

        A blob is checked against its name by the store, which takes in nothing else and says so in ``head``.
        """
        bucket, key = split_uri(uri)
        extra: dict[str, str] = {"IfNoneMatch": "*"} if if_absent else {}
        if sha256 := blob_sha256(uri):
            extra["ChecksumSHA256"] = base64.b64encode(bytes.fromhex(sha256)).decode()
        if content_type:
            extra["ContentType"] = content_type
        # A buffer is sent in parts; bytes would be handed to the connection at once, and copied for it.
        await self._try(lambda: self._client.put_object(Bucket=bucket, Key=key, Body=io.BytesIO(body), **extra), uri)
        metrics.OBJECT_BYTES.labels("up").inc(len(body))

    async def get(self, uri: str, *, if_match: str | None = None) -> bytes:
        """The whole object. For what is known to be small."""
        bucket, key = split_uri(uri)
        extra = {"IfMatch": if_match} if if_match else {}

        async def read() -> bytes:
            answer = await self._client.get_object(Bucket=bucket, Key=key, **extra)
            body = answer["Body"]
            async with body:
                content: bytes = await body.read()
                return content

        content = await self._try(read, uri)
        metrics.OBJECT_BYTES.labels("down").inc(len(content))
        return content

    async def head(self, uri: str) -> ObjectInfo:
        """Size, ETag and, where the store keeps it, hash; raises ``ObjectNotFound``."""
        bucket, key = split_uri(uri)
        call = partial(self._client.head_object, Bucket=bucket, Key=key, ChecksumMode="ENABLED")
        answer = await self._try(call, uri)
        # Of an object in parts it is a hash of hashes, with their number behind a dash.
        kept = answer.get("ChecksumSHA256", "")
        sha256 = base64.b64decode(kept).hex() if kept and "-" not in kept else ""
        etag = answer["ETag"].strip('"')
        return ObjectInfo(bucket, key, answer["ContentLength"], etag, answer["LastModified"], sha256)

    async def exists(self, uri: str) -> bool:
        try:
            await self.head(uri)
        except ObjectNotFound:
            return False
        return True

    async def delete(self, uri: str) -> None:
        """Remove the object; it is no error if it is gone already."""
        bucket, key = split_uri(uri)
        await self._try(lambda: self._client.delete_object(Bucket=bucket, Key=key), uri)

    async def list(self, uri: str) -> AsyncIterator[ObjectInfo]:
        """Every object under a prefix, in the order of keys, a page at a time."""
        bucket, prefix = split_uri(uri)
        token: str | None = None
        while True:
            extra = {"ContinuationToken": token} if token else {}
            call = partial(self._client.list_objects_v2, Bucket=bucket, Prefix=prefix, **extra)
            page = await self._try(call, uri)
            for item in page.get("Contents", ()):
                yield ObjectInfo(bucket, item["Key"], item["Size"], item["ETag"].strip('"'), item["LastModified"])
            token = page.get("NextContinuationToken")
            if not token:
                return

    async def ensure_bucket(self, bucket: str) -> None:
        """Create the bucket if there is none."""
        try:
            await self._try(lambda: self._client.head_bucket(Bucket=bucket), bucket)
        except ObjectNotFound:
            try:
                await self._try(lambda: self._client.create_bucket(Bucket=bucket), bucket)
            except ObjectExists:
                return

    # -- files --------------------------------------------------------------

    async def upload(self, path: Path, uri: str) -> None:
        """Store a file, in parts when it is large."""
        bucket, key = split_uri(uri)
        await self._try(lambda: self._client.upload_file(str(path), bucket, key), uri)
        metrics.OBJECT_BYTES.labels("up").inc(path.stat().st_size)

    async def put_file(self, path: Path, uri: str, *, sha256: str, if_absent: bool = False) -> None:
        """Store a file in one piece; the store takes it in only if its content has that hash.

        Raises:
            ObjectExists: with ``if_absent``, there is an object of that name.
        """
        bucket, key = split_uri(uri)
        extra = {"ChecksumSHA256": base64.b64encode(bytes.fromhex(sha256)).decode()}
        if if_absent:
            extra["IfNoneMatch"] = "*"

        async def send() -> None:
            with path.open("rb") as body:
                await self._client.put_object(Bucket=bucket, Key=key, Body=body, **extra)

        await self._try(send, uri)
        metrics.OBJECT_BYTES.labels("up").inc(path.stat().st_size)

    async def freshen(self, uri: str) -> None:
        """Have the object written anew by the store itself, so that it is young again; raises ``ObjectNotFound``."""
        bucket, key = split_uri(uri)
        source = {"Bucket": bucket, "Key": key}
        call = partial(self._client.copy_object, Bucket=bucket, Key=key, CopySource=source, MetadataDirective="REPLACE")
        await self._try(call, uri)

    async def upload_blob(self, path: Path, bucket: str, *, sha256: str | None = None) -> tuple[str, str]:
        """Store a file under its hash unless it is there already and young; return (uri, sha256)."""
        digest = sha256 if sha256 is not None else await asyncio.to_thread(hash_file, path)
        uri = f"s3://{bucket}/{blob_key(digest)}"
        try:
            there = await self.head(uri)
            if there.size_bytes == path.stat().st_size and is_young(there.modified_at):
                return uri, digest
        except ObjectNotFound:
            pass
        await self.upload(path, uri)
        return uri, digest

    async def download(self, uri: str, path: Path, *, sha256: str | None = None) -> str:
        """Fetch an object into ``path``, atomically, and return its hash.

        Raises:
            ObjectNotFound: there is no such object.
            ValueError: the content's hash is not ``sha256``; nothing is left at ``path``.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = await self._try(lambda: self._fetch(uri, path, sha256), uri)
        return digest

    async def _fetch(self, uri: str, path: Path, sha256: str | None) -> str:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        partial = Path(name)
        try:
            digest = await self._bulk.read_into(uri, partial, 0, None)
            if sha256 is not None and digest != sha256:
                raise ValueError(f"{uri} has hash {digest}, expected {sha256}")
            partial.replace(path)
            return digest
        finally:
            partial.unlink(missing_ok=True)

    async def read_into(
        self, uri: str, path: Path, offset: int, size_bytes: int, hasher: Callable[[], Any] = hashlib.sha256
    ) -> str:
        """Write an object's content into an existing file from ``offset`` on, and return its hash by ``hasher``.

        Raises:
            ValueError: the object has not ``size_bytes``.
            TransientError: the store is away, or the file cannot be written.
        """
        return await self._try(lambda: self._bulk.read_into(uri, path, offset, size_bytes, hasher), uri)

    async def hash(self, uri: str) -> str:
        """Lower-case hex SHA-256 of an object's content, read as a stream; raises ``ObjectNotFound``."""
        return await self._try(lambda: self._bulk.hash(uri), uri)

    # -- errors -------------------------------------------------------------

    async def _try(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Run ``call`` again while the store is away; give its other errors our names."""
        from aiohttp import ClientError as HttpError
        from botocore.exceptions import BotoCoreError, ClientError

        deadline = asyncio.get_running_loop().time() + self._patience_s
        delay_s = 0.1
        while True:
            try:
                return await call()
            except ClientError as error:
                code = str(error.response.get("Error", {}).get("Code", ""))
                status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
                if code in MISSING or status == 404:
                    raise ObjectNotFound(what) from error
                if code in EXISTS or status in (409, 412):
                    raise ObjectExists(what) from error
                if code in DAMAGED:
                    raise TransientError(f"object store: {what} arrived as other bytes than its name says") from error
                if status < 500 and code not in ("SlowDown", "RequestTimeout"):
                    raise
                problem: Exception = error
            except (TimeoutError, BotoCoreError, HttpError, OSError) as error:
                problem = error
            if asyncio.get_running_loop().time() > deadline:
                raise TransientError(f"object store: {what}: {problem!r}") from problem
            log.info("object store does not answer, trying again", what=what, error=repr(problem))
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, 2.0)
