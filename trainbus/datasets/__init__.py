"""Datasets as people look at them: where they come from, whether they are whole, what changed. Pure."""
