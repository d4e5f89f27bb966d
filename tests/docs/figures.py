"""Which results file each figure that README and docs quote comes from.

A quote is a piece of the document in which ``{}`` stands for each figure; its sources are in the same order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "loadtest" / "results"
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"


@dataclass(frozen=True, slots=True)
class Source:
    """A value in a results file: keys joined by ``/``; of ``rows``, the row's ``figure``. ``scale`` sets the unit."""

    file: str
    key: str
    scale: float = 1.0
    #: Makes one number of what stands under the key; without it, that is a number, or a text that has the figure.
    reduce: Callable[[Any], float] | None = None

    def candidates(self) -> list[float]:
        """Return the numbers that the quote may show, in the quote's unit."""
        found: Any = json.loads((RESULTS / self.file).read_text())
        for part in self.key.split("/"):
            if isinstance(found, list) and not part.isdigit():
                [found] = [row["measured"] for row in found if row["figure"] == part]
            else:
                found = found[int(part)] if isinstance(found, list) else found[part]
        if self.reduce is not None:
            found = self.reduce(found)
        if isinstance(found, str):
            return [parse(text) * self.scale for text in re.findall(NUMBER, found)]
        return [float(found) * self.scale]


@dataclass(frozen=True, slots=True)
class Quote:
    """Figures in a document, with the values that they are."""

    document: str
    text: str
    sources: tuple[Source, ...]

    def find(self) -> re.Match[str]:
        """Return the place in the document.

        Raises:
            AssertionError: the document has the text not once.
        """
        pattern = re.escape(self.text).replace(re.escape("{}"), f"({NUMBER})").replace(r"\ ", r"\s+")
        found = list(re.finditer(pattern, (ROOT / self.document).read_text()))
        assert len(found) == 1, f"{self.document} has {self.text!r} {len(found)} times"
        return found[0]


def parse(text: str) -> float:
    """Return a figure as it is written: ``1,343``, ``0.06``."""
    return float(text.replace(",", ""))


def is_rounded(text: str, value: float) -> bool:
    """Return whether the text is the value, rounded to the digits that the text has."""
    digits = len(text.partition(".")[2])
    return abs(parse(text) - value) <= 0.5 * 10.0**-digits * (1 + 1e-9)


def of_rows(file: str, figure: str, scale: float = 1.0) -> Source:
    """Return the source of a figure in the rows of ``loadtest.data``."""
    return Source(file, f"rows/{figure}", scale)


def of_wait(name: str, key: str = "median_s", **fields: Any) -> Source:
    """Return the source of a figure of ``loadtest.wait``."""
    return Source("wait.json", f"waits/{name}/{key}", **fields)


def of_philly(policy: str, key: str, scale: float = 1.0) -> Source:
    """Return the source of a figure of the Philly week."""
    return Source("philly-2017-10-09.json", f"result/{policy}/{key}", scale)


def _peers(order: str) -> tuple[Source, ...]:
    names = ("LitData", "ArrayRecord", "WebDataset", "MDS")
    return tuple(of_rows("data-speed.json", f"{name} against ours, {order}") for name in names)


def _mine(order: str) -> tuple[Source, ...]:
    return tuple(of_rows("data-speed.json", f"{order}, files written {size} at a time") for size in ("64 KB", "1 MB"))


SERVING, FIRST_DAY = "serving.json", "first-day.json"
#: Rows of the table of docs/serving.md, with the keys of their figures.
SWAP_ROWS = {
    "first answer, p50 / p99 | {} / {} s | {} / {} s | {} / {} s |": ("first_answer_s_p50", "first_answer_s_p99"),
    "rollback, p50 / max | {} / {} s | {} / {} s | {} / {} s |": ("rollback_s_p50", "rollback_s_max"),
    "in a swap / outside of one | {} / {} ms | {} / {} ms | {} / {} ms |": ("p99_ms_in_a_swap", "p99_ms_outside"),
    "the same, as a ratio | {} | {} | {} |": ("p99_ratio",),
    "process of low priority takes memory | {} | {} | {} |": ("p99_ratio_beside_a_neighbour",),
}
OVERLOAD_ROWS = {
    "requests a second at a p99 of 50 ms | {} |  | {} |": ("sustained_per_s",),
    "goodput, as a share of it | {} |  | {} |": ("goodput_ratio",),
    "recovered after | {} ms; {} s |  | {} ms; {} s |": ("p99_ms_of_answers", "recovery_s"),
}


def _of_swaps(row: str, *keys: str) -> Quote:
    sources = (Source(SERVING, f"swaps/{kind}/{key}") for kind in ("linear", "CNN", "GPT") for key in keys)
    return Quote("docs/serving.md", row, tuple(sources))


