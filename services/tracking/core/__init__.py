"""What MLflow should hold, as pure functions of a run's facts and its metric points."""
