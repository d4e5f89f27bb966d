"""What ``trainbus ui`` does besides running MLflow's server."""

from __future__ import annotations

import socket
import sys
import webbrowser
from pathlib import Path

import pytest

from services.gateway.settings import GatewaySettings
from trainbus.commands import stack


def test_the_gateway_reads_the_address_of_mlflow_while_it_is_served(tmp_path: Path) -> None:
    file = GatewaySettings(data_dir=tmp_path / "gateway").mlflow_url_file
    with stack.publish_mlflow_url(tmp_path, "http://127.0.0.1:5000"):
        assert file.read_text() == "http://127.0.0.1:5000"
    assert not file.exists()


def test_a_busy_usual_port_is_left_to_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        busy = owner.getsockname()[1]
        monkeypatch.setattr(stack, "MLFLOW_PORT", busy)
        assert stack.choose_port(None) != busy
        assert stack.choose_port(busy) == busy


@pytest.mark.parametrize(("display", "is_terminal", "opened"), [(":0", True, 1), (None, True, 0), (":0", False, 0)])
def test_a_browser_opens_only_on_a_desktop(
    monkeypatch: pytest.MonkeyPatch, display: str | None, is_terminal: bool, opened: int
) -> None:
    pages: list[str] = []
    monkeypatch.setattr(webbrowser, "open", pages.append)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", display)
    stack.open_browser("http://127.0.0.1:8080/")
    assert len(pages) == opened
