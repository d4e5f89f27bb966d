"""The scheduler's metrics."""

from __future__ import annotations

from typing import get_args

from prometheus_client import Counter, Gauge, Histogram

from contracts.events.run import StopReason
from services.kit.metrics import LATENCY_BUCKETS, counter, initialize_series
from services.scheduler.core.cycle_state import CyclePhase

QUEUE_LENGTH = Gauge("trainbus_scheduler_queue_length", "Runs that wait for slots.")
RUNS = Gauge("trainbus_scheduler_runs", "Runs by phase, as folded from the log.", ["phase"])
SLOTS = Gauge("trainbus_scheduler_slots", "Slots of living nodes: total, used.", ["kind"])
QUARANTINED = Gauge(
    "trainbus_scheduler_quarantined", "Runs and nodes put aside because a scheduling step failed on them.", ["kind"]
)
NODES = Gauge(
    "trainbus_scheduler_nodes", "Nodes by state: alive, draining, notice, unfit, quarantined, lost, left.", ["state"]
)
COMMIT_LAG_SECONDS = Gauge(
    "trainbus_scheduler_commit_lag_seconds",
    "Age of the oldest checkpoint that is staged and neither committed nor refused.",
)
COMMIT_LAG_STEPS = Gauge(
    "trainbus_scheduler_commit_lag_steps",
    "Steps that the newest commit is behind what is staged; the largest of all runs.",
)
HELD_UP_RUNS = Gauge("trainbus_scheduler_held_up_runs", "Placed runs whose ranks wait for some that do not come.")
DISPUTES = counter(
    "trainbus_scheduler_disputed_parts_total",
    "Parts of runs that only the scheduler, or only the node's agent, took to run on a node: they were freed.",
    who=("scheduler", "agent"),
)
INVALID_STATEMENTS = Counter(
    "trainbus_scheduler_invalid_statements_total", "Node leases that named what no node can run: they were ignored."
)
PLACEMENTS = Counter("trainbus_scheduler_placements_total", "Placements published by this instance.")
STOPS = counter(
    "trainbus_scheduler_stops_total",
    "Generations that this instance asked to release their slots, by reason: preempted, resized, node_lost, ...",
    reason=get_args(StopReason),
)
CONFLICTS = Counter("trainbus_scheduler_conflicts_total", "Decisions dropped because a newer fact was there first.")
DROPPED_FACTS = Counter(
    "trainbus_scheduler_dropped_facts_total",
    "Decisions dropped because the lease was lost before they were out.",
)
LONG_CYCLES = Counter("trainbus_scheduler_long_cycles_total", "Scheduling cycles longer than a tenth of the lease.")
DECIDE_SECONDS = Histogram(
    "trainbus_scheduler_decide_seconds", "Seconds one scheduling cycle took.", buckets=LATENCY_BUCKETS
)
PHASE_SECONDS = initialize_series(
    Histogram(
        "trainbus_scheduler_phase_seconds",
        "Seconds each phase of a scheduling cycle took: settle, order, place, preempt, grow, explain, record (make the "
        "facts), publish, fold (until what was published is folded).",
        ["phase"],
        buckets=LATENCY_BUCKETS,
    ),
    (*get_args(CyclePhase), "record", "publish", "fold"),
)
WAITING_SECONDS = Histogram(
    "trainbus_scheduler_waiting_seconds",
    "Seconds from queued to placed.",
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400),
)
FOLDED_SEQUENCE = Gauge("trainbus_scheduler_folded_sequence", "Sequence of the last fact folded.")
NODES_WANTED = Gauge("trainbus_scheduler_nodes_wanted", "Nodes that would be used, all in all, by pool.", ["pool"])