def _of_overload(row: str, *keys: str) -> Quote:
    sources = (Source(SERVING, f"overload/{kind}/{key}") for kind in ("linear", "GPT") for key in keys)
    return Quote("docs/serving.md", row, tuple(sources))


def _of_peers(key: str) -> tuple[Source, ...]:
    return tuple(Source(SERVING, f"peers/{name}/{key}") for name in ("trainbus", "MLflow", "Ray Serve"))


def _longest_answered_s(versions: dict[str, dict[str, float]]) -> float:
    return max(each["answered_for_s"] for each in versions.values())


README, EXACT, SCHEDULER = "README.md", "docs/exact-training.md", "docs/scheduler.md"
HOUR = 1 / 3600
QUOTES = [
    Quote(
        README,
        "answers after {} s, and a rollback takes {} s (medians); of {} requests a second none failed in {} swaps",
        tuple(
            Source(SERVING, f"swaps/linear/{key}")
            for key in ("first_answer_s_p50", "rollback_s_p50", "rate_per_s", "swaps")
        ),
    ),
    Quote(
        README,
        "of a script of one's own: {} commands, {} s with the installation, {} s without",
        tuple(
            Source(FIRST_DAY, f"figures/{key}")
            for key in ("commands_to_first_model", "seconds_to_first_model", "seconds_without_install")
        ),
    ),
    Quote(
        "docs/quickstart.md",
        "takes {} s on two cores, {} s without the environment and the installation; "
        "the next model takes {} commands and {} s",
        tuple(
            Source(FIRST_DAY, f"figures/{key}")
            for key in (
                "seconds_to_first_model",
                "seconds_without_install",
                "commands_for_second_model",
                "seconds_for_second_model",
            )
        ),
    ),
    *(_of_swaps(row, *keys) for row, keys in SWAP_ROWS.items()),
    *(_of_overload(row, *keys) for row, keys in OVERLOAD_ROWS.items()),
    Quote("docs/serving.md", "at a p99 of 50 ms | {} | {} | {} |\n| requests lost", _of_peers("rate_per_s")),
    Quote("docs/serving.md", "updates at 50 a second | {} | {} | {} |", _of_peers("lost")),
    Quote(
        "docs/serving.md",
        "answered for {} s at most until it was taken back",
        (Source(SERVING, "faults/versions/of", reduce=_longest_answered_s),),
    ),
    Quote(
        "docs/serving.md",
        "let the GPT answer {} requests a second, where one by one it answers {}",
        (Source(SERVING, "batching/GPT/on_per_s"), Source(SERVING, "batching/GPT/off_per_s")),
    ),
    Quote(README, "the whole stack, ready | {} s | {} s", (of_wait("stack_ready"), of_wait("stack_ready", "ray_s"))),
    Quote(
        README,
        "a submitted command's first line | {} s | {} s",
        (of_wait("submitted_to_first_line"), of_wait("submitted_to_first_line", "ray_s")),
    ),
    Quote(
        README,
        "from their placement | {} s (best {}) | {} s",
        (
            of_wait("placed_to_first_step"),
            of_wait("placed_to_first_step", "all_s", reduce=min),
            of_wait("placed_to_first_step", "ray_s"),
        ),
    ),
    Quote(
        README,
        "the next step after SIGKILL of a rank | {} s | {} s",
        (of_wait("SIGKILL_to_next_step"), of_wait("SIGKILL_to_next_step", "ray_s")),
    ),
    Quote(
        README,
        "data already prepared | {} s ({} ms without data)",
        (of_wait("published_to_placed"), Source("requests-steady.json", "submit_to_placed_p50_ms")),
    ),
    Quote(
        README,
        "p50 {} ms, p99 {} ms, {} kB a run",
        (
            Source("requests-steady.json", "submit_to_placed_p50_ms"),
            Source("requests-steady.json", "submit_to_placed_p99_ms"),
            Source("requests-steady.json", "bytes_per_run", 1e-3),
        ),
    ),
    Quote(
        README,
        "under `even-wait` is {} s and the longest {} h",
        (of_philly("even-wait", "avg_wait_s"), of_philly("even-wait", "max_wait_s", HOUR)),
    ),
    Quote(
        README,
        "least attained service {} s and {} h",
        (of_philly("least-attained", "avg_wait_s"), of_philly("least-attained", "max_wait_s", HOUR)),
    ),
    Quote(
        README,
        "{} placements a second with 10,000 runs queued; {} ms from submit to placed",
        (Source("scheduler-speed.json", "placements_per_s"), Source("scheduler-speed.json", "submit_to_placed_p99_ms")),
    ),
    Quote(README, "in sequence | {} to {} of raw", _mine("sequential")),
    Quote(README, "of raw | LitData {}, ArrayRecord {}, WebDataset {}, MDS {}", _peers("sequential")),
    Quote(
        README,
        "first epoch (later ones) | {} to {} ({} to {})",
        (*_mine("shuffled"), *_mine("shuffled, every epoch after the first")),
    ),
    Quote(
        README,
        "| LitData {}, WebDataset {}, ArrayRecord {}, MDS {}",
        tuple(_peers("shuffled")[place] for place in (0, 2, 1, 3)),
    ),
    Quote(
        README,
        "{} random histories of a run, resized and killed",
        (of_rows("data-order.json", "order: 10,000 random lives of a run"),),
    ),
    Quote(
        README,
        "point-in-time join | {} s, {} GB; {} rows wrong | a plain ASOF join: {} wrong",
        (
            of_rows(
                "data-features.json", "features: 1,000,000 entities x 10,000,000 rows, as known, Parquet to Parquet"
            ),
            of_rows("data-features.json", "features: memory for it"),
            of_rows("data-features.json", "features: 1,000,000 rows against DuckDB, ties broken"),
            of_rows("data-features.json", "features: a plain ASOF join on the same rows"),
        ),
    ),
    Quote(
        README,
        "10 s without a byte | {} % of steps wait",
        (
            of_rows(
                "data-cache.json", "steps that stall at 80% of the bandwidth; 50 ms, 1% errors, 10 s without a byte"
            ),
        ),
    ),
    Quote(
        README,
        "one bit flipped anywhere, {} times | {} found",
        (of_rows("data-integrity.json", "one bit flipped in 1000 trials, 10 places"),) * 2,
    ),
    Quote(
        EXACT,
        "random histories, equal to the bit | the undisturbed run | all | {} of {} (histories 148 to 199); {} states",
        (
            Source("histories.json", "outcomes", reduce=lambda found: sum(not each["difference"] for each in found)),
            Source("histories.json", "outcomes", reduce=len),
            Source("histories.json", "outcomes", reduce=lambda found: sum(e["compared_states"] for e in found)),
        ),
    ),
    Quote(
        EXACT,
        "Young's and Daly's optimum less 3 points | {} %",
        (Source("goodput.json", "runs", 100.0, lambda runs: runs["node"]["per_s"] / runs["undisturbed"]["per_s"]),),
    ),
    Quote(
        EXACT,
        "and under Ray Train 2.60, quoted by `python -m loadtest.wait` | | | {} s; trainbus there {} s",
        (of_wait("SIGKILL_to_next_step", "ray_s"), of_wait("SIGKILL_to_next_step")),
    ),
    Quote(
        SCHEDULER,
        "average wait (`even-wait`) | {} s (least attained {} s, `default` {} s)",
        tuple(of_philly(policy, "avg_wait_s") for policy in ("even-wait", "least-attained", "default")),
    ),
    Quote(
        SCHEDULER,
        "longest wait there | {} s ({} s, {} s)",
        tuple(of_philly(policy, "max_wait_s") for policy in ("even-wait", "least-attained", "default")),
    ),
    Quote(
        SCHEDULER,
        "p99 completion there | {} s ({} s, {} s)",
        tuple(of_philly(policy, "p99_jct_s") for policy in ("even-wait", "least-attained", "default")),
    ),
    Quote(
        SCHEDULER,
        "placements over JetStream, 10,000 queued, 2,000 GPUs | {}/s",
        (Source("scheduler-speed.json", "placements_per_s"),),
    ),
    Quote(
        SCHEDULER,
        "submit to placed at 50 requests a second, p50 / p99 | {} / {} ms",
        (
            Source("scheduler-speed.json", "submit_to_placed_p50_ms"),
            Source("scheduler-speed.json", "submit_to_placed_p99_ms"),
        ),
    ),
    Quote(
        SCHEDULER,
        "decision that preempts 2,000 GPUs | {} s",
        (Source("scheduler-speed.json", "reclaim_decided_s"),),
    ),
]
#: Numbers of the results in README that are no results: what was measured, and how much of it.
SETTINGS = (
    "Ray 2.60",
    "20 requests a second on 400 simulated slots",
    "p50",
    "p99",
    "a week of",
    "with 10,000 runs queued",
    "at 50 a second",
    "100,000 samples of 10 KB",
    "1M rows x 10M feature rows",
    "50 ms latency, 1 % errors, 10 s without a byte",
    "(S3)",
)
