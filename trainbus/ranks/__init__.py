"""The processes that have a user's Task: a rank, what forks one, the check before a run."""
