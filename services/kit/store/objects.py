"""The object store (S3), once: retries, conditional puts, content-addressed blobs, streaming.

What passes by itself (connection refused, 5xx, time-out) becomes ``TransientError``; the rest has names in ``errors``.
aioboto3 is imported on first use, so a service without objects does not pay for it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import structlog

from services.kit import metrics
from services.kit.messages import TransientError
from services.kit.settings import Settings
from services.kit.store.conditional import copy_onto_itself, vouched_sha256
from services.kit.store.credentials import aws_session
from services.kit.store.errors import ObjectChanged, ObjectCorrupted, ObjectExists, ObjectNotFound
from services.kit.store.files import FileSink, Hasher
from services.kit.store.reader import PATIENCE_S, ObjectReader
from services.kit.store.uris import blob_sha256, split_uri

log = structlog.get_logger(__name__)
T = TypeVar("T")

#: Age above which an upload renews an existing blob. Garbage collection spares young blobs, so it never removes one
#: that an upload has just reused.
REUSE_AGE_S = 6 * 3600.0
#: What ``probe_conditional_deletes`` writes and deletes.
PROBE_KEY = ".probe/conditional-delete"
#: How often a store that nobody uses is asked whether it answers, and how long that may take.
PROBE_EVERY_S = 5.0
PROBE_TIMEOUT_S = 5.0
NOT_FOUND_CODES = {"404", "NoSuchKey", "NoSuchBucket", "NotFound"}
EXISTS_CODES = {"PreconditionFailed", "412", "ConditionalRequestConflict"}
#: The store received other bytes than the announced ones.
CORRUPTED_CODES = {"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    bucket: str
    key: str
    size_bytes: int
    etag: str
    modified_at: datetime
    #: The hash that the store computed when it received the object; '' where it reports none.
    sha256: str = ""

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class ObjectPage:
    """Some of the objects under a prefix, in the order of keys."""

    objects: tuple[ObjectInfo, ...]
    #: What begins the keys of more objects, up to the next ``/``; only where a listing stops at folders.
    folders: tuple[str, ...] = ()
    #: Where the next page begins; '' after the last one.
    next_cursor: str = ""


def is_young(written_at: datetime) -> bool:
    """Whether an upload may reuse a blob without renewing it."""
    return datetime.now(UTC) - written_at < timedelta(seconds=REUSE_AGE_S)


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
        self.reader = ObjectReader(settings, patience_s=patience_s)
        #: Whether it has answered lately, as far as ``watch`` knows.
        self.answers = True
        #: Whether ``delete`` heeds ``if_match``; None: not probed.
        self.deletes_conditionally: bool | None = None

    async def __aenter__(self) -> Self:
        from botocore.config import Config

        session = aws_session(self._settings)
        self._stack.push_async_callback(self.reader.close)
        # Listings hold a time an object; boto's general parser would take half of the time they cost.
        session._session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_parse_time)
        config = Config(
            connect_timeout=3,
            read_timeout=30,
            retries={"mode": "standard", "max_attempts": 2},
            max_pool_connections=32,
            s3={"addressing_style": "path"},
            # Not every S3 store supports the newer checksum trailers.
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

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def watch(self) -> None:
        """Keep ``answers`` and its gauge up to date until cancelled. Any answer counts, a refusal among them."""
        from aiohttp import ClientError as HttpError
        from botocore.exceptions import BotoCoreError, ClientError

        while True:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await self._client.head_bucket(Bucket=self._settings.bucket_code)
                answers = True
            except ClientError as error:
                answers = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) < 500
            except (TimeoutError, BotoCoreError, HttpError, OSError):
                answers = False
            if answers != self.answers:
                log.warning("the object store answers again" if answers else "the object store does not answer")
            self.answers = answers
            metrics.OBJECT_STORE_UP.set(answers)
            await asyncio.sleep(PROBE_EVERY_S)

    # -- whole objects ------------------------------------------------------

    async def put(self, uri: str, body: bytes, *, if_absent: bool = False, content_type: str = "") -> None:
        """Store ``body``. With ``if_absent``, raise ``ObjectExists`` instead of replacing anything.

        The store verifies a blob against its name, rejects any other content and reports the hash in ``head``.
        """
        # A buffer is sent in parts; bytes would be handed to the connection at once, and copied for it.
        await self._put(uri, partial(io.BytesIO, body), len(body), blob_sha256(uri), if_absent, content_type)

    async def get(self, uri: str, *, etag: str = "", size_bytes: int | None = None) -> bytes:
        """Return a whole object, which is known to be small; arguments and errors as in ``ObjectReader.read``."""
        return await self.reader.get(uri, etag=etag, size_bytes=size_bytes)

    async def get_or_find_damage(self, uri: str) -> bytes:
        """Return a whole object, which is known to be small.

        A store with checksums of its own answers a read of rotten bytes as if it were away.

        Raises:
            ObjectCorrupted: the store has the object, and does not answer with its content.
            TransientError: the store does not answer.
        """
        try:
            return await self.get(uri)
        except TransientError as error:
            await self.head(uri)
            raise ObjectCorrupted(f"{uri} cannot be read: the store finds it damaged") from error

    async def head(self, uri: str) -> ObjectInfo:
        """Return size, ETag and, if the store records it, the hash; raises ``ObjectNotFound``."""
        bucket, key = split_uri(uri)
        call = partial(self._client.head_object, Bucket=bucket, Key=key, ChecksumMode="ENABLED")
        answer = await self._retry(call, uri)
        sha256 = vouched_sha256(answer.get("ChecksumSHA256", ""), blob_sha256(uri))
        etag = answer["ETag"].strip('"')
        return ObjectInfo(bucket, key, answer["ContentLength"], etag, answer["LastModified"], sha256)

    async def exists(self, uri: str) -> bool:
        try:
            await self.head(uri)
        except ObjectNotFound:
            return False
        return True

    async def delete(self, uri: str, *, if_match: str = "") -> None:
        """Delete the object; succeed if it does not exist.

        Args:
            if_match: the ETag that it must have. Some stores ignore it: see ``probe_conditional_deletes``.

        Raises:
            ObjectChanged: it has another ETag, or, by some stores, does not exist.
        """
        bucket, key = split_uri(uri)
        extra = {"IfMatch": f'"{if_match}"'} if if_match and self.deletes_conditionally is not False else {}
        try:
            await self._retry(lambda: self._client.delete_object(Bucket=bucket, Key=key, **extra), uri)
        except ObjectExists as error:
            raise ObjectChanged(f"{uri} was written again") from error
        except ObjectNotFound:
            if not extra:
                raise

    async def probe_conditional_deletes(self, bucket: str) -> None:
        """Find out, once, whether the store heeds ``if_match``, by an object of its own; set the gauge."""
        from botocore.exceptions import ClientError

        if self.deletes_conditionally is not None:
            return
        uri = f"s3://{bucket}/{PROBE_KEY}"
        try:
            await self.put(uri, b"deleted only if its ETag is the one that is named")
        except ClientError as error:  # the policy of the bucket, perhaps: conditions are sent all the same
            log.warning("cannot find out whether the object store deletes conditionally", object=uri, error=str(error))
            return
        problem = "it deletes an object of another ETag"
        try:
            await self.delete(uri, if_match=hashlib.md5(b"another", usedforsecurity=False).hexdigest())
            honours = False
        except ObjectChanged:
            honours = True
        except ClientError as error:
            honours, problem = False, str(error)
        self.deletes_conditionally = honours
        metrics.CONDITIONAL_DELETES.set(honours)
        await self.delete(uri)
        if not honours:
            log.warning(
                "the object store ignores If-Match when it deletes: a blob that an upload renews while garbage "
                "collection deletes it is lost, and its checkpoint with it",
                problem=problem,
            )

    async def list(self, uri: str) -> AsyncIterator[ObjectInfo]:
        """Iterate over every object under a prefix, in the order of keys."""
        async for page in self.list_pages(uri):
            for info in page.objects:
                yield info

    async def list_pages(self, uri: str, *, by_folder: bool = False) -> AsyncIterator[ObjectPage]:
        """Iterate over every page of a listing; see ``list_page``."""
        cursor = ""
        while True:
            page = await self.list_page(uri, cursor=cursor, by_folder=by_folder)
            yield page
            cursor = page.next_cursor
            if not cursor:
                return

    async def list_page(self, uri: str, *, cursor: str = "", limit: int = 1000, by_folder: bool = False) -> ObjectPage:
        """Return up to ``limit`` objects under a prefix; ``by_folder`` makes one of all below the next ``/``."""
        bucket, prefix = split_uri(uri)
        extra = {"ContinuationToken": cursor} if cursor else {}
        if by_folder:
            extra["Delimiter"] = "/"
        call = partial(self._client.list_objects_v2, Bucket=bucket, Prefix=prefix, MaxKeys=limit, **extra)
        page = await self._retry(call, uri)
        found = (
            ObjectInfo(bucket, item["Key"], item["Size"], item["ETag"].strip('"'), item["LastModified"])
            for item in page.get("Contents", ())
        )
        folders = tuple(item["Prefix"] for item in page.get("CommonPrefixes", ()))
        return ObjectPage(tuple(found), folders, page.get("NextContinuationToken") or "")

    async def ensure_bucket(self, bucket: str) -> None:
        """Create the bucket if it does not exist."""
        try:
            await self._retry(lambda: self._client.head_bucket(Bucket=bucket), bucket)
        except ObjectNotFound:
            with suppress(ObjectExists):
                await self._retry(lambda: self._client.create_bucket(Bucket=bucket), bucket)

    # -- files --------------------------------------------------------------

    async def upload(self, path: Path, uri: str) -> None:
        """Store a file, in parts when it is large."""
        bucket, key = split_uri(uri)
        await self._retry(lambda: self._client.upload_file(str(path), bucket, key), uri)
        metrics.OBJECT_BYTES.labels("up").inc(path.stat().st_size)

    async def put_file(self, path: Path, uri: str, *, sha256: str, if_absent: bool = False) -> None:
        """Store a file in one piece; the store takes it in only if its content has that hash.

        Raises:
            ObjectExists: with ``if_absent``, there is an object of that name.
        """
        await self._put(uri, lambda: path.open("rb"), path.stat().st_size, sha256, if_absent)

    async def _put(
        self,
        uri: str,
        open_body: Callable[[], BinaryIO],
        size_bytes: int,
        sha256: str,
        if_absent: bool,
        content_type: str = "",
    ) -> None:
        bucket, key = split_uri(uri)
        extra = {"IfNoneMatch": "*"} if if_absent else {}
        if sha256:
            extra["ChecksumSHA256"] = base64.b64encode(bytes.fromhex(sha256)).decode()
        if content_type:
            extra["ContentType"] = content_type

        async def send() -> None:
            with open_body() as body:
                await self._client.put_object(Bucket=bucket, Key=key, Body=body, **extra)

        await self._retry(send, uri)
        metrics.OBJECT_BYTES.labels("up").inc(size_bytes)

    async def call(self, send: Callable[[Any], Awaitable[T]], what: str) -> T:
        """Return what ``send`` gets from the client of S3; repeated while the store is away, errors translated."""
        return await self._retry(lambda: send(self._client), what)

    async def renew(self, there: ObjectInfo) -> bool:
        """Have the store write an object again under another ETag, so that no delete of the old one takes it away.

        No byte is sent. Return False if it is too small for other parts than it has: it must be sent again, which gives
        it a plain ETag. So of a small object every other renewal sends the bytes.

        Raises:
            ObjectNotFound: it is gone.
            ObjectChanged: it is not the version that was looked at: look again.
        """
        try:
            etag = await copy_onto_itself(self.call, there.bucket, there.key, there.size_bytes, there.etag)
        except ObjectExists as error:
            raise ObjectChanged(f"{there.uri} was written again") from error
        return etag != there.etag

    async def download(
        self, uri: str, path: Path, *, sha256: str | None = None, etag: str = "", size_bytes: int | None = None
    ) -> str:
        """Fetch an object into ``path``, atomically, and return its hash; errors as in ``ObjectReader.read``.

        Raises:
            ObjectCorrupted: the content's hash is not ``sha256``; nothing is left at ``path``.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        partial = Path(name)
        try:
            digest = await self._read_to_file(uri, partial, 0, hashlib.sha256, etag=etag, size_bytes=size_bytes)
            if sha256 is not None and digest != sha256:
                raise ObjectCorrupted(f"{uri} has hash {digest}, expected {sha256}")
            partial.replace(path)
            return digest
        finally:
            partial.unlink(missing_ok=True)

    async def read_into(
        self, uri: str, path: Path, offset: int, size_bytes: int, hasher: Callable[[], Hasher] = hashlib.sha256
    ) -> str:
        """Write an object's content into an existing file from ``offset`` on, and return its hash by ``hasher``.

        Raises:
            ObjectCorrupted: the object does not have ``size_bytes``.
            TransientError: the store is away, or the file cannot be written.
        """
        return await self._read_to_file(uri, path, offset, hasher, etag="", size_bytes=size_bytes)

    async def hash(self, uri: str) -> str:
        """Return the lower-case hex SHA-256 of an object's content; errors as in ``ObjectReader.read``."""
        digest = hashlib.sha256()
        await self.reader.read(uri, digest.update)
        return digest.hexdigest()

    async def _read_to_file(
        self, uri: str, path: Path, offset: int, hasher: Callable[[], Hasher], *, etag: str, size_bytes: int | None
    ) -> str:
        digest = hasher()
        try:
            with FileSink(path, offset, digest) as sink:
                await self.reader.read(uri, sink, etag=etag, size_bytes=size_bytes)
        except OSError as error:
            raise TransientError(f"{path} cannot be written: {error.strerror or repr(error)}") from error
        return digest.hexdigest()

    # -- errors -------------------------------------------------------------

    async def _retry(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Repeat ``call`` while the store is away; translate its other errors."""
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
                if code in NOT_FOUND_CODES or status == 404:
                    raise ObjectNotFound(what) from error
                if code in EXISTS_CODES or status in (409, 412):
                    raise ObjectExists(what) from error
                if code in CORRUPTED_CODES:
                    raise TransientError(f"object store: {what} did not arrive as it was sent") from error
                if status == 501 or (status < 500 and code not in ("SlowDown", "RequestTimeout")):
                    raise
                problem: Exception = error
            except (TimeoutError, BotoCoreError, HttpError, OSError) as error:
                problem = error
            if asyncio.get_running_loop().time() > deadline:
                raise TransientError(f"object store: {what}: {problem!r}") from problem
            log.info("the object store does not answer, trying again", object=what, error=repr(problem))
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, 2.0)
