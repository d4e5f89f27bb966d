"""Measures the model that train.py kept, on samples that it was not trained on."""

import json
import os
from pathlib import Path

import joblib
import pandas as pd
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, f1_score, log_loss
from sklearn.model_selection import train_test_split

checkpoint = Path(os.environ["TRAINBUS_RESUME_DIR"])
outputs = Path(os.environ["TRAINBUS_OUTPUT_DIR"])

x, y = load_digits(return_X_y=True)
_, x_test, _, y_test, _, ids = train_test_split(x / 16, y, range(len(y)), random_state=0)

_, model = joblib.load(checkpoint / "model.joblib")
probabilities = model.predict_proba(x_test)
predicted = probabilities.argmax(axis=1)

metrics = {
    "accuracy": accuracy_score(y_test, predicted),
    "macro_f1": f1_score(y_test, predicted, average="macro"),
    "log_loss": log_loss(y_test, probabilities),
}
(outputs / "metrics.json").write_text(json.dumps(metrics))
rows = pd.DataFrame({"id": ids, "target": y_test, "prediction": predicted, "probabilities": list(probabilities)})
rows.to_parquet(outputs / "predictions.parquet")
