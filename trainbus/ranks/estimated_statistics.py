"""Statistics of a few samples, for what is tried before a dataset is ingested. Ingestion has the exact ones."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contracts.datasets import FieldStatistics
from trainbus.task import IMAGE_FIELDS, ROW_FIELD

_Numbers = NDArray[np.float64]
#: The levels of a channel of eight bits.
_LEVELS: _Numbers = np.arange(256) / 255


@dataclass(frozen=True, slots=True)
class _Measure:
    """Values of one field, and how often each is there."""

    values: _Numbers
    counts: _Numbers


def estimate_statistics(samples: Sequence[Mapping[str, bytes]]) -> dict[str, FieldStatistics]:
    """Return the statistics of each numeric field, or image channel, by name; none of what cannot be read here."""
    measures: dict[str, list[_Measure]] = {}
    for sample in samples:
        for name, measure in _measure(sample):
            measures.setdefault(name, []).append(measure)
    return {name: _summarize(parts, len(samples)) for name, parts in sorted(measures.items())}


def _summarize(parts: Sequence[_Measure], samples: int) -> FieldStatistics:
    values, counts = np.concatenate([each.values for each in parts]), np.concatenate([each.counts for each in parts])
    mean = float(np.average(values, weights=counts))
    return FieldStatistics(
        count=int(counts.sum()),
        nulls=samples - len(parts),
        mean=mean,
        std=math.sqrt(np.average((values - mean) ** 2, weights=counts)),
        min=float(values.min()),
        max=float(values.max()),
    )


def _measure(sample: Mapping[str, bytes]) -> Iterator[tuple[str, _Measure]]:
    """Yield the names and numbers of a row's fields, or of an image's channels."""
    images = IMAGE_FIELDS.intersection(sample)
    if images:
        yield from _measure_image(sample[min(images)])
    elif ROW_FIELD in sample:
        yield from _measure_row(json.loads(sample[ROW_FIELD]))


def _measure_row(row: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, _Measure]]:
    for name, value in row.items():
        if isinstance(value, dict) and not prefix:
            yield from _measure_row(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield prefix + name, _Measure(np.array([value], dtype=np.float64), np.ones(1))


def _measure_image(content: bytes) -> Iterator[tuple[str, _Measure]]:
    """Yield the channels of an image of eight bits, from 0 to 1; none of others, or without Pillow."""
    try:
        from PIL import Image

        with Image.open(io.BytesIO(content)) as image:
            grey = image.mode in ("1", "L", "LA", "La")
            counts = np.array(image.convert("L" if grey else "RGB").histogram(), dtype=np.float64).reshape(-1, 256)
    except (ImportError, OSError, ValueError):
        return
    for name, there in zip("l" if grey else "rgb", counts, strict=True):
        yield name, _Measure(_LEVELS[there > 0], there[there > 0])
