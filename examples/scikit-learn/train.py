"""Scikit-learn: nothing but a folder. It is kept with the run, and is there again after a stop or a crash."""

import os
from pathlib import Path

import joblib
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split

EPOCHS = int(os.environ.get("EPOCHS", "20"))

outputs = Path(os.environ.get("TRAINBUS_OUTPUT_DIR", "outputs"))
outputs.mkdir(exist_ok=True)
saved = outputs / "model.joblib"

x, y = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(x / 16, y, random_state=0)

first, model = 0, SGDClassifier(loss="log_loss", random_state=0)
if saved.exists():
    first, model = joblib.load(saved)
    print(f"goes on after epoch {first}")

for epoch in range(first + 1, EPOCHS + 1):
    model.partial_fit(x_train, y_train, classes=range(10))
    print(f"epoch {epoch}: accuracy {model.score(x_test, y_test):.4f}", flush=True)
    joblib.dump((epoch, model), outputs / "new")
    os.replace(outputs / "new", saved)  # a whole file at any moment
