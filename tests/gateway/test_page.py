"""The page without a browser: what would break it, or open it to what a run writes, is not in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from contracts.run_states import HOLDING_STATES, STATES, TERMINAL_STATES
from services.gateway.page import CONTENT_SECURITY_POLICY, PAGE

SCRIPT = "".join(re.findall(r"<script>(.*?)</script>", PAGE, re.DOTALL))


def read_list(name: str) -> list[str]:
    """Return the strings of a constant list in the page's script."""
    found = re.search(rf"const {name} = \[(.*?)\];", SCRIPT)
    assert found is not None, name
    return re.findall(r'"([a-z_]+)"', found[1])


def test_every_state_of_a_run_is_listed_once() -> None:
    assert set(read_list("ENDED")) == TERMINAL_STATES
    assert sorted(read_list("ACTIVE") + read_list("ENDED")) == sorted(STATES)
    assert set(read_list("HOLDING")) == HOLDING_STATES


def test_every_state_has_a_colour() -> None:
    style = "".join(re.findall(r"<style>(.*?)</style>", PAGE, re.DOTALL))
    assert [state for state in STATES if not re.search(rf"\.{state}\b", style)] == []


@pytest.mark.parametrize(
    "forbidden",
    [r"innerHTML", r"outerHTML", r"insertAdjacentHTML", r"document\.write", r"\beval\(", r"new Function", r"\bstyle="],
)
def test_nothing_of_a_run_becomes_markup(forbidden: str) -> None:
    assert re.search(forbidden, PAGE) is None


def test_nothing_comes_from_elsewhere() -> None:
    addresses = set(re.findall(r"https?://[^\s'\"`)]+", PAGE)) - {"http://www.w3.org/2000/svg"}
    assert addresses == set()
    assert re.search(r"<(script|link|img|iframe)[^>]* src=", PAGE) is None
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in CONTENT_SECURITY_POLICY


def test_the_script_finds_its_elements() -> None:
    used = set(re.findall(r'\$\("([a-z-]+)"\)', SCRIPT))
    present = set(re.findall(r'\bid="([a-z-]+)"', PAGE)) | set(re.findall(r'\bid: "([a-z-]+)"', SCRIPT))
    assert used - present == set()


def test_connecting_is_not_an_empty_list() -> None:
    body = PAGE[PAGE.index("<body>") : PAGE.index("<script>")]
    assert "Connecting to the gateway" in body
    assert "No runs yet" not in body


@pytest.mark.needs("node")
def test_the_script_is_valid(tmp_path: Path) -> None:
    node = shutil.which("node")
    assert node is not None, "node is not installed: apt-get install nodejs"
    file = tmp_path / "page.js"
    file.write_text(SCRIPT)
    checked = subprocess.run([node, "--check", str(file)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
