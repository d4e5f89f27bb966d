"""What the documents say is so: links lead somewhere, commands exist, and rules are the code's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from contracts.base import run_id_for
from tests import architecture
from trainbus.commands.main import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS += sorted((ROOT / "examples").rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
#: ``trainbus`` and the words after it, where a command is meant: in `code`, or at the start of a shell line.
COMMAND = re.compile(r"(?:`|^\s*(?:\$ )?)(?:\.venv/bin/)?trainbus((?: [a-z][a-z-]*)+)", re.MULTILINE)


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_example() -> str:
    """The Python block of docs/events.md, as it stands."""
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "events.md").read_text(), re.DOTALL)
    return str(block)


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = [one or other for one, other in LINK.findall(document.read_text())]
    local = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    assert [target for target in local if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_commands_exist(document: Path) -> None:
    unknown = [words for words in COMMAND.findall(document.read_text()) if not exists(words.split())]
    assert unknown == []


def exists(words: list[str]) -> bool:
    """Whether the first words are a command; what follows it are arguments."""
    commands = getattr(typer.main.get_command(app), "commands", None)
    for word in words:
        if commands is None:
            return True
        if word not in commands:
            return False
        commands = getattr(commands[word], "commands", None)
    return True


def test_the_check_for_commands_can_fail() -> None:
    assert exists(["checkpoints", "ls", "digits"])
    assert not exists(["checkpoints", "list"])
    assert COMMAND.findall("see `trainbus show RUN`\n$ trainbus fly away\n") == [" show", " fly away"]


@pytest.mark.parametrize(
    ("source", "event_id"), [("my-system", "order-4711"), ("nats", "REQUESTS:1"), ("größe", "ß/ü"), ("", "")]
)
def test_the_rule_for_run_ids_is_the_codes(source: str, event_id: str) -> None:
    definition = python_example().split("async def main", 1)[0].replace("import nats\n", "")
    script = f"{definition}\nimport sys\nprint(run_id(sys.argv[1], sys.argv[2]))"
    done = subprocess.run([sys.executable, "-c", script, source, event_id], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == run_id_for(source, event_id)


def test_the_run_in_the_bash_example_is_the_one_it_publishes() -> None:
    text = (ROOT / "docs" / "events.md").read_text()
    [(source, event_id)] = re.findall(r"-H ce-source:(\S+) -H ce-id:(\S+)", text)
    assert re.findall(r"'run\.(r[a-z2-7]{12})\.\*'", text) == [run_id_for(source, event_id)]


def test_the_picture_of_the_architecture_shows_the_imports() -> None:
    assert architecture.PICTURE.read_text() == architecture.draw(), "run python -m tests.architecture"
