"""Splits: stable as data grows, apart, with the shares asked for; and what they and the statistics cost.

    python -m loadtest.data --only splits

Costs are seconds of the processor for one record, compared with hashing and writing the record (canonical JSON and
SHA-256, which every record needs), interleaved in the same run, the best of several.
"""

from __future__ import annotations

import hashlib
import io
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image, ImageDraw

from contracts.datasets import SPLITS, FieldStatistics, canonical_json
from contracts.spec.data import DataSource, Split
from services.ingestion.catalog import Catalog, Record
from services.ingestion.core.splits import SplitAssigner, SplitKeys, perceptual_hash, strata, stratify
from services.ingestion.core.statistics import Statistics, measure_image, measure_row

Row = tuple[str, str, str, bool]
ROUNDS = 5
SIGMAS = 4.0


def measure(quick: bool = False) -> list[Row]:
    keys = 100_000 if quick else 1_000_000
    return [
        *_shares(keys),
        _growth(keys),
        _groups(keys),
        _stratified(keys // 10),
        _near(100 if quick else 500),
        _same_bits(keys // 50),
        *_costs(5_000 if quick else 20_000),
    ]


def _shares(keys: int) -> Iterator[Row]:
    """How far the shares are from those asked for, in standard deviations, over several seeds."""
    worst = 0.0
    for seed in range(3):
        split = Split(seed=seed)
        assigner = SplitAssigner(split)
        found = Counter(assigner.split_of(_unit(assigner, str(i))) for i in range(keys))
        for name in SPLITS:
            share = getattr(split, name)
            worst = max(worst, abs(found[name] - keys * share) / (keys * share * (1 - share)) ** 0.5)
    yield (
        f"shares of {keys:,} keys, 3 seeds: farthest off", f"{worst:.2f} sigma", f"at most {SIGMAS:.0f} sigma",
        worst <= SIGMAS,
    )  # fmt: skip


def _growth(keys: int) -> Row:
    """Records that change their split when nine times as many come."""
    few, many = SplitAssigner(Split()), SplitAssigner(Split())
    before = {str(i): few.split_of(_unit(few, str(i))) for i in range(keys // 10)}
    order = [str(i) for i in range(keys)]
    random.Random(0).shuffle(order)
    moved = sum(before.get(key, split) != split for key in order for split in (many.split_of(_unit(many, key)),))
    return f"moved when {keys // 10:,} records become {keys:,}", f"{moved}", "0", moved == 0


def _groups(keys: int) -> Row:
    """Groups whose records are in more than one split, written as numbers, texts or floats, in many files."""
    data = DataSource(source="s3://lake/x", format="jsonl", split=Split(by="group", group_field="g"))
    split_keys, assigner, rng = SplitKeys(data), SplitAssigner(data.split), random.Random(1)
    splits: dict[int, set[str | None]] = {}
    for number in range(keys // 4):
        group = rng.randrange(keys // 40)
        written = (group, str(group), float(group))[number % 3]
        unit = assigner.unit(split_keys.row({"g": written}), sha256=str(number), key=str(number), path=str(number % 9))
        splits.setdefault(group, set()).add(assigner.split_of(unit))
    overlapping = sum(len(found) > 1 for found in splits.values())
    return f"groups in two splits, of {len(splits):,}", f"{overlapping}", "0", overlapping == 0


def _stratified(records: int) -> Row:
    """How far any class is from its shares, in records, through the catalog on disk; classes of 1 to many."""
    rng, split = random.Random(2), Split(stratify=True)
    assigner = SplitAssigner(split)
    labels = [f"c{min(int(rng.expovariate(0.02)), 499)}" for _ in range(records)]
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog(Path(folder) / "catalog.sqlite")
        for number, label in enumerate(labels):
            unit = _unit(assigner, str(number))
            catalog.add_record(Record(f"{number:09d}", unit, label, b"", None, 1, b"", b""))
        catalog.add_strata(strata(catalog.unit_sizes()))
        for label, total in catalog.class_sizes():
            catalog.assign(stratify(split, label, catalog.units_of(label), total))
        found = Counter((record.label, catalog.assigned(record.unit)) for record in catalog.records())
        catalog.close()
    totals = Counter(labels)
    worst = max(abs(found[label, name] - n * getattr(split, name)) for label, n in totals.items() for name in SPLITS)
    figure = f"stratified, {records:,} records in {len(totals)} classes: farthest off"
    return figure, f"{worst:.2f} records", "below 1 record", worst < 1


def _near(scenes: int) -> Row:
    """Copies of an image, recompressed or resized, that share its hash; and other images that do not."""
    originals = [_scene(seed) for seed in range(scenes)]
    hashes = [perceptual_hash(image) for image in originals]
    same = [
        sum(perceptual_hash(change(image)) == known for image, known in zip(originals, hashes, strict=True)) / scenes
        for change in (lambda image: _jpeg(image, 75), lambda image: image.resize((240, 180)))
    ]
    apart = len(set(hashes)) / scenes
    measured = f"JPEG at 75 {same[0]:.0%}, twice the size {same[1]:.0%}; {apart:.1%} of others apart"
    return f"{scenes} images: copies that share a hash", measured, "80%, 98% apart", min(same) >= 0.8 and apart >= 0.98


def _same_bits(records: int) -> Row:
    """Different results of the same statistics, with the records of every block in another order."""
    rng = random.Random(3)
    rows = [measure_row({"a": rng.gauss(0, 1) * 10 ** rng.randrange(9), "b": rng.random()}) for _ in range(4096)]
    results = set()
    for _ in range(max(2, records // 4096)):
        rng.shuffle(rows)
        results.add(canonical_json({name: field.model_dump() for name, field in _added(rows).items()}))
    return "statistics of one block in any order: results", f"{len(results)}", "1", len(results) == 1


def _costs(records: int) -> Iterator[Row]:
    rng = random.Random(4)
    rows = [{f"f{number}": rng.random() for number in range(20)} | {"text": "x" * 200} for _ in range(records)]
    measured = [measure_row(row) for row in rows]
    data = DataSource(source="s3://lake/x", format="jsonl", split=Split())
    split_keys, assigner = SplitKeys(data), SplitAssigner(data.split)
    contents = [canonical_json(row) for row in rows]

    def divide() -> None:
        for content, row in zip(contents, rows, strict=True):
            assigner.split_of(assigner.unit(split_keys.row(row), sha256=content[:64].hex(), key="k", path="p"))

    def write() -> None:
        for row in rows:
            hashlib.sha256(canonical_json(row)).hexdigest()

    images = [_scene(seed) for seed in range(100)]
    packed = [_png(image) for image in images]

    def decode() -> None:
        for content in packed:
            Image.open(io.BytesIO(content)).load()

    works: dict[str, Callable[[], object]] = {
        "write": write,
        "divide": divide,
        "note": lambda: [measure_row(row) for row in rows],
        "add": lambda: _added(measured),
        "decode": decode,
        "channels": lambda: [measure_image(image) for image in images],
        "likeness": lambda: [perceptual_hash(image) for image in images],
    }
    best = _best(works)
    split, counted = best["divide"] / best["write"], (best["note"] + best["add"]) / best["write"]
    each = (best["note"] + best["add"]) / records / 20 * 1e6
    yield "split of a record, against writing it", f"{split:.2f}", "at most 0.5", split <= 0.5
    yield (
        "statistics of 20 fields, against writing them", f"{counted:.2f} ({each:.2f} us a number)", "at most 1.0",
        counted <= 1.0,
    )  # fmt: skip
    channels, likeness = best["channels"] / best["decode"], best["likeness"] / best["decode"]
    yield "statistics of an image, against decoding it", f"{channels:.2f}", "at most 0.5", channels <= 0.5
    yield "likeness of an image, against decoding it", f"{likeness:.2f}", "at most 0.5", likeness <= 0.5


def _best(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of the processor, the works taking turns."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for name, work in works.items():
            started = time.process_time()
            work()
            best[name] = min(best[name], time.process_time() - started)
    return best


def _added(rows: list[bytes]) -> dict[str, FieldStatistics]:
    statistics = Statistics()
    for row in rows:
        statistics.add(row)
    return statistics.result()


def _unit(assigner: SplitAssigner, name: str) -> bytes:
    return assigner.unit("", sha256=name, key=name, path=name)


def _scene(seed: int) -> Image.Image:
    """Something with large bright and dark places, and some noise."""
    rng = random.Random(seed)
    image = Image.new("RGB", (120, 90), (rng.randrange(256),) * 3)
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        x, y = rng.randrange(120), rng.randrange(90)
        draw.ellipse((x - 25, y - 20, x + 25, y + 20), fill=tuple(rng.randrange(256) for _ in range(3)))
    for _ in range(200):
        draw.point((rng.randrange(120), rng.randrange(90)), fill=tuple(rng.randrange(256) for _ in range(3)))
    return image


def _jpeg(image: Image.Image, quality: int) -> Image.Image:
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=quality)
    return Image.open(packed)


def _png(image: Image.Image) -> bytes:
    packed = io.BytesIO()
    image.save(packed, "PNG")
    return packed.getvalue()
