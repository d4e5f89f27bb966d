"""Random requests by the gateway's own description: schemathesis on a live stack, which finds nothing.

    python -m venv PATH && PATH/bin/pip install schemathesis
    python -m loadtest.http_fuzz --schemathesis PATH/bin/schemathesis

Each route gets ``--examples`` requests that fit its schema, and as many that do not; half of the names in them are
those of a run, a dataset and a model that exist. A fault is an answer of 5xx, one that the document does not describe,
a bad request that is accepted, and more. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.common import report
from tests.e2e.support import DONE_S, connected
from trainbus.client.client import AsyncClient
from trainbus.embedded.launch import StackProcess
from trainbus.embedded.layout import StackOptions

ROOT = Path(__file__).parent.parent.parent
CONFIG = Path(__file__).with_name("schemathesis.toml")
TIME_LIMIT_S = 1800.0


async def train(data_dir: Path) -> dict[str, str]:
    """Train a run on data of its own and return the names that requests can name."""
    async with connected(data_dir) as stack, AsyncClient(data_dir) as client:
        await stack.fill_lake()
        run = await stack.publish(await stack.slow_run(epochs=1, step_s=0.0))
        await stack.wait_for(run, "completed", DONE_S)
        dataset_id = (await client.run(run)).dataset_id
        assert dataset_id is not None
        return {"run": run, "ingestion": run, "dataset": dataset_id, "mark": "last", "node_id": "node-0"}


def send_requests(arguments: argparse.Namespace, url: str, names: dict[str, str], path: Path) -> None:
    """Run schemathesis to its end, its own words on the terminal, and have it write what it did to ``path``."""
    command = [
        arguments.schemathesis, "--config-file", str(CONFIG), "run", f"{url}/openapi.json",
        "--max-examples", str(arguments.examples), "--seed", str(arguments.seed), "--phases", "examples,fuzzing",
        "--continue-on-failure", "--no-shrink", "--request-timeout", "60", "--report-ndjson-path", str(path),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HTTP_FUZZ_NAMES": json.dumps(names)}
    subprocess.run(command, cwd=path.parent, env=environment, timeout=TIME_LIMIT_S, check=False)


@dataclass(slots=True)
class Tally:
    """What was sent, answered and found wrong."""

    requests: int = 0
    routes: set[str] = field(default_factory=set)
    statuses: Counter[str] = field(default_factory=Counter)
    #: Route and check -> how often.
    faults: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, path: Path) -> Tally:
        """Count what schemathesis has written, one event a line."""
        tally = cls()
        for line in path.read_text().splitlines():
            [(kind, event)] = json.loads(line).items()
            if kind == "NonFatalError":
                tally.faults[f"{event.get('label')}: not tested"] += 1
            elif kind == "ScenarioFinished" and event["status"] != "skip":
                tally._count(event["recorder"])
        return tally

    def _count(self, recorder: dict[str, Any]) -> None:
        self.routes.add(recorder["label"])
        self.requests += len(recorder["cases"])
        for sent in recorder["interactions"].values():
            self.statuses[str((sent["response"] or {}).get("status_code", "no answer"))] += 1
        for checks in recorder["checks"].values():
            self.faults.update(f"{recorder['label']}: {each['name']}" for each in checks if each["status"] == "failure")


def show(tally: Tally, arguments: argparse.Namespace, seconds: float) -> None:
    rows = [
        ("requests", f"{tally.requests:,} to {len(tally.routes)} routes in {seconds:.0f} s", "5,000"),
        ("answers", ", ".join(f"{count:,} of {status}" for status, count in sorted(tally.statuses.items())), ""),
        ("faults", "; ".join(f"{name} ({count})" for name, count in tally.faults.items()) or "none", "none"),
    ]
    figures = {"requests": tally.requests, "routes": len(tally.routes), "statuses": tally.statuses, "s": seconds}
    report("http-fuzz", rows, {"seed": arguments.seed, **figures, "faults": tally.faults})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", metavar="PROGRAM", default="schemathesis")
    parser.add_argument("--examples", type=int, default=100, help="of each route")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainbus-http-fuzz-") as folder:
        options = StackOptions(Path(folder) / "data", nodes=1)
        with StackProcess(options, output=Path(folder) / "output.log") as process:
            url = process.wait_ready().gateway_url
            names, began = asyncio.run(train(options.data_dir)), time.perf_counter()
            path = Path(folder) / "report.ndjson"
            send_requests(arguments, url, names, path)
            tally = Tally.read(path)
            show(tally, arguments, time.perf_counter() - began)
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
