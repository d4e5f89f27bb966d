"""A connection to a stack: HTTP and server-sent events of its gateway."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from contracts import streams
from trainbus.client.address import StackAddress
from trainbus.client.errors import NotFoundError, StackUnreachableError, TrainbusError, UsageError

if TYPE_CHECKING:
    from contracts.base import Request
    from trainbus.client.stored_event import StoredEvent

#: Seconds for which a gateway that does not answer is asked again: it may just be restarting.
PATIENCE_S = 1.5
#: Seconds for which an answer is awaited, and for a connection.
ANSWER_S, CONNECT_S = 30.0, 1.5
#: Seconds between two attempts.
RETRY_S = 0.2
#: Seconds without an event after which a follower gets an empty batch.
IDLE_S = 0.25
#: Seconds without a word after which a stream is opened again: the gateway sends a comment every ten.
SILENCE_S = 35.0
#: Events in one answer, and in one batch of a stream.
PAGE, BATCH = 5000, 500
#: Items in one page of a list.
PAGE_ITEMS = 500
AMBIGUOUS = "urn:trainbus:problem:ambiguous-reference"


@dataclass(frozen=True, slots=True)
class PublishedRequest:
    """A request that is on the bus."""

    event_id: str
    #: The run, the study or the ingestion that it leads to, if it leads to one.
    run_id: str | None = None
    study_id: str | None = None
    ingestion_id: str | None = None
    #: Subject of the fact that says why it was refused, should it be.
    refusal: str | None = None


class Connection:
    """An open connection to one stack's gateway. ``report`` gets a line when it is away, and when it is back."""

    def __init__(self, http: httpx.AsyncClient, report: Callable[[str], None]) -> None:
        self._http, self._report = http, report
        #: Types of events that this version could not read.
        self._unknown: set[str] = set()

    # -- questions and requests ----------------------------------------------------

    async def get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        """Return what the gateway answers to GET, as JSON.

        Raises:
            NotFoundError: nothing is known under this name, or several things are.
            UsageError: the question is not valid.
            StackUnreachableError: the gateway or NATS does not answer.
        """
        return await self.call("GET", path, params=params)

    async def read_pages(self, path: str, **params: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the pages of a list, each when it is wanted. Raises as ``get`` does."""
        cursor: dict[str, str] = {}
        while True:
            page = await self.get(path, {"limit": PAGE_ITEMS, **params, **cursor})
            yield page
            if page["next_cursor"] is None:
                return
            cursor = {"cursor": page["next_cursor"]}

    async def call(self, method: str, path: str, *, timeout_s: float = ANSWER_S, **request: Any) -> Any:
        """Send a request, again while the gateway is away, and return its answer as JSON. Raises as ``get`` does."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
                answer = await self._http.request(method, path, timeout=timeout, **request)
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    raise StackUnreachableError(describe_absence(self._http.base_url, error)) from error
                await asyncio.sleep(RETRY_S)
                continue
            return _read_answer(answer)

    async def await_result(self, path: str, advance: Callable[[int, int], None], **request: Any) -> Any:
        """Ask for what takes minutes, and return its result; ``advance`` gets (bytes done, all bytes) meanwhile.

        Raises as ``get`` does.
        """
        name, url = "", self._http.base_url
        try:
            timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
            async with self._http.stream("POST", path, timeout=timeout, **request) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    _read_answer(answer)
                async for line in answer.aiter_lines():
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        data = json.loads(line.removeprefix("data: "))
                        match name:
                            case "progress":
                                advance(data["done"], data["total"])
                            case "problem":
                                raise _describe_problem(data["status"], data, url)
                            case _:
                                return data
        except httpx.TransportError as error:
            raise StackUnreachableError(describe_absence(url, error)) from error
        raise StackUnreachableError(f"the gateway at {url} stops and has left the work unfinished: ask again")

    async def publish_request(self, event: Request, event_id: str | None = None) -> PublishedRequest:
        """Publish a request and return it once the bus has stored it. The same ``event_id`` is the same request."""
        from trainbus.client.request_routes import find_route

        key = event_id or uuid.uuid4().hex
        if not (key.isascii() and key.isprintable()):
            raise UsageError(f"event id {key!r}: give printable ASCII")
        route, headers = find_route(event), {"Idempotency-Key": key}
        if route.body is not None:
            headers["Content-Type"] = "application/json"
        answer = await self.call(route.method, route.path, params=route.params, content=route.body, headers=headers)
        named = {name: answer.get(name) for name in ("run_id", "study_id", "ingestion_id", "refusal")}
        return PublishedRequest(key, **named)

    # -- the log ---------------------------------------------------------------------

    def _decode_all(self, events: list[dict[str, Any]]) -> list[StoredEvent]:
        """Return the events that this version knows; say once of each type that others are left out."""
        # Every type of event is among what this imports: a question to the read model needs none.
        from contracts.envelope import EnvelopeError
        from trainbus.client.stored_event import StoredEvent

        found: list[StoredEvent] = []
        for each in events:
            try:
                found.append(StoredEvent.of(each))
            except EnvelopeError as error:
                if each["type"] not in self._unknown:
                    self._unknown.add(each["type"])
                    self._report(f"left out {each['type']} at {each['sequence']}, and others like it: {error}")
        return found

    async def follow(
        self, stream: streams.Stream, *filters: str, start_sequence: int = 1, until_caught_up: bool = False
    ) -> AsyncGenerator[list[StoredEvent], None]:
        """Yield batches of events in order, and an empty batch four times a second while nothing happens.

        Nothing is lost or doubled when the gateway restarts or another one takes its place.
        """
        batches = (self._read if until_caught_up else self._follow)(stream, filters, start_sequence - 1)
        async with aclosing(batches):
            async for batch in batches:
                yield batch

    async def read(
        self, *filters: str, stream: streams.Stream = streams.FACTS, start_sequence: int = 1
    ) -> list[StoredEvent]:
        """Return every event that the stream holds now, oldest first."""
        return [each async for batch in self._read(stream, filters, start_sequence - 1) for each in batch]

    async def read_last(self, stream: streams.Stream, subject: str) -> StoredEvent | None:
        """Return the newest event on one subject, None if there is none."""
        part = await self._get_range(stream, (subject,), 0, tail=1)
        found = self._decode_all(part["events"])
        return found[-1] if found else None

    async def last_sequence(self, stream: streams.Stream) -> int:
        """Return the sequence number of the newest message of a stream."""
        return int((await self._get_range(stream, (), 0, tail=0))["last_event_id"])

    async def _get_range(
        self, stream: streams.Stream, filters: tuple[str, ...], after: int, **more: Any
    ) -> dict[str, Any]:
        params = {**_params(stream, filters), "follow": False, "limit": PAGE, **more}
        answer = await self.call("GET", "/events", params=params, headers={"Last-Event-ID": str(after)})
        assert isinstance(answer, dict)
        return answer

    async def _read(
        self, stream: streams.Stream, filters: tuple[str, ...], after: int
    ) -> AsyncGenerator[list[StoredEvent], None]:
        while True:
            part = await self._get_range(stream, filters, after)
            yield self._decode_all(part["events"])
            after = part["last_event_id"]
            if not part["has_more"]:
                return

    async def _follow(
        self, stream: streams.Stream, filters: tuple[str, ...], after: int
    ) -> AsyncGenerator[list[StoredEvent], None]:
        arrived: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=2 * BATCH)
        pump = asyncio.create_task(self._pump(stream, filters, after, arrived))
        try:
            while True:
                batch: list[dict[str, Any]] = []
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        batch.append(await arrived.get())
                while batch and len(batch) < BATCH and not arrived.empty():
                    batch.append(arrived.get_nowait())
                if not batch and pump.done():
                    pump.result()
                yield self._decode_all(batch)
        finally:
            pump.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await pump

    async def _pump(
        self,
        stream: streams.Stream,
        filters: tuple[str, ...],
        after: int,
        arrived: asyncio.Queue[dict[str, Any]],
    ) -> None:
        """Put every event into ``arrived``; open the stream again where it ends or breaks."""
        is_away = False
        while True:
            try:
                timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
                headers = {"Last-Event-ID": str(after)}
                params = _params(stream, filters)
                async with self._http.stream(
                    "GET", "/events", params=params, headers=headers, timeout=timeout
                ) as answer:
                    if answer.status_code >= 500:
                        raise httpx.RemoteProtocolError(f"status {answer.status_code}")
                    if answer.status_code != 200:
                        await answer.aread()
                        _read_answer(answer)
                    if is_away:
                        self._report("the gateway is back")
                        is_away = False
                    async for line in answer.aiter_lines():
                        if line.startswith("data: "):
                            event = json.loads(line.removeprefix("data: "))
                            await arrived.put(event)
                            after = event["sequence"]
            except httpx.TransportError:
                if not is_away:
                    self._report(f"the gateway at {self._http.base_url} is away; waiting for it")
                    is_away = True
            await asyncio.sleep(RETRY_S)


