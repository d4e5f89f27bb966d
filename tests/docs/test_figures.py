"""Each figure that README and docs quote from the load tests stands in a file of loadtest/results."""

from __future__ import annotations

import re

import pytest

from tests.docs.figures import NUMBER, QUOTES, README, ROOT, SETTINGS, Quote, Source, is_rounded


def results_of_readme() -> tuple[int, int]:
    """Return where the section with the results begins and ends."""
    text = (ROOT / README).read_text()
    start = text.index("\n## Results\n")
    return start, text.index("\n## ", start + 1)


def wrong_figures(quote: Quote) -> list[str]:
    """Return the figures of a quote that are not what their files say."""
    figures = quote.find().groups()
    assert len(figures) == len(quote.sources), quote.text
    return [
        f"{figure} is not {source.file} {source.key}: {source.candidates()}"
        for figure, source in zip(figures, quote.sources, strict=True)
        if not any(is_rounded(figure, value) for value in source.candidates())
    ]


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: f"{quote.document}: {quote.text[:40]}")
def test_a_quoted_figure_is_on_file(quote: Quote) -> None:
    assert wrong_figures(quote) == []


def test_every_figure_among_the_results_of_readme_is_checked() -> None:
    text = (ROOT / README).read_text()
    start, end = results_of_readme()
    found = [quote.find() for quote in QUOTES if quote.document == README]
    spans = [match.span(group) for match in found for group in range(1, len(match.groups()) + 1)]
    spans += [match.span() for words in SETTINGS for match in re.finditer(re.escape(words), text)]
    unchecked = [
        text[max(start, number.start() - 40) : number.end() + 10]
        for number in re.finditer(rf"(?<![\w-]){NUMBER}", text)
        if start <= number.start() < end and not any(a <= number.start() and number.end() <= b for a, b in spans)
    ]
    assert unchecked == [], "add them to QUOTES of tests/docs/figures.py, or to SETTINGS if they are no results"


def test_the_check_can_fail() -> None:
    sources = (Source("wait.json", "waits/stack_ready/ray_s"), Source("wait.json", "waits/stack_ready/median_s"))
    assert len(wrong_figures(Quote(README, "the whole stack, ready | {} s | {} s", sources))) == 2


def test_a_figure_is_rounded_to_its_own_digits() -> None:
    assert is_rounded("1,343", 1342.53)
    assert is_rounded("0.31", 0.3132)
    assert not is_rounded("0.32", 0.3132)
    assert not is_rounded("953", 952.4)
