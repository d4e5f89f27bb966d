"""Tables and texts for a terminal; plain where there is none (CI, pipes)."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape as _escape_markup
from rich.table import Table

from contracts.formats import format_bytes, format_metrics

STATE_STYLE = {
    "completed": "green",
    "running": "bold cyan",
    "placed": "cyan",
    "stopping": "yellow",
    "cancelling": "yellow",
    "queued": "yellow",
    "preparing": "yellow",
    "accepted": "yellow",
    "requested": "yellow",
    "failed": "bold red",
    "rejected": "bold red",
    "cancelled": "magenta",
    "up": "green",
    "lost": "bold red",
    "draining": "yellow",
    "notice": "yellow",
    "unfit": "bold red",
    "left": "dim",
}
#: Columns whose values are not wrapped.
UNBROKEN = ("run", "state", "metric", "verdict", "node", "dataset", "manifest")
#: Width where there is no terminal: long lines are better than wrapped ones.
PLAIN_WIDTH = 160
size = format_bytes
#: Control characters and text-direction marks -> how they are shown.
_CONTROL_CHARACTERS = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\n\t"
}
#: What sets the colour and weight of text on a terminal, and what ends that.
_COLOUR = re.compile("(\x1b\\[[0-9;:]*m)")
_COLOUR_END = "\x1b[0m"


def console(stderr: bool = False) -> Console:
    """Return a console that writes plain text where there is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False, soft_wrap=False)


def visible(text: str) -> str:
    """Return text from outside with its control characters made visible."""
    return text.translate(_CONTROL_CHARACTERS)


def make_safe(line: str) -> str:
    """Return a line of a run's output for a terminal: its colours stay, all other control characters are visible."""
    parts = _COLOUR.split(line)
    shown = "".join(part if _COLOUR.fullmatch(part) else visible(part) for part in parts)
    return shown + _COLOUR_END if len(parts) > 1 else shown


def escape(text: str) -> str:
    """Return text from outside for a console: without markup and control characters."""
    return _escape_markup(visible(text))


def as_json(value: Any) -> str:
    """Return the JSON of views, models, times and collections of them; NaN and infinity are text, as in facts."""
    return json.dumps(to_plain(value), indent=2, default=str)


def to_plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return to_plain(value.model_dump(mode="json"))
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): to_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    return value.isoformat() if isinstance(value, datetime) else value


def state(name: str) -> str:
    return f"[{STATE_STYLE.get(name, 'default')}]{name}[/]"


def ago(time: datetime | None, now: datetime) -> str:
    """Return how long ago a time was: ``3 m``."""
    return "" if time is None else span((now - time).total_seconds())


def span(seconds: float) -> str:
    """Return a duration in the largest unit that fits."""
    seconds = max(0.0, seconds)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def table(*columns: str, title: str | None = None, right: Iterable[str] = ()) -> Table:
    made = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in columns:
        whole = name in right or name in UNBROKEN
        made.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=whole)
    return made


def print_fields(fields: Mapping[str, str]) -> None:
    """Print one line for each field that has a value."""
    width = max(map(len, fields))
    for name, value in fields.items():
        if value:
            console().print(f"[dim]{name:<{width}}[/] {value}", soft_wrap=True)


def print_moment(time: datetime, text: str) -> None:
    """Print a line with its time of day."""
    console().print(f"[dim]{time:%H:%M:%S}[/] {escape(text)}", soft_wrap=True)


def numbers(values: Mapping[str, float]) -> str:
    return escape(format_metrics(values))


def utc_now() -> datetime:
    return datetime.now(UTC)
