"""The lanes of the suite: what a test needs decides when it runs, and whether it may run again."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lane:
    """Tests that need the same things."""

    name: str
    #: pytest's expression for its tests; tests/conftest.py sets the markers.
    marker: str
    needs: str
    #: A test that fails runs again, alone. What needs no other process has no reason to differ then.
    retries: bool


CORES = Lane("cores", "core", "neither a server nor another process", retries=False)
SERVERS = Lane("servers", "not core and not e2e", "nats-server, S3, or processes of their own", retries=True)
STACKS = Lane("stacks", "e2e", "whole stacks, with real training", retries=True)
LANES = (CORES, SERVERS, STACKS)


def find_lane(markers: Container[str]) -> Lane:
    """Return the lane of a test with these markers."""
    if "core" in markers:
        return CORES
    return STACKS if "e2e" in markers else SERVERS
