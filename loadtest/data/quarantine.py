"""What is broken is set aside, what is sound is kept: ingestion of spoiled sources of every format.

    python -m loadtest.data.quarantine [inputs]

For each source: ingestion does not fail, nothing that was listed vanishes (it is in the index or in quarantine), and
every sample that was not touched is in the index with its own bytes.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import structlog

from contracts.datasets import pack_name
from contracts.spec.data import DataSource
from loadtest.data import fuzzed
from services.ingestion.core.keys import is_data
from services.ingestion.decoders import DecoderPool
from services.ingestion.job import IngestionJob, IngestionResult
from services.ingestion.sources import FolderSource
from services.kit.bus import PoisonMessage
from services.kit.store.errors import ObjectExists, ObjectNotFound

INPUTS, QUICK_INPUTS = 10_000, 300


class MemoryStore:
    """The part of ``ObjectStore`` that ingestion writes to."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    async def ensure_bucket(self, bucket: str) -> None:
        return None

    async def get(self, uri: str) -> bytes:
        if uri not in self.objects:
            raise ObjectNotFound(uri)
        return self.objects[uri]

    async def put(self, uri: str, body: bytes, *, if_absent: bool = False) -> None:
        if if_absent and uri in self.objects:
            raise ObjectExists(uri)
        self.objects[uri] = body

    async def upload(self, path: Path, uri: str) -> None:
        self.objects[uri] = path.read_bytes()


@dataclass
class Findings:
    """What came of all cases."""

    cases: int = 0
    inputs: int = 0
    sound: int = 0
    refused: int = 0
    accepted: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unaccounted: list[str] = field(default_factory=list)


async def ingest(case: fuzzed.Case, decoders: DecoderPool, folder: Path) -> tuple[IngestionResult, MemoryStore]:
    """Ingest a case from a folder."""
    root, work = folder / "source", folder / "work"
    work.mkdir()
    for path, content in case.files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    data = DataSource.model_validate(
        {"source": root.as_uri(), "format": case.format, "max_invalid_fraction": 1, **case.settings}
    )
    store = MemoryStore()
    source = FolderSource.of(data.source, (folder,))
    return await IngestionJob("datasets", store, source, decoders, work, data).run(), store  # type: ignore[arg-type]


async def try_one(seed: int, decoders: DecoderPool, findings: Findings) -> None:
    """Ingest one case and note what is not as it must be."""
    case = fuzzed.make(seed)
    findings.cases += 1
    findings.inputs += max(1, len(case.spoiled))
    findings.sound += len(case.sound)
    with tempfile.TemporaryDirectory() as folder:
        try:
            result, store = await ingest(case, decoders, Path(folder))
        except PoisonMessage as error:
            findings.refused += 1
            if not case.may_be_refused:
                findings.crashes.append(f"case {seed} ({case.format}) refused: {error}")
            return
        except Exception as error:
            findings.crashes.append(f"case {seed} ({case.format}): {error!r}")
            return
    check_case(seed, case, result, store, findings)


def check_case(seed: int, case: fuzzed.Case, result: IngestionResult, store: MemoryStore, findings: Findings) -> None:
    """Compare what came out with what went in."""
    index = [json.loads(line) for line in store.objects[result.index_uri].splitlines()]
    aside = [json.loads(line) for line in store.objects[result.quarantine_uri].splitlines()]
    outcome = result.outcome
    findings.accepted += outcome.accepted
    findings.codes.update(entry["code"] for entry in aside)
    # Every sound sample is there, and its bytes are those that the index tells of.
    missing = case.sound - {record["sha256"] for record in index}
    if missing:
        findings.lost.append(f"case {seed} ({case.format}): {len(missing)} of {len(case.sound)} sound samples")
    for record in index:
        pack = store.objects[f"{result.folder_uri}/{pack_name(record['pack'])}"]
        content = pack[record["pack_offset"] : record["pack_offset"] + record["size"]]
        if fuzzed.sha256(content) != record["sha256"]:
            findings.lost.append(f"case {seed} ({case.format}): {record['key']} has other bytes than its hash")
    # Nothing vanishes.
    if (len(index), len(aside)) != (outcome.accepted, outcome.broken):
        findings.unaccounted.append(f"case {seed} ({case.format}): the counts are not those of the lists")
    total = outcome.accepted + outcome.broken + outcome.left_out
    if case.listed is not None and total != case.listed:
        findings.unaccounted.append(f"case {seed} ({case.format}): {total} of {case.listed} listed records")
    told = {_path(entry["uri"]) for entry in (*index, *aside)}
    for path in case.files:
        if path not in case.naming and is_data(path) and not any(each.endswith(f"/{path}") for each in told):
            findings.unaccounted.append(f"case {seed} ({case.format}): {path} is told of nowhere")


def _path(uri: str) -> str:
    return unquote(urlsplit(uri).path)


async def run(inputs: int, first_seed: int = 0) -> Findings:
    """Try cases until so many spoiled inputs were validated."""
    findings = Findings()
    async with DecoderPool(2) as decoders:
        seed = first_seed
        while findings.inputs < inputs:
            await try_one(seed, decoders, findings)
            seed += 1
    return findings


def measure(quick: bool = False) -> list[tuple[str, str, str, bool]]:
    """Rows of the table: figure, measured, target, met."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    found = asyncio.run(run(QUICK_INPUTS if quick else INPUTS))
    for problem in (*found.crashes, *found.lost, *found.unaccounted):
        print(problem, file=sys.stderr)
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    inputs = f"{found.inputs:,} spoiled inputs in {found.cases:,} sources"
    return [
        (f"quarantine: crashes ({inputs})", str(len(found.crashes)), "0", not found.crashes),
        (
            f"quarantine: sources with lost samples ({found.sound:,} sound samples)",
            str(len(found.lost)),
            "0",
            not found.lost,
        ),
        (
            f"quarantine: unaccounted ({found.accepted:,} accepted, {found.codes.total():,} set aside for "
            f"{len(found.codes)} reasons, {found.refused:,} sources refused)",
            str(len(found.unaccounted)),
            "0",
            not found.unaccounted,
        ),
        ("quarantine: memory of the process", f"{memory_mb:,.0f} MB", "under 512 MB", memory_mb < 512),
    ]


def main(argv: list[str]) -> None:
    inputs = int(argv[0]) if argv else QUICK_INPUTS
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    found = asyncio.run(run(inputs, int(argv[1]) if len(argv) > 1 else 0))
    print(json.dumps({**vars(found), "codes": dict(found.codes.most_common())}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
