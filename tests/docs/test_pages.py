"""The pages for the first day work as they stand there: each block is copied into a shell, against one fresh stack."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainbus
from contracts import ranks
from contracts.ranks import JOURNAL_LINE
from services.worker.settings import WorkerSettings
from tests.docs.document import Block, Reader, missing_lines, read_blocks
from trainbus import script
from trainbus.embedded.launch import read_stack

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "docs" / "scripts.md"
#: In this order: one stack serves all of them, and the last commands of the last page stop it.
PAGES = ["scripts.md", "tuning.md", "serving.md", "quickstart.md"]

PAGE = """
```sh
echo one
```
```text
one
```
<!-- not run: it takes a day -->
```sh
exit 1
```
```python
# folder/two.py
print(2)
```
```python
a = "an example"
```
"""


def test_the_blocks_of_a_page() -> None:
    assert list(read_blocks(PAGE)) == [
        Block("commands", "echo one\n", 3),
        Block("output", "one\n", 6),
        Block("file", "# folder/two.py\nprint(2)\n", 13, "folder/two.py"),
    ]


def test_the_check_of_output_can_fail() -> None:
    output = "12:00:01  accepted as 'x':   1 slot\naccuracy 0.93\n"
    assert missing_lines("... accepted as 'x': 1 slot\naccuracy 0.9...\n", output) == []
    assert missing_lines("accuracy 0.8...\naccuracy", output) == ["accuracy 0.8...", "accuracy"]


def test_the_journal_lines_of_the_page_are_valid() -> None:
    [block] = re.findall(r"```json\n(.*?)```", SCRIPTS.read_text(), re.DOTALL)
    lines = [JOURNAL_LINE.validate_json(line) for line in block.splitlines()]
    assert [line.kind for line in lines] == ["metrics", "keep", "artifact"]


def test_the_variables_of_the_page_exist() -> None:
    named = set(re.findall(r"TRAINBUS_[A-Z_]+", SCRIPTS.read_text()))
    settings = {f"TRAINBUS_{name.upper()}" for name in WorkerSettings.model_fields}
    protocol = {value for name, value in vars(ranks).items() if name.endswith("_VARIABLE")}
    assert named - (settings - protocol) == protocol - {
        ranks.LAUNCH_VARIABLE,
        ranks.PACKAGES_DIR_VARIABLE,
        ranks.MEMORY_FRACTION_VARIABLE,
    }


def test_the_calls_of_the_page_exist() -> None:
    named = set(re.findall(r"`trainbus\.([a-z_]+)\(", SCRIPTS.read_text()))
    assert named == {name for name in trainbus.__all__ if hasattr(script, name)}


@pytest.mark.shell
def test_a_failed_command_is_named(tmp_path: Path) -> None:
    reader = Reader(tmp_path, tmp_path)
    with pytest.raises(AssertionError, match="exit code 3 of"):
        reader.follow(Block("commands", "(exit 3)\necho not reached\n", 1))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader with a clone of the repository, of which the pages need the examples, and a stack that runs."""
    folder = tmp_path_factory.mktemp("first-day")
    shutil.copytree(ROOT / "examples", folder / "examples")
    reader = Reader(folder, Path(sys.executable).parent)
    reader.run("trainbus up -d")
    yield reader
    if read_stack(folder / ".trainbus") is not None:  # the last page has not come to its end
        reader.run("trainbus down")


@pytest.mark.shell
@pytest.mark.parametrize("page", PAGES)
def test_a_page_works_as_it_stands_there(reader: Reader, page: str) -> None:
    for block in read_blocks((ROOT / "docs" / page).read_text()):
        reader.follow(block)
