"""Load tests of the scheduler: its figures on real traces, its speed, and what it bears."""
