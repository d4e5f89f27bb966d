"""The compose file names settings that exist, no rights that are not needed, and time to end in order."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from contracts.events.train import TrainRequested
from services.kit.ports import PORT_RANGE
from services.kit.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == "trainbus"}
WITH_SETTINGS = {name: service for name, service in OURS.items() if (service.get("command") or [""])[0] == "service"}
SECRET = re.compile(r"PASSWORD|SECRET")


def settings_of(service: str) -> set[str]:
    """The environment variables that a service of that name reads."""
    fields = set(Settings.model_fields)
    try:
        module = importlib.import_module(f"services.{service}.settings")
    except ModuleNotFoundError:
        return {f"TRAINBUS_{field.upper()}" for field in fields}
    for _, found in inspect.getmembers(module, inspect.isclass):
        if issubclass(found, Settings):
            fields |= set(found.model_fields)
    return {f"TRAINBUS_{field.upper()}" for field in fields}


def seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([sm])", duration).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "m": 60}[unit]


@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_each_setting_exists(name: str) -> None:
    given = {variable for variable in WITH_SETTINGS[name]["environment"] if variable.startswith("TRAINBUS_")}
    assert given <= settings_of(WITH_SETTINGS[name]["command"][1])


@pytest.mark.parametrize("name", OURS)
def test_no_service_has_rights_to_spare(name: str) -> None:
    service = OURS[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


def test_the_image_is_not_roots() -> None:
    users = re.findall(r"^USER (\S+)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    # Kubernetes' runAsNonRoot cannot tell by a name.
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])


def test_nothing_gets_into_the_image_unnamed() -> None:
    assert (ROOT / ".dockerignore").read_text().splitlines()[0] == "*"


def test_every_secret_can_be_set_from_outside() -> None:
    for name, service in SERVICES.items():
        for variable, value in (service.get("environment") or {}).items():
            if SECRET.search(variable):
                assert re.fullmatch(r"\$\{[A-Z0-9_]+:-[^}]*\}", value), f"{name}: {variable}"


def test_a_worker_may_take_as_long_as_a_run_may_ask_for() -> None:
    usual_s = TrainRequested(name="x", command=("x",)).grace_s
    for name in ("worker-1", "worker-2"):
        assert seconds(SERVICES[name]["stop_grace_period"]) >= 2 * usual_s


def test_no_process_beside_the_agent_shows_its_keys_to_the_code_of_runs() -> None:
    for name in ("worker-1", "worker-2"):
        assert SERVICES[name]["init"] is False
        assert SERVICES[name]["healthcheck"] == {"disable": True}


def test_logs_do_not_fill_the_disk() -> None:
    for name, service in SERVICES.items():
        assert {"max-size", "max-file"} <= set(service["logging"]["options"]), name


def test_what_is_mounted_exists() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes") or ():
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], name


def test_the_table_of_ports_is_that_of_the_compose_file() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    table = {int(port): whose for port, whose in re.findall(r"^\| (\d+) \| ([^|]+?) \|", text, re.MULTILINE)}
    published = {int(port.rsplit(":", 1)[1]): name for name, each in SERVICES.items() for port in each.get("ports", ())}
    assert published.items() <= table.items()
    named = {
        int(port)
        for port in re.findall(r"(?:_PORT: \"|http://\w+:|nats://\w+:)(\d{4})", (ROOT / "compose.yaml").read_text())
    }
    assert named <= table.keys()
    assert f"| {PORT_RANGE[0]} to {PORT_RANGE[1] - 1} |" in text
