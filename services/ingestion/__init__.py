"""Turns a prefix in the lake into an index of validated, split records."""
