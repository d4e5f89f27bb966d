"""Ports that are found are free, and are given to one process only."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from services.kit import ports
from services.kit.ports import PortsError, free_ports, port_is_free


@pytest.fixture(autouse=True)
def own_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the list; the range is small, so that what is not kept apart meets."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ports, "PORT_RANGE", (31_000, 31_200))
    return tmp_path


def test_a_port_is_given_away_once() -> None:
    found = [port for _ in range(10) for port in free_ports(3)]
    assert len(set(found)) == 30
    assert all(port_is_free(port) for port in found)


def test_a_seed_gives_nobody_the_same_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    random.seed(7)
    first = free_ports(8)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))  # another machine's list
    random.seed(7)
    assert free_ports(8) != first


@pytest.mark.shell
def test_two_processes_get_different_ports(tmp_path: Path) -> None:
    script = "from services.kit import ports; ports.PORT_RANGE = (31_000, 31_200); print(*ports.free_ports(20))"
    command = [sys.executable, "-c", script]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"TMPDIR": str(tmp_path)}) for _ in range(4)
    ]
    found = [port for process in running for port in process.communicate()[0].split()]
    assert len(set(found)) == 80


def test_a_claim_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "PORT_RANGE", (31_000, 31_001))
    monkeypatch.setattr(ports, "port_is_free", lambda *_: True)
    assert free_ports(1) == [31_000]
    with pytest.raises(PortsError, match="no 1 free ports between 31000 and 31001"):
        free_ports(1)
    later = time.monotonic() + ports.CLAIM_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert free_ports(1) == [31_000]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"31000": null}', '{"31000"'])
def test_a_broken_list_claims_nothing(text: str) -> None:
    assert ports._read_claims(text) == {}


def test_a_machine_without_a_place_for_the_list_has_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert len(free_ports(2)) == 2


def test_a_port_in_use_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not port_is_free(server.getsockname()[1])


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        free_ports(1, "192.0.2.1")
