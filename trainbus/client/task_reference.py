"""All that a Task may define, read from the source of ``trainbus.task``: torch is not imported, nor needed."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = "Example::"
TASK_SOURCE = Path(__file__).parents[1] / "task.py"
#: Characters of a line of a page.
PAGE_WIDTH = 150


@dataclass(frozen=True, slots=True)
class TaskMember:
    """A method or attribute of ``Task``. Its texts are Markdown."""

    name: str
    #: As it is written in the class: ``model(self) -> nn.Module``, ``classes: tuple[str, ...] = ()``.
    signature: str
    #: The first sentence of its docstring, or comment.
    summary: str
    #: What follows.
    details: str
    #: Code of the body of a subclass.
    example: str


def read_task_members() -> list[TaskMember]:
    """Return the public methods and attributes of ``Task`` in the order of its source."""
    source = TASK_SOURCE.read_text("utf-8")
    [task] = [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef) and each.name == "Task"]
    return [each for each in _read_members(task, source.splitlines()) if not each.name.startswith("_")]


def _read_members(task: ast.ClassDef, lines: Sequence[str]) -> Iterator[TaskMember]:
    for node in task.body:
        if isinstance(node, ast.FunctionDef):
            returned = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
            signature = f"{node.name}({ast.unparse(node.args)}){returned}"
            yield _make_member(node.name, signature, ast.get_docstring(node) or "")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield _make_member(node.target.id, ast.unparse(node), _read_comment(lines, node.lineno - 1))


def _read_comment(lines: Sequence[str], end: int) -> str:
    """Return the text of the ``#:`` lines that end before a line."""
    start = end
    while lines[start - 1].lstrip().startswith("#:"):
        start -= 1
    return "\n".join(line.strip().removeprefix("#:").removeprefix(" ") for line in lines[start:end])


def _make_member(name: str, signature: str, text: str) -> TaskMember:
    description, _, example = text.partition(EXAMPLE)
    # One line a paragraph, and code as Markdown writes it.
    joined = re.sub(r"(?<!\n)\n(?!\n)", " ", description.strip()).replace("``", "`")
    summary, _, details = re.sub(r"(?<=\.)\s+", "\n", joined, count=1).partition("\n")
    return TaskMember(name, signature, summary, details.strip(), textwrap.dedent(example).strip())


def write_markdown(members: Sequence[TaskMember]) -> str:
    """Return the reference as Markdown: a table of all, then each with its signature and example."""
    table = [f"| [`{each.name}`](#{each.name}) | {each.summary} |" for each in members]
    return "\n".join(["| name | |", "|---|---|", *table, "", "\n\n".join(map(_write_member, members))])


def _write_member(member: TaskMember) -> str:
    paragraphs = [member.summary, *member.details.split("\n\n")]
    wrapped = [textwrap.fill(each, PAGE_WIDTH, break_on_hyphens=False) for each in paragraphs]
    parts = [f"### {member.name}", f"`{member.signature}`", *filter(None, wrapped), f"```python\n{member.example}\n```"]
    return "\n\n".join(parts)
