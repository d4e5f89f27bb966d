"""Write every sentence about an event and every text of an error into one file.

``python -m tests.contracts.all_texts`` writes it. A reviewer reads the file, or what changed in it, in one sitting:
texts that lie far apart in the code tell one story.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from contracts import texts
from contracts.earlier_events import EARLIER_EVENTS, read_data
from contracts.events import FACTS
from tests.contracts.test_words_of_texts import ROOT, SOURCES

COMMITTED = Path(__file__).with_name("all_texts.txt")
EXAMPLES = ROOT / "contracts" / "examples" / "valid"
HEAD = """Every sentence about an event, by its examples, and every text with which an error is raised; {} is a value.
Written by `python -m tests.contracts.all_texts`; read what has changed.
"""


def render() -> str:
    """Return the file."""
    blocks = [HEAD, "\n".join(["# events", *read_sentences()])]
    for path in SOURCES:
        if found := list(read_errors(path.read_text())):
            blocks.append("\n".join([f"# {path.relative_to(ROOT)}", *found]))
    return "\n\n".join(block.strip("\n") for block in blocks) + "\n"


def read_sentences() -> Iterator[str]:
    """Yield the sentence of each example of a fact, after the fact's type."""
    types = {fact.type for fact in FACTS} | {name for name in EARLIER_EVENTS if ".requested." not in name}
    for path in sorted(EXAMPLES.glob("*/*.json")):
        if (name := path.parent.name) in types:
            yield f"{name.removeprefix('trainbus.')}: {texts.describe(read_data(name, json.loads(path.read_text())))}"


def read_errors(source: str) -> Iterator[str]:
    """Yield each text of an exception that the source raises, after the exception's name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func)
            for argument in (*node.exc.args, *(keyword.value for keyword in node.exc.keywords)):
                if len(text := render_text(argument).split()) > 1:
                    yield f"{name}: {' '.join(text)}"


def render_text(node: ast.expr) -> str:
    """Return the text that an expression makes, ``{}`` for what is computed; '' if it makes none."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(render_text(value) for value in values)
        case ast.FormattedValue():
            return "{}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            sides = render_text(left), render_text(right)
            return "".join(side or "{}" for side in sides) if any(sides) else ""
        case _:
            return ""


if __name__ == "__main__":
    COMMITTED.write_text(render())
