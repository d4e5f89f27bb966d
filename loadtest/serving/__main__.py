"""Serving under load and in need: swaps, overload, poison, bad versions, batching, and other servers beside it.

    python -m loadtest.serving [--only swaps,overload] [--ray-python /path/to/an/environment/with/ray/bin/python]

``--only`` measures some parts; those of the same commit that are on file stay.

A serving service of its own, on a NATS server and an object store of its own, answers requests of clients that send
them at a fixed rate, whether or not earlier ones are answered. Every answer is compared with the true one, and its
version and digest with what was promoted. MLflow's server and Ray Serve get the same model and rates in the same run.

Targets: no failed request in swaps, and no version that goes backwards on a connection; p99 within a swap at most 1.2
times the p99 outside of one, beside what a process of low priority that only takes memory makes of it; from a promotion
to the first answer of the new version at most 1 s; a rollback within 0.2 s; at three times the sustained rate a goodput
of at least 0.9 of it, nothing ended, and recovery within 1 s; bad inputs take no version back, and a bad version
answers for a bounded time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from loadtest.common import RESULTS, machine, report
from loadtest.served_kinds import KINDS
from loadtest.serving.batches import measure_batching
from loadtest.serving.faults import measure_faults
from loadtest.serving.overload import measure_overload
from loadtest.serving.peers import Peer, measure_peer, start_mlflow, start_ray, start_trainbus, versions
from loadtest.serving.rollouts import measure_rollouts
from loadtest.serving.swaps import measure_swaps

#: Requests a second of each kind while versions are swapped: about a third of what two cores sustain.
SWAP_RATES = {"linear": 200.0, "CNN": 100.0, "GPT": 50.0}
#: Of one the router is the limit, of the other the model; and a small model gains nothing from batches.
OVERLOADED, BATCHED = ("linear", "GPT"), ("GPT",)
NAME = "serving"
PARTS = ("swaps", "rollouts", "overload", "faults", "batching", "peers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), default=PARTS, help=", ".join(PARTS))
    parser.add_argument("--swaps", type=int, default=100, help="of the linear model; a fifth of it of the others")
    parser.add_argument("--rollbacks", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--updates", type=int, default=20, help="of each server")
    parser.add_argument("--ray-python", type=Path, help="python with ray[serve] and numpy")
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - set(PARTS):
        parser.error(f"--only {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    figures: dict[str, Any] = _read_others(arguments.only)
    for name, measure in _parts(arguments).items():
        load = os.getloadavg()[0]
        with Console().status(name):
            part, _, key = name.partition(": ")
            found = {"load_average_before": load, **asyncio.run(measure())}
            figures.setdefault(part, {}).update({key: found} if key else found)
        print(f"{name}: {json.dumps(found)}")
    if "peers" in arguments.only:
        figures["peers"]["measured"] = versions(arguments.ray_python)
    report(NAME, _rows(figures), figures)


def _read_others(only: Collection[str]) -> dict[str, Any]:
    """Return the parts on file that are not measured now, if they are of this very commit."""
    path = RESULTS / f"{NAME}.json"
    on_file = json.loads(path.read_text()) if path.exists() else {}
    if on_file.get("machine", {}).get("commit") != machine()["commit"]:
        return {}
    return {name: on_file[name] for name in PARTS if name in on_file and name not in only}


def _parts(arguments: argparse.Namespace) -> dict[str, Callable[[], Coroutine[Any, Any, dict[str, Any]]]]:
    """Return what is to be measured, by name."""
    only = arguments.only
    found: dict[str, Callable[[], Coroutine[Any, Any, dict[str, Any]]]] = {}
    for name, kind in KINDS.items():
        if "swaps" in only:
            count = arguments.swaps if name == "linear" else max(1, arguments.swaps // 5)
            found[f"swaps: {name}"] = partial(measure_swaps, kind, count, arguments.rollbacks, SWAP_RATES[name])
        if "overload" in only and name in OVERLOADED:
            found[f"overload: {name}"] = partial(measure_overload, kind, arguments.seconds)
        if "batching" in only and name in BATCHED:
            found[f"batching: {name}"] = partial(measure_batching, kind)
    if "rollouts" in only:
        found["rollouts"] = measure_rollouts
    if "faults" in only:
        found["faults"] = measure_faults
    if "peers" in only:
        peers: dict[str, Peer] = {"trainbus": start_trainbus, "MLflow": start_mlflow}
        if arguments.ray_python:
            peers["Ray Serve"] = start_ray(arguments.ray_python)
        for name, start in peers.items():
            found[f"peers: {name}"] = partial(measure_peer, start, arguments.updates)
    return found


def _rows(figures: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the table: figure, measured, target."""
    rows: list[tuple[str, str, str]] = []
    for kind, each in figures.get("swaps", {}).items():
        p99s = f"{each['p99_ms_in_a_swap']} / {each['p99_ms_outside']} ms: {each['p99_ratio']}"
        beside = f"{each['p99_ratio_beside_a_neighbour']:g}"
        firsts = f"{each['first_answer_s_p50']} / {each['first_answer_s_p99']} s"
        unsound = f"{each['wrong_answers']}, {each['misnamed_answers']}, {each['versions_that_went_back']}"
        rows += [
            (f"{kind}: failed in {each['swaps']} swaps", f"{each['failed_requests']} of {each['requests']:,}", "none"),
            (f"{kind}: p99 in a swap / outside", p99s, f"at most 1.2; any process: {beside}"),
            (f"{kind}: promoted to first answer, p50 / p99", firsts, "1 s"),
            (f"{kind}: rollback, p50 / max", f"{each['rollback_s_p50']} / {each['rollback_s_max']} s", "0.2 s"),
            (f"{kind}: wrong, misnamed, older than before", unsound, "none"),
        ]
    if rollout := figures.get("rollouts"):
        p99s = f"{rollout['p99_ms_in_the_rollout']} / {rollout['p99_ms_before']} ms"
        share = f"{rollout['share_that_the_canary_answered']:.1%}"
        failed = f"{rollout['failed_requests']} of {rollout['requests']:,}"
        rows += [
            ("canary and shadow: share of the answers", share, f"{rollout['canary_share']:.0%}"),
            ("canary and shadow: p99 meanwhile / before", p99s, ""),
            ("canary and shadow: bad version; failed requests", f"{rollout['bad_canary']}; {failed}", "canary; none"),
        ]
    for kind, each in figures.get("overload", {}).items():
        ended = f"{each['processes_ended']}; {each['recovery_s']:g} s"
        rows += [
            (f"{kind}: goodput at 3 x {each['sustained_per_s']:g}/s", f"{each['goodput_ratio']:g}", "at least 0.9"),
            (f"{kind}: p99 of what was answered", f"{each['p99_ms_of_answers']:g} ms", "bounded"),
            (f"{kind}: processes that ended; recovered after", ended, "0; 1 s"),
        ]
    for kind, each in figures.get("batching", {}).items():
        rates = f"{each['on_per_s']:.0f} / {each['off_per_s']:.0f} a second"
        rows.append((f"{kind}: rate at a p99 of 50 ms, batches on / off", rates, ""))
    if faults := figures.get("faults"):
        poison = faults["poison"]
        answers = f"{poison['version_promoted']} / {poison['version_that_answers']}"
        rows.append(("poison: version promoted / that answers", answers, "the same"))
        for defect, each in faults["versions"]["of"].items():
            measured = f"{each['stage']}; {each['answers']} answers in {each['answered_for_s']} s"
            rows.append((f"bad version: {defect}", measured, "refused"))
        for name in ("poison", "versions"):
            each = faults[name]
            rows.append((f"{name}: failed beside it", f"{each['failed_requests']} of {each['requests']:,}", "none"))
    for peer, each in figures.get("peers", {}).items():
        if peer != "measured":
            lost = f"{each['rate_per_s']:.0f}/s; {each['lost']} of {each['requests']:,}"
            rows.append((f"{peer}: rate at a p99 of 50 ms; lost in {each['updates']} updates", lost, ""))
    return rows


if __name__ == "__main__":
    main()
