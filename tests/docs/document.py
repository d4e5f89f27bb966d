"""A page of the docs as a reader follows it: files to write, commands to run, output to expect."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FENCE = re.compile(r"(?:<!-- not run: (?P<reason>.+?) -->\n)?^```(?P<language>\w*)\n(?P<content>.*?)^```$", re.M | re.S)
#: A block whose first line is a comment with a path is that file.
TITLE = re.compile(r"# (?P<path>[\w./-]+\.\w+)\n")
#: What differs from run to run: any text, and spaces.
ELLIPSIS = re.escape("...")
COMMAND_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code, and its first line in the page."""

    kind: Literal["file", "commands", "output"]
    content: str
    line: int
    path: str = ""


def read_blocks(text: str) -> Iterator[Block]:
    """Yield the blocks that a reader follows, in order.

    ``sh`` blocks are commands, ``text`` blocks the output of the commands before. A block in another language is a file
    if its first line is a comment with the path. ``<!-- not run: reason -->`` above a block leaves it out.
    """
    for found in FENCE.finditer(text):
        if found["reason"]:
            continue
        line = text.count("\n", 0, found.start("content")) + 1
        title = TITLE.match(found["content"])
        if found["language"] == "sh":
            yield Block("commands", found["content"], line)
        elif found["language"] == "text":
            yield Block("output", found["content"], line)
        elif title:
            yield Block("file", found["content"], line, title["path"])


def missing_lines(expected: str, output: str) -> list[str]:
    """Return the expected lines that the output lacks. ``...`` stands for any text, a space for any number of them."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    patterns = {line: _pattern(line) for line in expected.splitlines() if line.strip()}
    return [line for line, pattern in patterns.items() if not any(pattern.fullmatch(each) for each in lines)]


def _pattern(line: str) -> re.Pattern[str]:
    return re.compile(re.escape(" ".join(line.split())).replace(ELLIPSIS, ".*"))


@dataclass
class Reader:
    """Somebody who follows a page in a folder, in a shell."""

    folder: Path
    bin_folder: Path
    output: str = ""

    def follow(self, block: Block) -> None:
        """Write the file, run the commands line by line, or compare the output.

        Raises:
            AssertionError: a command failed, or its output is not the expected one.
        """
        if block.kind == "file":
            path = self.folder / block.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.content)
        elif block.kind == "commands":
            self.output = self.run(block.content)
        else:
            missing = missing_lines(block.content, self.output)
            assert not missing, f"line {block.line}: the output lacks {missing}; it is\n{self.output}"

    def run(self, commands: str) -> str:
        """Run commands in a shell that ends at the first one that fails; return what they print."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TRAINBUS_")}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=self.folder,
            env={**kept, "PATH": f"{self.bin_folder}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        assert done.returncode == 0, f"exit code {done.returncode} of\n{commands}\n{done.stdout}"
        return done.stdout
