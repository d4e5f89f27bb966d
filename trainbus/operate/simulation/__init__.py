"""Traces through the scheduler: its own fold and decide, or the whole service over a bus, on a virtual clock."""
