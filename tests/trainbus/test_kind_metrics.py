"""The metrics of each kind of task against torchmetrics, and what they are where they are not defined."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainbus.evaluation.kind_metrics import compute_kind_metrics, score_queries, score_rows

torchmetrics = pytest.importorskip("torchmetrics")


def classification(seed: int, samples: int, classes: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.ones(classes), samples).astype(np.float32)
    target = np.concatenate([np.arange(classes), rng.integers(0, classes, samples - classes)])
    return {"target": target, "prediction": probabilities.argmax(axis=1), "probabilities": probabilities}


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_classification(classes: int) -> None:
    columns = classification(1, 500, classes)
    found = compute_kind_metrics("classification", columns)
    target, probabilities = torch.from_numpy(columns["target"]), torch.from_numpy(columns["probabilities"])
    functional = torchmetrics.functional.classification
    predicted = torch.from_numpy(columns["prediction"])
    assert found == pytest.approx(
        {
            "accuracy": float((predicted == target).float().mean()),
            "macro_f1": float(functional.multiclass_f1_score(predicted, target, classes, "macro")),
            "auc": float(functional.multiclass_auroc(probabilities, target, classes)),
            "calibration_error": float(
                functional.multiclass_calibration_error(probabilities, target, classes, n_bins=15)
            ),
        },
        abs=1e-5,
    )


def test_regression_ranking_and_language_modelling() -> None:
    rng = np.random.default_rng(2)
    target, prediction = rng.normal(size=200), rng.normal(size=200)
    pair = torch.from_numpy(prediction), torch.from_numpy(target)
    functional = torchmetrics.functional
    assert compute_kind_metrics("regression", {"target": target, "prediction": prediction}) == pytest.approx(
        {
            "rmse": float(functional.mean_squared_error(*pair, squared=False)),
            "mae": float(functional.mean_absolute_error(*pair)),
            "r2": float(functional.r2_score(*pair)),
        }
    )
    query, relevance = rng.integers(0, 20, 200), rng.integers(0, 2, 200)
    # torchmetrics counts only documents with a positive score as retrieved.
    prediction = np.exp(prediction)
    columns = {"target": relevance, "prediction": prediction, "query": query}
    indexes = torch.from_numpy(query)
    retrieval = torchmetrics.retrieval
    assert compute_kind_metrics("ranking", columns) == pytest.approx(
        {
            "ndcg": float(
                retrieval.RetrievalNormalizedDCG(empty_target_action="skip")(
                    pair[0], torch.from_numpy(relevance), indexes
                )
            ),
            "mrr": float(
                retrieval.RetrievalMRR(empty_target_action="skip")(
                    torch.from_numpy(prediction), torch.from_numpy(relevance), indexes
                )
            ),
        },
        abs=1e-6,
    )
    logits, tokens = torch.randn(4, 8, 11, generator=torch.Generator().manual_seed(1)), torch.arange(32).view(4, 8) % 11
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens, reduction="none").sum(1)
    correct = (logits.argmax(2) == tokens).sum(1)
    columns = {"nll": nll.double().numpy(), "tokens": np.full(4, 8), "correct": correct.numpy()}
    assert compute_kind_metrics("language-modelling", columns) == pytest.approx(
        {
            "perplexity": float(functional.text.perplexity(logits, tokens)),
            "token_accuracy": float((logits.argmax(2) == tokens).float().mean()),
        },
        rel=1e-5,
    )


@given(st.integers(0, 2**32), st.integers(4, 60))
def test_the_order_of_rows_changes_no_query(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    columns = {
        "query": rng.integers(0, 5, rows),
        "target": rng.integers(0, 3, rows),
        "prediction": rng.integers(0, 4, rows).astype(float),
    }
    order = rng.permutation(rows)
    shuffled = {name: values[order] for name, values in columns.items()}
    assert compute_kind_metrics("ranking", columns) == pytest.approx(compute_kind_metrics("ranking", shuffled))
    # Each query with something relevant has one scored row, so the mean of scores is the metric.
    relevant = {int(query) for query, target in zip(columns["query"], columns["target"], strict=True) if target}
    scored = [each for each in score_queries(columns) if each is not None]
    assert len(scored) == len(relevant)


#: Kind -> columns, and the metrics that are left.
UNDEFINED: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "a class without samples": (
        "classification",
        {"target": np.array([0, 1]), "prediction": np.array([0, 0]), "probabilities": np.full((2, 3), 1 / 3)},
        {"accuracy", "macro_f1", "calibration_error"},
    ),
    "names of classes": (
        "classification",
        {"target": np.array(["a", "b"]), "prediction": np.array(["a", "a"])},
        {"accuracy", "macro_f1"},
    ),
    "one number": ("regression", {"target": np.array([1.0]), "prediction": np.array([2.0])}, {"rmse", "mae"}),
    "nothing relevant": (
        "ranking",
        {"query": np.array([1, 1]), "target": np.array([0, 0]), "prediction": np.array([0.1, 0.2])},
        set(),
    ),
    "one document": (
        "ranking",
        {"query": np.array(["q"]), "target": np.array([1]), "prediction": np.array([0.1])},
        {"ndcg", "mrr"},
    ),
    "no tokens": ("language-modelling", {"nll": np.zeros(1), "tokens": np.zeros(1, np.int64)}, set()),
    "infinite": ("language-modelling", {"nll": np.array([1e6]), "tokens": np.ones(1, np.int64)}, set()),
    "no kind": ("", {"target": np.zeros(2), "prediction": np.zeros(2)}, set()),
}


@pytest.mark.parametrize("case", UNDEFINED)
def test_a_metric_that_is_not_defined_is_left_out(case: str) -> None:
    kind, columns, names = UNDEFINED[case]
    found = compute_kind_metrics(kind, columns)
    assert set(found) == names
    assert all(map(math.isfinite, found.values()))


def test_scores_are_of_the_metric_that_counts() -> None:
    pair = {"target": np.array([1.0, 2.0]), "prediction": np.array([3.0, 2.5])}
    assert score_rows("classification", pair, "accuracy") is None
    name, scores = score_rows("regression", pair, "test/mae") or ("", [])
    assert (name, list(scores)) == ("mae", [-2.0, -0.5])
    name, scores = score_rows("regression", pair, "test/rmse") or ("", [])
    assert (name, list(scores)) == ("mse", [-4.0, -0.25])
    text = {"nll": np.array([2.0, 0.0]), "tokens": np.array([4, 0]), "correct": np.array([1, 0])}
    name, scores = score_rows("language-modelling", text, "perplexity") or ("", [])
    assert (name, list(scores)) == ("nll", [-0.5, 0.0])
    name, scores = score_rows("language-modelling", text, "token_accuracy") or ("", [])
    assert (name, list(scores)) == ("token_accuracy", [0.25, 0.0])
