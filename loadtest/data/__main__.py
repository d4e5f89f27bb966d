"""All figures of the data plane beside their targets, in one table.

    python -m loadtest.data [--quick] [--only order,speed,...]

Each part is a module of this package with ``measure(quick)``; ``--only <part>`` runs it alone. Times are
seconds of the processor, compared with a raw read (or copy) of the same bytes in the same run, best of several. Peers
that are not installed are said to be so: ``pip install -r requirements-peers.txt --no-deps`` brings them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback

from rich.console import Console

from loadtest.common import report

#: Part -> what of the data plane it shows.
PARTS = {
    "order": "nothing lost or repeated, whatever the world size; a resume is instant",
    "speed": "reading against raw reads and peers",
    "identity": "the same data gives the same bytes",
    "integrity": "one bit flipped anywhere is found",
    "features": "features as of a time",
    "writing": "shards written against a raw copy; memory of ingestion and sharding",
    "splits": "splits are stable and apart",
    "quarantine": "what is broken is set aside, what is sound is kept",
    "cache": "a store with faults",
    "reads": "reads and listings of the store, beside obstore",
}
console = Console(stderr=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller numbers: a look, not a measurement")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--gigabytes", type=float, help="writing: size of the source that memory is measured with")
    parser.add_argument("--record-bytes", type=int, default=10_240, help="writing: size of each record in it")
    parser.add_argument("--name", default="data", help="name of the result file")
    given = parser.parse_args()
    wanted = [part for part in given.only.split(",") if part]
    if unknown := [part for part in wanted if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: choose among {', '.join(PARTS)}")
    options = {"writing": {"gigabytes": given.gigabytes, "record_bytes": given.record_bytes}}
    rows: list[tuple[str, str, str]] = []
    figures: list[dict[str, str | bool]] = []
    for part in wanted:
        console.print(f"[bold]{part}[/]: {PARTS[part]}")
        try:
            found = importlib.import_module(f"loadtest.data.{part}").measure(given.quick, **options.get(part, {}))
        except Exception as error:
            # One part that fails must not take the others' hours with it.
            traceback.print_exc()
            found = [(part, f"failed: {error!r}"[:200], "", False)]
        for figure, measured, target, met in found:
            rows.append((figure, measured, target if met else f"{target}  [red]missed[/]"))
            figures.append({"part": part, "figure": figure, "measured": measured, "target": target, "met": met})
            console.print(f"  {figure}: {measured} [dim]({target})[/]")
    report(given.name, rows, {"quick": given.quick, "rows": figures})
    sys.exit(0 if all(row["met"] for row in figures) else 1)


if __name__ == "__main__":
    main()
