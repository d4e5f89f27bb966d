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
        "nothing",
        "ring",
        "scheduling",
        "seed",
        "setting",
        "unlimited",
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
#: Words that ask and do not name.
INTERROGATIVES = {"how", "what", "where", "which", "who", "whose", "why"}
#: Participles that no ending shows.
IRREGULAR = {"built", "gone", "held", "kept", "lost", "made", "read", "said", "seen", "sent", "shown", "told", "turns"}
#: Units that a number's name ends with.
UNITS = {"s", "ms"}
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


def names_nothing(name: str) -> bool:
    """Whether the name of a number, or of a test module, is one word that says nothing of what it is."""
    words = [word for word in name.strip("_").lower().split("_") if word not in UNITS]
    return len(words) == 1 and (is_participle(words[0]) or words[0] in VAGUE_VERBS | INTERROGATIVES | IRREGULAR)


def numbers() -> Iterator[tuple[str, str]]:
    """Yield the place and the name of every constant of a module that is a number."""
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                pairs = (
                    zip(target.elts, node.value.elts, strict=False)
                    if _are_tuples(target, node.value)
                    else [(target, node.value)]
                )
                for name, value in pairs:
                    if isinstance(name, ast.Name) and name.id.isupper() and _is_number(value):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", name.id


def _are_tuples(target: ast.expr, value: ast.expr) -> bool:
    return isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)


def _is_number(value: ast.expr) -> bool:
    return all(
        isinstance(each.value, int | float)
        if isinstance(each, ast.Constant)
        else not isinstance(each, ast.Name | ast.Call)
        for each in ast.walk(value)
        if isinstance(each, ast.expr)
    ) and isinstance(value, ast.Constant | ast.BinOp | ast.UnaryOp)


def test_no_number_is_named_by_a_lone_participle_or_verb() -> None:
    found = [f"{place} {name}" for place, name in numbers() if names_nothing(name)]
    assert not found, "\n".join(found)


def test_no_test_module_is_named_by_a_lone_participle_or_question() -> None:
    modules = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [str(path.relative_to(ROOT)) for path in modules if names_nothing(path.stem.removeprefix("test_"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["NAMED", "KEPT", "LOOK_S", "LOSING_S", "where", "judged", "_SHOWN"])
def test_the_check_of_numbers_and_test_modules_can_fail(name: str) -> None:
    assert names_nothing(name)


@pytest.mark.parametrize("name", ["MAX_NAMES", "READ_BYTES", "RETRY_S", "ledger", "trainer", "KEPT_SNAPSHOTS"])
def test_the_check_of_numbers_and_test_modules_lets_names_pass(name: str) -> None:
    assert not names_nothing(name)


@pytest.mark.parametrize("word", ["placed", "waiting", "beside", "singly"])
def test_the_check_can_fail(word: str) -> None:
    assert is_participle(word)