def print_status(text: str) -> None:
    """Print a line about the connection on stderr."""
    print(f"trainbus: {text}", file=sys.stderr, flush=True)


@asynccontextmanager
async def connect(address: StackAddress, report: Callable[[str], None] = print_status) -> AsyncIterator[Connection]:
    """Connect to the stack's gateway. ``report`` gets a line when it is away while it is followed, and when it is back.

    Raises:
        StackUnreachableError: it does not answer, or what answers is no gateway.
    """
    url = gateway_url(address)
    # The CA certificates take as long to load as a short command runs.
    async with httpx.AsyncClient(base_url=url, verify=url.startswith("https:")) as http:
        connection = Connection(http, report)
        about = await connection.get("/health")
        if not isinstance(about, dict) or about.get("service") != "gateway":
            raise StackUnreachableError(f"what answers at {url} is no gateway of trainbus: see TRAINBUS_GATEWAY_URL")
        yield connection


def _params(stream: streams.Stream, filters: tuple[str, ...]) -> dict[str, Any]:
    return {"stream": stream.name.lower(), "subject": list(filters)}


def check_answer(answer: httpx.Response) -> None:
    """Raise the gateway's own words if it has refused.

    Raises:
        NotFoundError: there is no such thing, or several things are called so.
        UsageError: what was sent is not valid.
        StackUnreachableError: NATS or the object store does not answer.
        TrainbusError: it refuses for another reason.
    """
    if not answer.is_success:
        raise _describe_problem(answer.status_code, _read_problem(answer), answer.request.url)


