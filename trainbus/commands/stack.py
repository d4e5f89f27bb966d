"""Commands about a stack: start, stop, check and show it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

import trainbus
from trainbus.client.address import find_data_dir, find_running_data_dir
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.commands import render
from trainbus.commands.options import DataDir, Json, StackName, choose_data_dir, user_name, with_client
from trainbus.embedded.launch import (
    StackError,
    StackInfo,
    StackProcess,
    is_locked,
    read_stack,
    stop_stack,
    wait_stack_ready,
)
from trainbus.embedded.layout import (
    AUTOSCALER,
    SERVICES,
    WORKER,
    InvalidOptionsError,
    StackOptions,
    given_policy,
    mlflow_uri,
    plan_stack,
    s3_keys,
)
from trainbus.embedded.process import end_with_parent, run_service
from trainbus.embedded.registry import list_stacks

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient

app = typer.Typer()
PANEL = "Stack"
SERVICE_NAMES = (*SERVICES, WORKER, AUTOSCALER)
#: Windows has no SIGHUP.
#: MLflow's usual port.
MLFLOW_PORT = 5000
#: Seconds for which a scheduler that has just started is awaited to lead: a killed one's lease lasts 3 s.
POLICY_TIMEOUT_S = 20.0
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@app.command(rich_help_panel=PANEL)
def up(
    nodes: Annotated[int, typer.Option(min=0, max=64, help="Worker nodes.")] = 2,
    slots: Annotated[int, typer.Option(min=1, max=64, help="CPU slots a node.")] = 2,
    data_dir: DataDir = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="Leave out a service or node, to run it yourself: `trainbus service NAME`."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="The scheduler's policy: a name, or a TOML or JSON file (docs/scheduler.md); default: as it is."
        ),
    ] = None,
    autoscale: Annotated[
        list[str] | None,
        typer.Option("--autoscale", help="POOL=MAX: up to MAX more nodes, started and stopped as runs need them."),
    ] = None,
    idle_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which an idle node of a pool stops; default 600.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What --stack calls it in other folders; default: the name of this folder.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it is ready; `trainbus down` stops it.")
    ] = False,
) -> None:
    """Start the embedded stack on this machine: NATS, S3, every service and a few worker nodes."""
    folder = find_data_dir(data_dir)
    if is_locked(folder):
        _show_running_stack(folder)
        return
    _check_installation()
    folder.mkdir(parents=True, exist_ok=True)
    started_at = time.monotonic()
    output = folder / "supervisor.log" if detach else None
    options = StackOptions(
        folder, nodes, slots, tuple(without or ()), policy, tuple(autoscale or ()), idle_s, name=name
    )
    try:
        plan_stack(options, os.environ)
    except InvalidOptionsError as error:
        raise UsageError(str(error)) from error
    stack = StackProcess(options, output=output, detach=detach)
    stopping = _stop_on_signals(stack)
    stack.start()
    try:
        info = stack.wait_ready()
    except StackError as error:
        stack.stop()
        if stopping:
            return
        raise TrainbusError(str(error)) from error
    render.console().print(_process_table(info))
    print(f"ready after {time.monotonic() - started_at:.1f} s; {nodes} nodes of {slots} slots; data in {folder}")
    _print_policy(info, options)
    if detach:
        print("`trainbus down` stops it")
        return
    print("Ctrl-C stops it\n", flush=True)
    while stack.poll() is None:
        # The supervisor prints what happens.
        time.sleep(0.1)
    stack.stop()
    code = stack.poll() or 0
    if code and not stopping:
        raise TrainbusError(f"the stack ended by itself (exit code {code})")


def _print_policy(info: StackInfo, options: StackOptions | None) -> None:
    """Print the policy in force, once it is the one that the options ask for; nothing if the scheduler was left out."""
    if {"scheduler", "gateway"} <= {each["name"] for each in info.processes}:
        print(with_client(info.data_dir, lambda client: adopt_given_policy(client, options)))


async def adopt_given_policy(client: AsyncClient, options: StackOptions | None) -> str:
    """Adopt the policy that the options ask for, if another one is in force; return a line about the one in force."""
    from trainbus.client.policy import wait_for_policy

    try:
        fact = (await wait_for_policy(client.connection, POLICY_TIMEOUT_S)).fact
        wanted = given_policy(options, fact.policy) if options is not None else None
        if wanted is not None and wanted.digest != fact.digest:
            fact = await client.apply_policy(wanted, "given to `trainbus up`", user=user_name())
    except TrainbusError as error:
        return f"the scheduler's policy: {error}"
    return f"the scheduler's policy: {fact.policy.name} (`trainbus policy show`)"


def _check_installation() -> None:
    """Refuse to start a stack where only the client is installed."""
    if any(importlib.util.find_spec(name) is None for name in ("fcntl", "faststream", "torch")):
        raise UsageError(
            "only the client is installed here: pip install 'trainbus[all]' (Linux or macOS) for a stack of your own, "
            "or set TRAINBUS_GATEWAY_URL to one that runs elsewhere"
        )


def _show_running_stack(folder: Path) -> None:
    """Print that the stack is up already, and where: a second ``up`` changes nothing."""
    try:
        info = wait_stack_ready(folder)
    except StackError as error:
        raise TrainbusError(str(error)) from error
    render.console().print(_process_table(info))
    print(f"already up (process {info.pid}): {info.nodes} nodes of {info.slots} slots; data in {folder}")
    _print_policy(info, None)
    print("`trainbus down` stops it; options of `trainbus up` have effect at its next start")


def _stop_on_signals(stack: StackProcess) -> list[int]:
    """Stop the stack in order at the first signal, at once at the second; return the signals received so far."""
    seen: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) == 1:
            print("\nstopping (workers complete their checkpoints; once more to hurry)", flush=True)
        stack.stop_at_once()

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    return seen


def _process_table(info: StackInfo) -> Table:
    table = render.table("process", "pid", "where", "log", right=("pid",))
    where = {"nats": info.nats_url, "s3": info.s3_endpoint, "gateway": info.gateway_url, "serving": info.serving_url}
    for each in info.processes:
        address = where.get(each["name"]) or each["url"] or ""
        table.add_row(each["name"], str(each["pid"]), address, os.path.relpath(each["log"]))
    return table


@app.command(rich_help_panel=PANEL)
def stacks(as_json: Json = False) -> None:
    """List the stacks that run on this machine; `--stack NAME` of any command names one."""
    found = list_stacks()
    if as_json:
        plain = [
            {"name": each.name, "state": each.info.state, "data_dir": str(each.data_dir), "pid": each.info.pid}
            | {"gateway_url": each.info.gateway_url, "nats_url": each.info.nats_url, "s3": each.info.s3_endpoint}
            for each in found
        ]
        print(render.as_json(plain))
        return
    if not found:
        print("no stack runs on this machine: start one with `trainbus up`")
        return
    table = render.table("name", "state", "nodes", "gateway", "data")
    for each in found:
        info = each.info
        table.add_row(each.name, info.state, f"{info.nodes} of {info.slots}", info.gateway_url, str(each.data_dir))
    render.console().print(table)


@app.command(rich_help_panel=PANEL)
def down(data_dir: DataDir = None, stack: StackName = None) -> None:
    """Stop the embedded stack in order; the data stays."""
    folder = find_running_data_dir(choose_data_dir(data_dir, stack))
    try:
        if not stop_stack(folder):
            raise UsageError(f"no stack runs on {folder}")
    except StackError as error:
        raise TrainbusError(str(error)) from error
    print(f"stopped; the data stays in {folder}")


@app.command(rich_help_panel=PANEL)
def service(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SERVICE_NAMES)}.")],
    data_dir: DataDir = None,
    stack: StackName = None,
) -> None:
    """Run one service: on the NATS and S3 that TRAINBUS_* name, else in the embedded stack that left it out."""
    if name not in SERVICE_NAMES:
        raise UsageError(f"there is no service {name!r}; there are {', '.join(SERVICE_NAMES)}")
    _join_stack(name, choose_data_dir(data_dir, stack))
    raise typer.Exit(run_service(name))


def _join_stack(name: str, data_dir: Path | None) -> None:
    """Give this process the environment of the unit that runs ``name`` and was left out of the embedded stack.

    Does nothing where TRAINBUS_NATS_URL is set, or where no embedded stack runs.
    """
    if data_dir is None and "TRAINBUS_NATS_URL" in os.environ:
        return
    folder = find_running_data_dir(data_dir)
    stack = read_stack(folder)
    if stack is None:
        return
    layout = plan_stack(StackOptions(folder, stack.nodes, stack.slots), os.environ, running=True)
    running = {each["name"] for each in stack.processes}
    units = [unit for unit in (*layout.units, *layout.spare) if unit.service == name]
    free = [unit for unit in units if unit.name not in running]
    if not free:
        taken = units[0].name
        raise UsageError(f"the stack on {folder} runs {name} itself: start it with `trainbus up --without {taken}`")
    os.environ.update(free[0].environment)


@app.command(rich_help_panel=PANEL)
def demo(
    data_dir: DataDir = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the stack running until Ctrl-C when the demo is over.")
    ] = False,
    running: Annotated[
        bool, typer.Option("--running", help="Use the running stack, embedded or named by TRAINBUS_*.")
    ] = False,
) -> None:
    """Train on real handwritten digits, end to end: preempt, shrink, grow, evaluate, promote."""
    checkout = Path(trainbus.__file__).parents[1]
    if not (checkout / "examples" / "demo").is_dir():
        raise TrainbusError(f"the demo is an example, and there is none in {checkout}: run it from a checkout")
    sys.path.insert(0, str(checkout))
    main = importlib.import_module("examples.demo.main")
    raise typer.Exit(main.run_demo_on_running_stack(data_dir) if running else main.run_demo(data_dir, keep=keep))


@app.command(rich_help_panel=PANEL)
def doctor(data_dir: DataDir = None, stack: StackName = None, as_json: Json = False) -> None:
    """Check what this machine lacks and what does not answer, and print the remedy."""
    from trainbus.commands.doctor import print_results

    raise typer.Exit(print_results(choose_data_dir(data_dir, stack), as_json=as_json))


@app.command(rich_help_panel=PANEL)
def ui(
    data_dir: DataDir = None,
    stack: StackName = None,
    port: Annotated[int | None, typer.Option(help="Port for MLflow's pages; 5000 by default, or a free one.")] = None,
    browser: Annotated[bool, typer.Option(help="Open the page of the runs in a browser.")] = True,
) -> None:
    """Open the page of the runs, and serve MLflow's pages beside it."""
    folder = find_running_data_dir(choose_data_dir(data_dir, stack))
    info = read_stack(folder)
    has_tracked = (folder / "mlflow" / "mlflow.db").exists()
    if info is None and not has_tracked:
        raise TrainbusError(f"no stack runs in {folder}, and none has tracked runs there: start one with `trainbus up`")
    if info is not None:
        print(f"runs:    {info.gateway_url}/", flush=True)
        if browser:
            open_browser(f"{info.gateway_url}/")
    if not has_tracked:
        print("MLflow:  nothing has been tracked yet; run `trainbus ui` again once a run has started")
        return
    port = choose_port(port)
    print(
        f"MLflow:  http://127.0.0.1:{port}/#/experiments?workflowType=machine_learning   (Ctrl-C stops it)", flush=True
    )
    access_key, secret_key = s3_keys(folder)
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
    environment |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    if info is not None:
        environment["MLFLOW_S3_ENDPOINT_URL"] = info.s3_endpoint
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", mlflow_uri(folder)]
    command += ["--default-artifact-root", (folder.resolve() / "mlflow" / "artifacts").as_uri()]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with publish_mlflow_url(folder, f"http://127.0.0.1:{port}"):
        code = run_server(command, environment)
    is_stop = code in (0, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM)
    raise typer.Exit(0 if is_stop else code)


def run_server(command: list[str], environment: dict[str, str]) -> int:
    """Run a server until it ends or this process is told to stop, and return its exit code."""
    # MLflow's server has child processes: they end with this one, however it ends.
    server = subprocess.Popen(command, env=environment, preexec_fn=end_with_parent(signal.SIGTERM))

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.terminate()

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    return server.wait()


def open_browser(url: str) -> None:
    """Open a page where there is a desktop: a browser of the terminal would take the terminal."""
    is_desktop = sys.platform != "linux" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if is_desktop and sys.stdout.isatty():
        webbrowser.open(url)


def choose_port(wanted: int | None) -> int:
    """Return a port for MLflow's pages: the one that is wanted, else its usual one, else a free one."""
    from services.kit.ports import free_ports, port_is_free

    if wanted:
        return wanted
    return MLFLOW_PORT if port_is_free(MLFLOW_PORT) else free_ports(1)[0]


@contextmanager
def publish_mlflow_url(data_dir: Path, url: str) -> Iterator[None]:
    """Have the page of the runs link to MLflow's pages while they are served."""
    from services.gateway.settings import GatewaySettings

    file = GatewaySettings(data_dir=data_dir / "gateway").mlflow_url_file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(url, encoding="utf-8")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
