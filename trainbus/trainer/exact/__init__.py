"""Exact mode: the same bits for any number of processes. See docs/exact-training.md."""
