"""Real servers for the tests: a nats-server of its own for each test, one S3 for the session."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio
import structlog

from services.kit.bus import Bus
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from tests.suite import longest
from trainbus.embedded.servers import NatsServer, S3Server

ROOT = Path(__file__).parents[1]
ACCESS_KEY, SECRET_KEY = "testkey", "testsecret"

# A change is judged by the same examples each time; `make fuzz` looks for new ones.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("new", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")

#: A test that uses one of these, or starts processes of its own (marked ``shell``), is no test of a core.
SERVER_FIXTURES = frozenset({"nats_server", "s3_server"})
SHELL_MARKERS = frozenset({"e2e", "needs", "shell"})

#: Fixtures that return the folder of a stack, and how much of each of its logs a report has.
STACK_FOLDERS = ("stack_folder", "tmp_path")
LOG_LINES, LOG_END_BYTES = 15, 20_000

#: Variables in the environment of the person who runs the tests that would change what the tests do.
FOREIGN_VARIABLES = ("TRAINBUS_", "MLFLOW_", "AWS_", "OTEL_", "DEMO_", "OMP_NUM_THREADS")


#: Programs that a machine may lack. What needs one runs if it is asked for by name, and fails then if it is not there.
PROGRAMS = ("cc", "chromium", "docker", "inference", "node", "postgres", "promtool", "site", "vision")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--with",
        action="append",
        default=[],
        dest="programs",
        choices=PROGRAMS,
        help="also run the tests that need this program of the system; more than once for several",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the environment the tests' own, before xdist starts its workers and any test a process."""
    if (ROOT / ".env").exists():
        raise pytest.UsageError(f"{ROOT / '.env'} would configure the services that tests start: move it away first")
    for name in [name for name in os.environ if name.startswith(FOREIGN_VARIABLES)]:
        del os.environ[name]
    os.environ["TZ"] = "UTC"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a program that was not named, mark lanes, and put the files in the order of the suite."""
    asked = set(config.getoption("programs"))
    left_out = [item for item in items if not _needs(item) <= asked]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    for item in items:
        uses_server = not SERVER_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        if item.path.parent.name == "e2e":
            item.add_marker("e2e")
        elif not uses_server and not any(item.get_closest_marker(name) for name in SHELL_MARKERS):
            item.add_marker("core")
    slow_files = {item.path for item in items if item.get_closest_marker("core") is None}
    places = {ROOT / name: place for place, name in enumerate(longest.read())}
    items.sort(key=lambda item: (item.path in slow_files, places.get(item.path, len(places))))


def _needs(item: pytest.Item) -> set[str]:
    """Return the programs that a test needs."""
    return {program for marker in item.iter_markers("needs") for program in marker.args}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the ends of the logs of a stack's processes to the report of a test that failed on it."""
    report = yield
    if report.failed:
        funcargs = getattr(item, "funcargs", {})
        for folder in {funcargs[name] for name in STACK_FOLDERS if name in funcargs}:
            for log in sorted(folder.rglob("logs/*.log")):
                end = log.read_bytes()[-LOG_END_BYTES:].decode(errors="replace").splitlines()[-LOG_LINES:]
                report.sections.append((f"end of {log.relative_to(folder)}", "\n".join(end)))
    return report


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a case of bytes by their length: a test has one id in every process, and a line of its own in a log."""
    return f"{len(val)}_bytes" if isinstance(val, bytes) else None


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests, and the processes that they start, an empty home: no stacks, settings, credentials or caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYENV_ROOT", os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv")))  # its python looks there
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name in [name for name in os.environ if name.startswith("XDG_")]:
            patch.delenv(name)
        # However busy the machine is: what a check finds is asserted, not how long it takes.
        patch.setenv("TRAINBUS_CHECK_TIMEOUT_S", "300")
        yield


@pytest.fixture(autouse=True)
def own_log_configuration() -> Iterator[None]:
    """Log past what a test reads of its output, which is a command's answer alone; a report of a failure has the logs.

    And leave structlog as it was: a command silences the logs of its process, which the next test may read.
    """
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(sys.__stderr__))
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def own_kernels() -> Iterator[None]:
    """Leave torch as it was: a trainer in exact mode chooses deterministic kernels for its whole process."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats", free_ports(1)[0])
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"), free_ports(1)[0], ACCESS_KEY, SECRET_KEY)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def settings(nats_server: NatsServer, tmp_path: Path) -> Settings:
    """Settings that reach the test's own nats-server. For S3 too, use ``s3_settings``."""
    return Settings(nats_url=nats_server.url, data_dir=tmp_path / "data", http_port=-1, lease_ttl_s=10.0)


@pytest.fixture
def s3_settings(settings: Settings, s3_server: S3Server) -> Settings:
    """Settings for NATS and S3; the buckets are this test's own."""
    own = uuid.uuid4().hex[:10]
    return settings.model_copy(
        update={
            "s3_endpoint": s3_server.endpoint,
            "s3_access_key": ACCESS_KEY,
            "s3_secret_key": Settings(s3_secret_key=SECRET_KEY).s3_secret_key,
            "bucket_lake": f"lake-{own}",
            "bucket_datasets": f"datasets-{own}",
            "bucket_models": f"models-{own}",
            "bucket_code": f"code-{own}",
        }
    )


@pytest_asyncio.fixture
async def objects(s3_settings: Settings) -> AsyncIterator[ObjectStore]:
    """The object store, with this test's buckets made."""
    async with ObjectStore(s3_settings) as store:
        for name in ("lake", "datasets", "models", "code"):
            await store.ensure_bucket(getattr(s3_settings, f"bucket_{name}"))
        yield store


@pytest_asyncio.fixture
async def make_bus(settings: Settings) -> AsyncIterator[Callable[..., Any]]:
    """Make connected buses; they are closed at the end of the test."""
    made: list[Bus] = []

    async def make(service: str = "test", **kwargs: Any) -> Bus:
        bus = Bus(service, settings, **kwargs)
        await bus.connect()
        made.append(bus)
        return bus

    yield make
    for bus in made:
        await bus.close()


@pytest_asyncio.fixture
async def bus(make_bus: Callable[..., Any]) -> Any:
    return await make_bus()
