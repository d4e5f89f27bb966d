"""``RefusingProtocol`` stands on parts of uvicorn and h11 that neither promises to keep: what they do for it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import h11
import pytest
import pytest_asyncio
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from services.kit.http_server import open_listener
from services.serving.admission import ServerLoad
from services.serving.early_refusal import RefusingProtocol
from services.serving.router import Router
from tests.serving.conftest import PATIENCE_S
from tests.serving.test_overload import read_answer

KEEP_ALIVE_S = 1
UNFIT = (
    f"RefusingProtocol does not fit uvicorn {uvicorn.__version__} ({AutoHTTPProtocol.__name__}) and "
    f"h11 {h11.__version__}: "
)
HEAD, BODY = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n", b"[]"


@dataclass(slots=True)
class Application:
    """Answers after ``wait_s``, and counts what it is asked."""

    asked: int = 0
    wait_s: float = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        await asyncio.sleep(self.wait_s)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


@dataclass(slots=True)
class Connection:
    """A client's connection to a server that can be full."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    load: ServerLoad
    application: Application = field(default_factory=Application)

    async def ask(self, *parts: bytes) -> int:
        """Send the parts of a request; return the status of its answer."""
        try:
            for part in parts:
                self.writer.write(part)
                await self.writer.drain()
            async with asyncio.timeout(PATIENCE_S):
                status, _, _ = await read_answer(self.reader)
        except (OSError, EOFError) as error:
            raise AssertionError(f"{UNFIT}a connection is closed after a refusal") from error
        return int(status.split()[1])

    async def refuse(self, *parts: bytes) -> None:
        """Send a request while the server is full."""
        asked = self.application.asked
        self.load.begin_request()
        status = await self.ask(*parts)
        self.load.end_request()
        assert (status, self.application.asked) == (503, asked), f"{UNFIT}what it should refuse is parsed"


@pytest_asyncio.fixture
async def connection(request: pytest.FixtureRequest) -> AsyncIterator[Connection]:
    application, router = Application(), Router(1.0, ServerLoad(max_open=1, max_wait_s=1.0))
    server = uvicorn.Server(
        uvicorn.Config(
            application,
            http=functools.partial(RefusingProtocol, router=router),  # type: ignore[arg-type]
            log_config=None,
            lifespan="off",
            timeout_keep_alive=getattr(request, "param", 60),
        )
    )
    listener = open_listener("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    yield Connection(reader, writer, router.load, application)
    writer.close()
    server.should_exit = True
    await serving
    listener.close()


async def test_a_refused_connection_stays_usable(connection: Connection) -> None:
    await connection.refuse(HEAD + BODY)
    await connection.refuse(HEAD, BODY)
    assert await connection.ask(HEAD, BODY) == 200
    await connection.refuse(HEAD + BODY)
    assert await connection.ask(HEAD + BODY) == 200
    assert connection.application.asked == 2


@pytest.mark.parametrize("connection", [KEEP_ALIVE_S], indirect=True)
async def test_an_answer_is_not_cut_off_by_the_timeout_of_refusals(connection: Connection) -> None:
    await connection.refuse(HEAD + BODY)
    await connection.refuse(HEAD + BODY)
    # It begins after the timeouts of both, and so ends after them.
    connection.application.wait_s = KEEP_ALIVE_S
    assert await connection.ask(HEAD + BODY) == 200


@pytest.mark.parametrize("connection", [KEEP_ALIVE_S], indirect=True)
async def test_a_refused_connection_is_closed_after_the_keep_alive_timeout(connection: Connection) -> None:
    await connection.refuse(HEAD + BODY)
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await connection.reader.read() == b""
    except TimeoutError as error:
        raise AssertionError(f"{UNFIT}an idle connection stays open") from error