def _read_answer(answer: httpx.Response) -> Any:
    """Return the JSON of an answer. Raises as ``check_answer`` does."""
    check_answer(answer)
    try:
        return answer.json()
    except ValueError as error:
        raise TrainbusError(f"{answer.request.url} answers with no JSON: is it a gateway's address?") from error


def _read_problem(answer: httpx.Response) -> dict[str, Any]:
    """Return a problem document, or what else stands in its place."""
    try:
        found = answer.json()
    except ValueError:
        found = None
    if isinstance(found, dict) and "detail" in found:
        return found
    return {"detail": f"{answer.request.url} answers {answer.status_code}: {answer.text[:500]}"}


def _describe_problem(status: int, problem: Mapping[str, Any], url: httpx.URL) -> TrainbusError:
    """Return the error that a problem document says."""
    detail = str(problem.get("detail") or f"{url} answers {status}")
    match status:
        case 404:
            return NotFoundError(detail)
        case 409 if problem.get("type") == AMBIGUOUS:
            return NotFoundError(detail)
        case 409 | 413 | 415 | 422:
            return UsageError(detail)
        case 503:
            return StackUnreachableError(f"{detail} (`trainbus doctor` shows what is wrong)")
        case _:
            return TrainbusError(detail)


def gateway_url(address: StackAddress) -> str:
    """Return the address of a stack's gateway.

    Raises:
        StackUnreachableError: none is named.
    """
    if not address.gateway_url:
        raise StackUnreachableError("no gateway is named: set TRAINBUS_GATEWAY_URL to its address, http://host:port")
    return address.gateway_url


def describe_absence(url: httpx.URL, error: Exception) -> str:
    """Return the message about a gateway that does not answer."""
    reason = str(error) or type(error).__name__
    return (
        f"the gateway at {str(url).rstrip('/')} does not answer ({reason}): is the stack up? "
        "`trainbus doctor` shows what is wrong"
    )
