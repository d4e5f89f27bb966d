"""The report as one HTML page that needs nothing else: no script, no address outside of it. Pure.

Every text from outside is escaped, and the page's own policy forbids scripts and requests all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

from services.evaluation.core.comparison import Calibration, Confusion, PredictionComparison, Regression, SliceResult
from services.evaluation.core.report import (
    MISSING,
    OUTCOMES,
    Comparison,
    SampleContent,
    facts,
    footprint_table,
    format_number,
    metric_table,
    title,
)

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
MARKS = {True: "✓", False: "✗", None: "…"}
#: Width of a row's interval, in pixels.
WIDTH = 220
#: Slices of one column that the page shows.
MAX_ROWS = 20


def render_page(comparison: Comparison) -> str:
    """Return the whole page."""
    found = comparison.predictions
    parts = [
        _head(comparison),
        _section("Gates", _gates(comparison)),
        _section("Metrics", _metrics(comparison)),
        _section("Slices", _slices(found, comparison)) if found and found.slices else "",
        _section("Confusion", _confusions(found)) if found and found.candidate.confusion else "",
        _section("Calibration", _calibrations(found)) if found and found.candidate.calibration else "",
        _section("Worst regressions", _regressions(found, comparison.samples)) if found and found.regressions else "",
        _section("What it takes", _footprint(comparison)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title(comparison))}</title><style>{STYLE}</style></head><body><main>"
        f"{''.join(parts)}</main></body></html>\n"
    )


def _section(name: str, content: str) -> str:
    return f"<section><h2>{escape(name)}</h2>{content}</section>" if content else ""


def _head(comparison: Comparison) -> str:
    tone = "good" if comparison.verdict.promote else "wait" if comparison.verdict.awaits else "bad"
    pairs = [each for each in facts(comparison) if each[0] not in ("Verdict", "Reason")]
    listed = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in pairs)
    return (
        f'<header><h1>{escape(comparison.name)} <span class="pill {tone}">{escape(comparison.headline)}</span></h1>'
        f'<p class="reason">{escape(comparison.verdict.reason)}</p><dl>{listed}</dl></header>'
    )


def _gates(comparison: Comparison) -> str:
    rows = "".join(
        f'<tr class="{OUTCOMES[gate.passed]}"><td class="mark">{MARKS[gate.passed]}</td><td>{escape(gate.name)}</td>'
        f"<td>{escape(gate.words)}</td></tr>"
        for gate in comparison.verdict.gates
    )
    return f'<table class="gates"><tbody>{rows}</tbody></table>' if rows else ""


def _metrics(comparison: Comparison) -> str:
    header, rows = metric_table(comparison)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = ""
    for row in rows:
        decides = ' class="decides"' if row[0] == comparison.gate_metric else ""
        body += f"<tr{decides}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    table = f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return table + _paired(comparison)


def _paired(comparison: Comparison) -> str:
    """Return the paired difference in words and as an interval."""
    found = comparison.predictions
    if found is None or found.difference is None:
        why = found.problem if found else "the evaluation kept no predictions.parquet"
        return f'<p class="soft">No interval: {escape(why)}.</p>' if why else ""
    paired = found.difference
    span = max(abs(paired.low), abs(paired.high), abs(comparison.criteria.min_improvement)) * 1.15 or 1.0
    words = (
        f"Over {paired.samples:,} samples that both answered, the candidate's score is {paired.mean:+.4g} in the mean, "
        f"at least {paired.low:+.4g} and at most {paired.high:+.4g} (each with {paired.confidence:.4g} confidence, "
        f"paired bootstrap). It does better on {paired.better:,} samples and worse on {paired.worse:,}. "
        f"Two equal models differ by as much with a chance of {paired.p_value:.2g}."
    )
    line = comparison.criteria.min_improvement if found.is_of_metric else None
    return f"<p>{_interval(paired.low, paired.mean, paired.high, span, line)}<br>{escape(words)}</p>"


def _interval(low: float, mean: float, high: float, span: float, line: float | None = None) -> str:
    """Return an interval as a drawing: zero in the middle, the minimum improvement as a dashed line."""

    def x(value: float) -> float:
        return WIDTH / 2 + max(-1.0, min(1.0, value / span)) * (WIDTH / 2 - 4)

    tone = "good" if low > 0 else "bad" if high < 0 else "even"
    wanted = f'<line class="limit" x1="{x(line):.1f}" x2="{x(line):.1f}" y1="0" y2="16"/>' if line else ""
    return (
        f'<svg class="interval" width="{WIDTH}" height="16" role="img" aria-label="{low:.4g} to {high:.4g}">'
        f'<line class="zero" x1="{WIDTH / 2}" x2="{WIDTH / 2}" y1="0" y2="16"/>{wanted}'
        f'<line class="{tone}" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="8" y2="8"/>'
        f'<circle class="{tone}" cx="{x(mean):.1f}" cy="8" r="4"/></svg>'
    )


def _slices(found: PredictionComparison, comparison: Comparison) -> str:
    parts = []
    for column, group in groupby(found.slices, key=lambda each: each.column):
        results = sorted(group, key=lambda each: each.difference.mean if each.difference else each.candidate)
        judged = comparison.criteria.gates.slices.get(column)
        note = f"at least {judged.min_samples} samples are judged" if judged else ""
        more = f"; the {len(results) - MAX_ROWS} best are left out" if len(results) > MAX_ROWS else ""
        parts.append(
            f"<h3>by {escape(column)} <small>{escape(note + more).strip('; ')}</small></h3>"
            + _slice_table(results[:MAX_ROWS])
        )
    return "".join(parts)


def _slice_table(results: list[SliceResult]) -> str:
    ends = [abs(end) for each in results if each.difference for end in (each.difference.low, each.difference.high)]
    span = max(ends, default=0.0) * 1.05 or 1.0
    rows = ""
    for each in results:
        drawn = (
            _interval(each.difference.low, each.difference.mean, each.difference.high, span) if each.difference else ""
        )
        difference = format_number(each.difference.mean, "+.4g") if each.difference else MISSING
        rows += (
            f"<tr><td>{escape(each.value)}</td><td>{each.samples:,}</td><td>{format_number(each.candidate)}</td>"
            f"<td>{format_number(each.champion)}</td><td>{difference}</td><td>{drawn}</td></tr>"
        )
    return (
        '<table class="numbers"><thead><tr><th></th><th>samples</th><th>candidate</th><th>champion</th>'
        f"<th>difference</th><th></th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _confusions(found: PredictionComparison) -> str:
    both = [("candidate", found.candidate.confusion), ("champion", found.champion and found.champion.confusion)]
    drawn = "".join(_confusion(name, each) for name, each in both if each)
    return f'<p class="soft">Rows: true class. Columns: what the model says.</p><div class="side">{drawn}</div>'


def _confusion(name: str, confusion: Confusion) -> str:
    head = "".join(f"<th><span>{escape(each)}</span></th>" for each in confusion.classes)
    rows = ""
    for number, (label, counts) in enumerate(zip(confusion.classes, confusion.counts, strict=True)):
        total = max(sum(counts), 1)
        cells = ""
        for column, count in enumerate(counts):
            kind = "right" if column == number else "wrong"
            share = count / total if column == number else min(1.0, 4 * count / total)
            shown = str(count) if count else ""
            cells += f'<td class="{kind}" style="--share:{share:.3f}">{shown}</td>'
        rows += f"<tr><th>{escape(label)}</th>{cells}</tr>"
    caption = f"{escape(name)}: {confusion.correct:,} of {confusion.total:,} right"
    return (
        f'<table class="confusion"><caption>{caption}</caption><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _calibrations(found: PredictionComparison) -> str:
    both = [("candidate", found.candidate.calibration), ("champion", found.champion and found.champion.calibration)]
    drawn = "".join(_calibration(name, each) for name, each in both if each)
    words = "How often predictions of a confidence are right; on the diagonal, confidence can be taken at its word."
    return f'<p class="soft">{words}</p><div class="side">{drawn}</div>'


def _calibration(name: str, calibration: Calibration) -> str:
    size = 240
    most = max(each.samples for each in calibration.bins)
    points = " ".join(f"{each.confidence * size:.1f},{(1 - each.accuracy) * size:.1f}" for each in calibration.bins)
    dots = "".join(
        f'<circle class="dot" cx="{each.confidence * size:.1f}" cy="{(1 - each.accuracy) * size:.1f}" '
        f'r="{2.5 + 4 * (each.samples / most) ** 0.5:.1f}"><title>confidence {each.confidence:.3f}, right '
        f"{each.accuracy:.3f}, {each.samples:,} samples</title></circle>"
        for each in calibration.bins
    )
    return (
        f'<figure><svg class="calibration" viewBox="-30 -8 {size + 40} {size + 34}" width="{size + 40}" role="img">'
        f'<rect class="frame" width="{size}" height="{size}"/>'
        f'<line class="zero" x1="0" y1="{size}" x2="{size}" y2="0"/><polyline class="curve" points="{points}"/>{dots}'
        f'<text x="{size / 2}" y="{size + 22}" text-anchor="middle">confidence</text>'
        f'<text x="{-size / 2}" y="-12" transform="rotate(-90)" text-anchor="middle">share right</text></svg>'
        f"<figcaption>{escape(name)}: expected calibration error {calibration.error:.4f}</figcaption></figure>"
    )


def _regressions(found: PredictionComparison, samples: dict[str, SampleContent]) -> str:
    cards = "".join(_card(each, samples.get(each.key)) for each in found.regressions)
    return f'<div class="cards">{cards}</div>'


def _card(regression: Regression, content: SampleContent | None) -> str:
    shown = ""
    if content and content.image:
        shown = f'<img alt="{escape(regression.key)}" src="{escape(content.image)}">'
    elif content and content.text:
        shown = f"<pre>{escape(content.text)}</pre>"
    lines = [
        ("true", regression.target),
        ("candidate", regression.candidate),
        ("champion", regression.champion),
        ("score", f"{regression.difference:+.4g}"),
        *regression.columns.items(),
    ]
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines if text)
    return f'<article>{shown}<dl>{listed}</dl><p class="key">{escape(regression.key)}</p></article>'


def _footprint(comparison: Comparison) -> str:
    rows = _rows(footprint_table(comparison))
    if not rows:
        return ""
    return (
        '<table class="numbers"><thead><tr><th></th><th>candidate</th><th>champion</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _rows(rows: Iterable[Iterable[str]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)


STYLE = """
:root{--ink:#1b1f24;--soft:#57606a;--line:#d8dee4;--page:#fff;--card:#f6f8fa;--good:#1a7f37;--bad:#cf222e;--wait:#9a6700;
--accent:#2563eb;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#30363d;--page:#0d1117;--card:#161b22;
--good:#3fb950;--bad:#f85149;--wait:#d29922;--accent:#4493f8}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0}
main{max-width:64rem;margin:2rem auto;padding:0 1.25rem}
h1{font-size:1.6rem;margin:0 0 .4rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2.2rem 0 .6rem;
border-bottom:1px solid var(--line);padding-bottom:.3rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
small,.soft,dt,.key{color:var(--soft);font-weight:400}
.reason{font-size:1.05rem;margin:.2rem 0 1rem;overflow-wrap:anywhere}
.pill{font-size:.85rem;font-weight:600;padding:.2rem .7rem;border-radius:1rem;color:#fff;vertical-align:middle;
white-space:nowrap}
.pill.good{background:var(--good)}.pill.bad{background:var(--bad)}.pill.wait{background:var(--wait)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:.5rem 0}dd{margin:0;overflow-wrap:anywhere}
table{border-collapse:collapse;margin:.4rem 0}td,th{padding:.3rem .8rem;border-bottom:1px solid var(--line);
text-align:left;vertical-align:top}th{font-weight:600;color:var(--soft)}
.numbers td:not(:first-child),.numbers th:not(:first-child){text-align:right;font-variant-numeric:tabular-nums}
.decides td{font-weight:600}
.mark{font-weight:700}.passed .mark{color:var(--good)}.failed .mark{color:var(--bad)}.waiting .mark{color:var(--wait)}
.gates td:nth-child(2){white-space:nowrap}
svg{vertical-align:middle}.interval line,.interval circle{stroke-width:2.5}.zero{stroke:var(--line);stroke-width:1.5}
.interval .good{stroke:var(--good);fill:var(--good)}.interval .bad{stroke:var(--bad);fill:var(--bad)}
.interval .even{stroke:var(--soft);fill:var(--soft)}
.limit{stroke:var(--accent);stroke-dasharray:3 2}
.side{display:flex;flex-wrap:wrap;gap:2rem}figure{margin:0}figcaption,caption{color:var(--soft);font-size:.9rem;
text-align:left;padding:.2rem 0}
.confusion td,.confusion th{border:1px solid var(--line);padding:.15rem .3rem;min-width:1.5rem;text-align:center;
font-size:.8rem;font-variant-numeric:tabular-nums}.confusion thead th span{display:inline-block;max-width:5rem;
overflow:hidden;text-overflow:ellipsis}.confusion tbody th{text-align:right;white-space:nowrap}
.right{background:color-mix(in srgb,var(--accent) calc(var(--share)*55%),transparent)}
.wrong{background:color-mix(in srgb,var(--bad) calc(var(--share)*70%),transparent)}
.frame{fill:none;stroke:var(--line)}.curve{fill:none;stroke:var(--accent);stroke-width:1.5}.dot{fill:var(--accent)}
.calibration text{fill:var(--soft);font-size:12px}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(11rem,1fr));gap:1rem}
article{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.7rem;overflow:hidden}
article img{display:block;min-width:6rem;max-width:100%;max-height:12rem;margin:0 auto .5rem;image-rendering:pixelated}
article pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.8rem;max-height:10rem;overflow:auto;margin:0 0 .5rem}
article dl{font-size:.85rem;gap:.05rem .6rem}.key{font-size:.75rem;margin:.3rem 0 0;overflow-wrap:anywhere}
"""
