"""What the read model makes of an event: pure folds and one-line descriptions."""
