"""How often the gate of improvement is wrong: a model against itself trained again, and against a truly better one.

    python -m loadtest.gates [--comparisons 1000]

Both are simulated: two trainings of one request agree on most samples and differ on a few of them at random. A better
model is better by twice the minimum improvement in truth. Targets: of 1,000 comparisons of a model with itself at most
5% promote by the default gate (within the error of counting), of those with a better model at least 90%. Beside it
stands how often the measured difference alone would have promoted the same model.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np

from contracts.spec.gates import ModelGates
from contracts.spec.training import Evaluation
from loadtest.common import report
from services.evaluation.core.bootstrap import DEFAULT_CONFIDENCE, compare_paired
from services.evaluation.core.comparison import ModelPicture, PredictionComparison
from services.evaluation.core.gate import Criteria, Evidence, judge

#: The minimum improvement, in standard errors of the difference: less cannot be shown with so few samples.
MINIMUM_ERRORS = 3.5
#: Samples of the test split, and the share of them on which two trainings of one request differ: a model cannot be
#: better by more than that share, so fewer samples than these can show no minimum.
SPLITS = ((1_000, 0.05), (4_000, 0.05))


def draw_accuracy(random: Any, samples: int, changed: float, gain: float) -> tuple[Any, Any]:
    """Return the scores (right or wrong) of a champion and of a candidate that is better by ``gain`` in truth."""
    differs = random.random(samples) < changed
    candidate_wins = random.random(samples) < 0.5 + gain / (2 * changed)
    shared = (random.random(samples) < 0.9).astype(float)
    return np.where(differs, 1.0 - candidate_wins, shared), np.where(differs, 1.0 * candidate_wins, shared)


def draw_error(random: Any, samples: int, spread: float, gain: float) -> tuple[Any, Any]:
    """Return the scores (minus squared error, with rare large ones) of two models."""
    hard = random.lognormal(0.0, 1.0, samples)
    champion, candidate = (-hard * (1 + spread * random.standard_normal(samples)) ** 2 for _ in range(2))
    return champion, candidate + gain


def promotes(scores: tuple[Any, Any], gates: ModelGates, seed: int) -> bool:
    """Whether the gates promote the second of two models with these scores."""
    champion, candidate = scores
    difference = compare_paired(candidate - champion, DEFAULT_CONFIDENCE, seed)
    found = PredictionComparison(ModelPicture(len(champion)), None, difference, is_of_metric=True)
    evidence = Evidence({"score": float(candidate.mean())}, {"score": float(champion.mean())}, "rc", found)
    return judge(Criteria(Evaluation(metric="score", mode="max"), gates), evidence).promote


def measure(draw: Any, samples: int, share: float, comparisons: int, seed: int) -> dict[str, float]:
    """Return the shares of promotions, of the same model and of a better one."""
    random = np.random.default_rng(seed)
    champion, candidate = draw(random, 200_000, share, 0.0)
    least = MINIMUM_ERRORS * float((candidate - champion).std()) / math.sqrt(samples)
    same = by_difference = better = 0
    for number in range(comparisons):
        again = draw(random, samples, share, 0.0)
        same += promotes(again, ModelGates(), number)
        by_difference += float(again[1].mean()) > float(again[0].mean())
        better += promotes(draw(random, samples, share, 2 * least), ModelGates(min_improvement=least), number)
    return {
        "samples": samples,
        "differing_share": share,
        "minimum": least,
        "same_promoted": same / comparisons,
        "same_promoted_by_difference": by_difference / comparisons,
        "better_promoted": better / comparisons,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=1000)
    comparisons = parser.parse_args().comparisons
    figures: dict[str, list[dict[str, float]]] = {"accuracy": [], "squared_error": []}
    for number, (samples, share) in enumerate(SPLITS, start=1):
        figures["accuracy"].append(measure(draw_accuracy, samples, share, comparisons, seed=number))
    figures["squared_error"].append(measure(draw_error, 300, 0.2, comparisons, seed=100))
    rows = []
    for kind, found in figures.items():
        for each in found:
            name = f"{kind}, {each['samples']:,.0f} samples, minimum {each['minimum']:.4f}"
            rows.append((f"{name}: same model promoted", f"{each['same_promoted']:.1%}", "nominal 5%"))
            by_difference = f"{each['same_promoted_by_difference']:.1%}"
            rows.append((f"{name}: same model promoted by the difference alone", by_difference, ""))
            rows.append((f"{name}: twice the minimum promoted", f"{each['better_promoted']:.1%}", "at least 90%"))
    error = 3 * math.sqrt(0.05 * 0.95 / comparisons)
    settings = {"confidence": DEFAULT_CONFIDENCE, "comparisons": comparisons, "counting_error": error}
    report("gates", rows, {**settings, **figures})


if __name__ == "__main__":
    main()
