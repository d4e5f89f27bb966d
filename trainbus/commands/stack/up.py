"""``up``, ``down`` and ``ui``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from trainbus.client.address import find_data_dir
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.embedded.launch import (
    StackError,
    StackInfo,
    StackProcess,
    describe_lock,
    is_locked,
    read_stack,
    stop_stack,
)
from trainbus.embedded.layout import (
    InvalidOptionsError,
    StackOptions,
    UnknownUnitError,
    mlflow_uri,
    plan_stack,
    s3_keys,
)
from trainbus.embedded.process import end_with_parent


def start_stack(
    data_dir: Path | None,
    *,
    nodes: int,
    slots: int,
    without: tuple[str, ...],
    detach: bool,
    policy: str | None = None,
    autoscale: tuple[str, ...] = (),
    idle_s: float | None = None,
) -> None:
    """Start the stack and stay in the foreground until Ctrl-C; print what runs where."""
    from trainbus.commands import render

    folder = find_data_dir(data_dir)
    if is_locked(folder):
        raise TrainbusError(describe_lock(folder))
    folder.mkdir(parents=True, exist_ok=True)
    started_at = time.monotonic()
    output = folder / "supervisor.log" if detach else None
    options = StackOptions(folder, nodes, slots, without, policy, autoscale, idle_s)
    try:
        plan_stack(options, os.environ)
    except UnknownUnitError as error:
        raise UsageError(f"--without: {error}") from error
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


def _stop_on_signals(stack: StackProcess) -> list[int]:
    """Stop the stack in order at the first signal, at once at the second; return the signals received so far."""
    seen: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) == 1:
            print("\nstopping (workers complete their checkpoints; once more to hurry)", flush=True)
        stack.stop_at_once()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    return seen


def _process_table(info: StackInfo) -> object:
    from trainbus.commands import render

    table = render.table("process", "pid", "where", "log", right=("pid",))
    where = {"nats": info.nats_url, "s3": info.s3_endpoint, "gateway": info.gateway_url}
    for each in info.processes:
        address = where.get(each["name"]) or each["url"] or ""
        table.add_row(each["name"], str(each["pid"]), address, os.path.relpath(each["log"]))
    return table


def join_stack(name: str, data_dir: Path | None) -> None:
    """Give this process the environment of the unit that runs ``name`` and was left out of the embedded stack.

    Does nothing where TRAINBUS_NATS_URL is set, or where no embedded stack runs.
    """
    if data_dir is None and "TRAINBUS_NATS_URL" in os.environ:
        return
    folder = find_data_dir(data_dir)
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


def stop_running_stack(data_dir: Path | None) -> None:
    """Stop the stack that runs on a data folder."""
    folder = find_data_dir(data_dir)
    try:
        if not stop_stack(folder):
            raise UsageError(f"no stack runs on {folder}")
    except StackError as error:
        raise TrainbusError(str(error)) from error
    print(f"stopped; the data stays in {folder}")


def serve_mlflow(data_dir: Path | None, port: int) -> int:
    """Serve MLflow's pages on the stack's store until Ctrl-C, also while the stack is down."""
    folder = find_data_dir(data_dir)
    stack = read_stack(folder)
    if not (folder / "mlflow" / "mlflow.db").exists():
        raise TrainbusError(f"nothing has been tracked in {folder} yet: train something first (`trainbus demo`)")
    if stack is not None:
        print(f"the gateway's page: {stack.gateway_url}/")
    print(f"MLflow's page:      http://127.0.0.1:{port}/   (Ctrl-C stops it)", flush=True)
    access_key, secret_key = s3_keys(folder)
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
    if stack is not None:
        environment["MLFLOW_S3_ENDPOINT_URL"] = stack.s3_endpoint
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", mlflow_uri(folder)]
    command += ["--default-artifact-root", (folder.resolve() / "mlflow" / "artifacts").as_uri()]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    # MLflow's server has child processes: they end with this one, however it ends.
    server = subprocess.Popen(command, env=environment, preexec_fn=end_with_parent(signal.SIGTERM))

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.terminate()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    code = server.wait()
    return 0 if code in (0, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM) else code
