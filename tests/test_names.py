"""Names follow the rules of docs/design.md: classes are nouns, functions verb and object, modules what they hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for package in ("contracts", "services", "trainbus") for path in (ROOT / package).rglob("*.py"))
#: Words that end like a participle or a gerund and are the field's nouns.
NOUNS = {
    *(
        "deepspeed",
        "embedded",
        "embedding",
        "evaluation",
        "feed",
        "lightning",
        "ring",
        "scheduling",
        "seed",
        "setting",
    ),
    *("sharding", "speed", "staging", "string", "tracking", "training"),
}
ADVERBS = {
    *(
        "again",
        "ahead",
        "alone",
        "anew",
        "apart",
        "aside",
        "away",
        "beside",
        "freely",
        "once",
        "singly",
        "soon",
        "then",
    ),
    *("together", "when"),
}
VAGUE_VERBS = {
    *("begin", "bring", "do", "give", "go", "happen", "hear", "heed", "hold", "keep", "leave", "let", "look", "make"),
    *("mind", "say", "see", "saw", "take", "tell", "told", "want"),
}


def is_participle(word: str) -> bool:
    """Whether a word is an adverb, or ends like a participle or a gerund without being a noun of the field."""
    return word in ADVERBS or (word not in NOUNS and re.fullmatch(r"[a-z]{3,}(ed|ing)", word) is not None)


def is_one_word(name: str) -> bool:
    """Whether a class's name has one capital letter: ``Kept``, not ``DatasetSharded``, which is an event."""
    return re.fullmatch(r"_?[A-Z][a-z]+", name) is not None


def definitions(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, str]]:
    """Yield the place and the name of every definition."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kind):
                assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.name


def test_no_module_is_named_by_a_gerund_or_an_adverb() -> None:
    found = [str(path.relative_to(ROOT)) for path in SOURCES if is_participle(path.stem.strip("_"))]
    assert not found, "\n".join(found)


def test_no_class_is_named_by_a_bare_participle_or_adverb() -> None:
    found = [
        f"{place} {name}"
        for place, name in definitions(ast.ClassDef)
        if is_one_word(name) and is_participle(name.strip("_").lower())
    ]
    assert not found, "\n".join(found)


def test_no_function_is_named_by_a_lone_vague_verb_or_adverb() -> None:
    functions = definitions((ast.FunctionDef, ast.AsyncFunctionDef))
    found = [f"{place} {name}" for place, name in functions if name.strip("_") in VAGUE_VERBS | ADVERBS]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", ["placed", "waiting", "beside", "singly"])
def test_the_check_can_fail(word: str) -> None:
    assert is_participle(word)
