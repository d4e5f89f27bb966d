"""Measures what a run has trained: predictions on a split, and their metrics."""
