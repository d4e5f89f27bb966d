"""Ports that are found are free, and are given to one process only."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("text", [b"", b"[]", b'{"a": 1}', b'{"31000": null}', b'{"31000"', b"\xff"])
def test_a_broken_list_claims_nothing(text: bytes) -> None:
    assert ports._read_claims(text) == {}


def test_a_machine_without_a_place_for_the_list_has_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert len(free_ports(2)) == 2


@pytest.mark.shell
@pytest.mark.parametrize("folder", ["", "import tempfile; tempfile.gettempdir()"], ids=["no folder", "no list"])
def test_a_full_disk_stops_no_start(folder: str, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"  # no file can be written
    script = f"{folder}; {limit}; from services.kit.ports import free_ports; print(*free_ports(2))".lstrip("; ")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={"TMPDIR": str(tmp_path)})
    assert len(done.stdout.split()) == 2, done.stderr


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "another user's"])
def test_a_list_of_somebody_else_is_left_alone(kind: str, own_claims: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = own_claims / f"trainbus-ports-{os.getuid()}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(own_claims / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("of another user")
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert len(free_ports(2)) == 2
    assert not (own_claims / "elsewhere").exists()
    assert kind != "another user's" or path.read_text() == "of another user"


def test_what_a_stack_has_already_is_claimed_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "PORT_RANGE", (31_000, 31_004))
    monkeypatch.setattr(ports, "port_is_free", lambda *_: True)
    assert set(free_ports(2, besides=[31_000])) <= {31_001, 31_002, 31_003}
    assert len(free_ports(1)) == 1
    with pytest.raises(PortsError):
        free_ports(1)


def test_a_port_in_use_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not port_is_free(server.getsockname()[1])


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        free_ports(1, "192.0.2.1")
