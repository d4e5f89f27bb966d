"""Where a stack is: an embedded one by its data folder, any other by the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainbus.client.errors import StackUnreachableError, UsageError

if TYPE_CHECKING:
    from trainbus.embedded.registry import RegisteredStack


@dataclass(frozen=True, slots=True)
class StackAddress:
    """Where one stack is: the URL of its gateway, which is all that a client needs. The rest is of those around it.

    ``data_dir``: of an embedded stack. ``nats_url`` is for an operator's tools; '' where it is not known.
    """

    gateway_url: str | None = None
    nats_url: str = ""
    nats_user: str | None = None
    nats_password: str | None = None
    serving_url: str | None = None
    mlflow_uri: str | None = None
    data_dir: Path | None = None


def find_data_dir(given: Path | None) -> Path:
    """Return the given data folder, else ``.trainbus`` in this folder or one above it, as git finds ``.git``."""
    if given is not None:
        return given
    from trainbus.embedded.layout import DEFAULT_DATA_DIR

    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / DEFAULT_DATA_DIR / "stack.lock").exists():
            return folder / DEFAULT_DATA_DIR
    return DEFAULT_DATA_DIR


def find_named_data_dir(name: str) -> Path:
    """Return the data folder of the stack of this name that runs on this machine.

    Raises:
        UsageError: no stack of this name runs.
    """
    from trainbus.embedded.registry import list_stacks

    stacks = list_stacks()
    for each in stacks:
        if each.name == name:
            return each.data_dir
    running = f"these run:\n{_describe_stacks(stacks)}" if stacks else "none runs on this machine: `trainbus up`"
    raise UsageError(f"no stack {name!r} runs here; {running}")


def find_running_data_dir(given: Path | None = None) -> Path:
    """Return the data folder that a command means: the given one, that of TRAINBUS_STACK, ``.trainbus`` here or above,
    else that of the only stack that runs on this machine.

    Raises:
        UsageError: TRAINBUS_STACK names no stack that runs, or several run and none is named.
    """
    if given is not None:
        return given
    if name := os.environ.get("TRAINBUS_STACK"):
        return find_named_data_dir(name)
    here = find_data_dir(None)
    if (here / "stack.lock").exists():
        return here
    from trainbus.embedded.registry import list_stacks

    stacks = list_stacks()
    if len(stacks) > 1:
        raise UsageError(f"several stacks run: name one with --stack or TRAINBUS_STACK\n{_describe_stacks(stacks)}")
    return stacks[0].data_dir if stacks else here


def _describe_stacks(stacks: Sequence[RegisteredStack]) -> str:
    width = max(len(each.name) for each in stacks)
    return "\n".join(f"  {each.name:{width}}  {each.data_dir}" for each in stacks)


def is_in_environment(given: Path | None) -> bool:
    """Whether the environment names the stack, most often a cluster's."""
    return given is None and not {"TRAINBUS_GATEWAY_URL", "TRAINBUS_NATS_URL"}.isdisjoint(os.environ)


def find_address(given: Path | None = None) -> StackAddress:
    """Return the stack of the given data folder, else of TRAINBUS_GATEWAY_URL, else the embedded one that runs here.

    Raises:
        StackUnreachableError: no stack runs there.
        UsageError: several stacks run and none is named.
    """
    if is_in_environment(given):
        return _from_environment()
    from trainbus.embedded.launch import read_stack
    from trainbus.embedded.layout import mlflow_uri

    data_dir = find_running_data_dir(given)
    stack = read_stack(data_dir)
    if stack is None:
        raise StackUnreachableError(_describe_absence(data_dir, given))
    return StackAddress(
        nats_url=stack.nats_url,
        gateway_url=stack.gateway_url,
        serving_url=stack.serving_url or None,
        mlflow_uri=mlflow_uri(data_dir),
        data_dir=data_dir.resolve(),
    )


def locate_stack(stack: Path | str | None) -> StackAddress:
    """Return the address of what a caller names: a gateway's URL, a data folder, or nothing, as ``find_address`` does.

    Raises as ``find_address`` does.
    """
    if isinstance(stack, str) and stack.startswith(("http://", "https://")):
        return StackAddress(gateway_url=stack)
    return find_address(None if stack is None else Path(stack))


def _describe_absence(data_dir: Path, given: Path | None) -> str:
    """Return the message about a data folder on which no stack runs: how to start one, and which others run."""
    from trainbus.embedded.registry import list_stacks

    option = f" --data-dir {given}" if given else ""
    others = list_stacks()
    more = f"; others run, name one with --stack:\n{_describe_stacks(others)}" if others else ""
    return f"no stack runs on {data_dir}: start one with `trainbus up{option}`, or set TRAINBUS_GATEWAY_URL{more}"


def _from_environment() -> StackAddress:
    def variable(name: str) -> str | None:
        return os.environ.get(f"TRAINBUS_{name}") or None

    return StackAddress(
        nats_url=variable("NATS_URL") or "",
        nats_user=variable("NATS_USER"),
        nats_password=variable("NATS_PASSWORD"),
        gateway_url=variable("GATEWAY_URL"),
        serving_url=variable("SERVING_URL"),
        mlflow_uri=variable("MLFLOW_TRACKING_URI"),
    )
