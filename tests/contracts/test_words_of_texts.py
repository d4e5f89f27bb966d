"""The words of what people read: every string of the program is searched for words that misled readers before."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("contracts", "services", "trainbus") for path in sorted((ROOT / folder).rglob("*.py"))]
#: Pattern -> what to write instead. ``{}`` stands for a value.
MISLEADING = {
    r"\blet(s|ting)? go of\b": "release",
    r"\bis to be (cancelled|stopped)\b": "cancellation requested",
    r"\bfrom step \{\}, out of memory\b": "with the state that was kept in memory",
    r"\bon 1 slots\b|\b1 (slots|nodes|runs)\b": "plural()",
    r"(?<!\w)\{\} (slots|nodes|runs|ranks|steps|samples|records) (is|was|has)\b": "plural()",
    r"\bon node \{\}": "on {}: a node's name says that it is one",
    r"\bwhoever\b|\bwhatever\b": "the reader's own word",
    r"function-after|function-before|\bpydantic\b|\bBaseModel\b": "the field's name in the request",
}


def read_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the strings of more than a word with their lines, values as ``{}``; docstrings are for programmers."""
    tree = ast.parse(source)
    left_out = {id(docstring) for node in ast.walk(tree) if (docstring := _find_docstring(node)) is not None}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
            left_out |= {id(part) for part in node.values}
            yield node.lineno, "".join(parts)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and id(node) not in left_out
        ):
            yield node.lineno, node.value


def _find_docstring(node: ast.AST) -> ast.expr | None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    first = node.body[0] if node.body else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first.value if isinstance(first, ast.Expr) and is_text else None


def find_misleading(source: str) -> list[tuple[int, str]]:
    """Return the strings that have misleading words, with what to write instead."""
    found = []
    for line, text in read_texts(source):
        found += [(line, f"{text!r}: {better}") for words, better in MISLEADING.items() if re.search(words, text)]
    return found


def test_no_text_misleads() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in SOURCES
        for line, text in find_misleading(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        'text = f"placed on 1 slots"',
        'text = f"ranks on node {node} failed"',
        'text = f"let go of {node} (not all committed)"',
        'text = "data.function-after[_check(), Source].format"',
    ],
)
def test_the_search_can_fail(source: str) -> None:
    assert len(find_misleading(source)) == 1


def test_docstrings_are_left_out() -> None:
    assert find_misleading('"""A pydantic model."""\ndef f():\n    "Check BaseModel."\n    return 1\n') == []


def test_all_texts_are_in_one_file_for_a_reader() -> None:
    from tests.contracts.all_texts import COMMITTED, render

    assert render() == COMMITTED.read_text(), "run `python -m tests.contracts.all_texts`, and read what has changed"
