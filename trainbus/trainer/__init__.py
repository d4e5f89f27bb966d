"""The training loop, strategies, checkpoints, and the agreement of the ranks on each step."""
