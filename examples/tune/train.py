"""Train a small network on scikit-learn's digits: reports every epoch, and goes on from its kept checkpoint."""

from __future__ import annotations

import warnings

import joblib
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

import trainbus

params = trainbus.params()
images, labels = load_digits(return_X_y=True)
seen, held, seen_labels, held_labels = train_test_split(images / 16, labels, random_state=0, stratify=labels)

resumed = trainbus.resume()
if resumed is not None:
    model = joblib.load(resumed / "model.joblib")
else:
    model = MLPClassifier(
        (params.get("width", 32),),
        learning_rate_init=params.get("learning_rate", 1e-3),
        batch_size=params.get("batch_size", 32),
        alpha=params.get("alpha", 1e-4),
        random_state=params.get("seed", 0),
    )

for epoch in range(trainbus.resume_step() + 1, params.get("epochs", 8) + 1):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.partial_fit(seen, seen_labels, classes=range(10))
    accuracy = accuracy_score(held_labels, model.predict(held))
    trainbus.report({"validation/accuracy": accuracy, "loss": model.loss_}, epoch=epoch)
    joblib.dump(model, "model.joblib")
    trainbus.checkpoint("model.joblib", step=epoch)
