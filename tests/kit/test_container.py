"""The bus tests once more, against nats-server in a container: another build, another file system.

Needs a Docker engine: `make test WITH=docker`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.kit.support import wait_for_nats
from tests.kit.test_bus import (
    test_a_bare_publish_from_a_shell_is_a_request,
    test_a_publish_whose_answer_was_lost_is_recognised,
    test_a_request_without_a_handler_waits_for_a_version_that_has_one,
    test_a_zombie_cannot_commit,
    test_last_and_history,
    test_the_same_fact_twice_is_stored_once,
    test_two_leaders_cannot_both_place,
)

IMAGE = "nats:2.12-alpine"
pytestmark = pytest.mark.needs("docker")

__all__ = [
    "test_a_bare_publish_from_a_shell_is_a_request",
    "test_a_publish_whose_answer_was_lost_is_recognised",
    "test_a_request_without_a_handler_waits_for_a_version_that_has_one",
    "test_a_zombie_cannot_commit",
    "test_last_and_history",
    "test_the_same_fact_twice_is_stored_once",
    "test_two_leaders_cannot_both_place",
]


@dataclass(frozen=True)
class ContainerServer:
    url: str


@pytest.fixture(scope="module")
def container() -> Iterator[str]:
    from testcontainers.core.config import testcontainers_config
    from testcontainers.core.container import DockerContainer

    # Its helper image (ryuk) cannot be pulled everywhere; the container is stopped below in any case.
    testcontainers_config.ryuk_disabled = True
    made = DockerContainer(IMAGE).with_command("-js").with_exposed_ports(4222)
    made.start()
    try:
        host, port = made.get_container_host_ip(), int(made.get_exposed_port(4222))
        host = socket.gethostbyname(host)
        wait_for_nats(host, port)
        yield f"nats://{host}:{port}"
    finally:
        made.stop()


@pytest.fixture
def nats_server(container: str) -> Iterator[ContainerServer]:
    """In place of the child process: the container, emptied after each test."""
    yield ContainerServer(container)
    _empty(container)


def _empty(url: str) -> None:
    import asyncio

    import nats

    async def delete() -> None:
        connection = await nats.connect(url)
        js = connection.jetstream()
        for stream in await js.streams_info():
            await js.delete_stream(stream.config.name or "")
        await connection.close()

    asyncio.run(delete())
