"""Whether MLflow, in a process of this node, finds the store of trainbus."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec

GROUPS = ("mlflow.tracking_store", "mlflow.artifact_repository")
SCHEME = "trainbus"


@cache
def find_mlflow_uri() -> str:
    """Return MLflow's address for scripts; '' where MLflow is not installed, or trainbus is not known to it."""
    if find_spec("mlflow") is None:
        return ""
    known = all(SCHEME in entry_points(group=group).names for group in GROUPS)
    return f"{SCHEME}:" if known else ""
