"""The training loop and what it stands on: strategies, checkpoints, and the agreement to stop."""
