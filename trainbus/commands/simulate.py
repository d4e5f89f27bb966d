"""``trainbus simulate``: a trace through the scheduler on a virtual clock."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainbus.client.errors import TrainbusError, UsageError
from trainbus.commands.progress import count_bar

if TYPE_CHECKING:
    from contracts.scheduling import Policy
    from trainbus.operate.simulation.engine import Effort
    from trainbus.operate.simulation.report import Recorder
    from trainbus.operate.simulation.traces import Trace

#: Jobs from which on a trace gets a progress bar.
MIN_JOBS_FOR_BAR = 500


def simulate(
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Job log (CSV): submit_time, num_gpu, duration, user.")
    ] = None,
    trace_format: Annotated[
        Literal["pai", "openb"], typer.Option("--format", help="pai: job logs; openb: nodes and pods, for packing.")
    ] = "pai",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the cluster, for job logs.")] = 400,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1)] = 8,
    nodes: Annotated[
        Path | None, typer.Option("--nodes", help="Nodes (CSV): sn, cpu_milli, memory_mib, gpu, model.")
    ] = None,
    pods: Annotated[
        Path | None, typer.Option("--pods", help="Pods (CSV): cpu_milli, memory_mib, num_gpu, gpu_milli.")
    ] = None,
    tune: Annotated[
        float, typer.Option(min=0.01, help="Draw pods until they request this multiple of the GPUs.")
    ] = 1.3,
    policy: Annotated[
        str | None, typer.Option(help="A policy's name or file; default: the default policy, fgd for packing.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the policy: order.skip=true; repeatable.")
    ] = None,
    resume_cost_s: Annotated[
        float, typer.Option("--resume-cost-s", min=0, help="Seconds that a preempted job needs to resume.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Order and choice of pods; the trace of --generate.")] = 0,
    generate: Annotated[
        int | None, typer.Option("--generate", min=1, help="Generate this many jobs instead of reading a trace.")
    ] = None,
    over_bus: Annotated[
        bool, typer.Option("--over-bus", help="Drive the whole service over a nats-server, not only its core.")
    ] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Folder for charts (PNG).")] = None,
    events: Annotated[Path | None, typer.Option("--events", help="File for the log of facts (JSONL).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Simulate the scheduler on a trace, on a virtual clock; print waits, use and preemptions."""
    from services.scheduler import policies
    from trainbus.commands.policy import load_policy
    from trainbus.operate.simulation import generate as generation
    from trainbus.operate.simulation.traces import TraceError

    try:
        if generate:
            played = generation.jobs(generate, gpus, seed, per_node=gpus_per_node)
        elif trace_format == "openb":
            played = _read_openb(nodes, pods, tune, seed)
        else:
            played = _read_pai(trace, gpus, gpus_per_node)
    except TraceError as error:
        raise UsageError(str(error)) from error
    chosen = load_policy(policy or ("fgd" if played.packing else policies.DEFAULT), settings or ())
    recorder, summary = _simulate(played, chosen, resume_cost_s, seed, over_bus=over_bus, events=events)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _table(summary)
    if plot is not None:
        from trainbus.operate.simulation import plots

        for path in plots.draw(recorder, plot, chosen.name):
            print(path, file=sys.stderr)


def _read_openb(nodes: Path | None, pods: Path | None, tune: float, seed: int) -> Trace:
    from trainbus.operate.simulation import traces

    if nodes is None or pods is None:
        raise UsageError("--format openb needs --nodes FILE and --pods FILE")
    return traces.read_openb(nodes, pods, tune, seed)


def _read_pai(trace: Path | None, gpus: int, gpus_per_node: int) -> Trace:
    from trainbus.operate.simulation import traces

    if trace is None:
        raise UsageError("give a trace: --trace FILE, or --generate N")
    return traces.read_pai(trace, gpus, gpus_per_node)


def _simulate(
    trace: Trace, policy: Policy, resume_cost_s: float, seed: int, *, over_bus: bool, events: Path | None
) -> tuple[Recorder, dict[str, Any]]:
    from trainbus.operate.simulation import engine, report

    recorder = report.Recorder(trace)
    with _listeners(recorder, events) as listeners, _progress(trace) as progress:
        try:
            if over_bus:
                effort = _over_bus(trace, policy, resume_cost_s, listeners, progress)
            else:
                effort = engine.simulate(
                    trace, policy, resume_cost_s=resume_cost_s, listeners=listeners, progress=progress
                )
        except (engine.NeverAtRest, TimeoutError) as error:
            raise TrainbusError(str(error)) from error
    settings = {"resume_cost_s": resume_cost_s, "seed": seed, "over_bus": over_bus}
    return recorder, report.summary(recorder, effort, policy, settings)


def _over_bus(
    trace: Trace, policy: Policy, resume_cost_s: float, listeners: Any, progress: Callable[[int], None]
) -> Effort:
    """Simulate with the whole service, on its own nats-server."""
    import logging

    import structlog

    from trainbus.operate.simulation.over_bus import simulate_with_server

    # The command prints the result; of the service's log only errors matter.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    return simulate_with_server(trace, policy, resume_cost_s=resume_cost_s, listeners=listeners, progress=progress)


@contextmanager
def _listeners(recorder: Recorder, events: Path | None) -> Iterator[tuple[Any, ...]]:
    """Yield what records the facts: the recorder and, where one is given, the file."""
    from trainbus.operate.simulation.report import EventLog

    if events is None:
        yield (recorder.record_fact,)
        return
    try:
        file = events.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{events} cannot be written: {error}") from error
    with file:
        yield recorder.record_fact, EventLog(file).record_fact


def _progress(trace: Trace) -> AbstractContextManager[Callable[[int], None]]:
    """Show a bar on stderr for a long trace."""
    if len(trace.jobs) < MIN_JOBS_FOR_BAR:
        return nullcontext(lambda submitted: None)
    return count_bar("submitted", len(trace.jobs))


#: Key of the summary -> its label and unit; in this order.
SHOWN = {
    "jobs": ("jobs", "n"),
    "completed": ("completed", "n"),
    "infeasible": ("can never run", "n"),
    "unfinished": ("unfinished", "n"),
    "avg_wait_s": ("average wait", "s"),
    "p50_wait_s": ("median wait", "s"),
    "p99_wait_s": ("p99 wait", "s"),
    "max_wait_s": ("longest wait", "s"),
    "avg_jct_s": ("average completion", "s"),
    "p99_jct_s": ("p99 completion", "s"),
    "makespan_s": ("all done after", "s"),
    "utilisation": ("use", "%"),
    "allocated_while_backlog": ("use while more is requested than free", "%"),
    "arrived": ("arrived", "n"),
    "placed": ("placed", "n"),
    "unplaced": ("not placed", "n"),
    "allocated_gpu_percent_at_100": ("GPUs allocated at 100% requested", "percent"),
    "allocated_gpu_percent": ("GPUs allocated in the end", "percent"),
    "preemptions": ("preemptions", "n"),
    "decisions": ("decisions", "n"),
    "decisions_per_s": ("decisions a second", "n"),
    "decide_p99_ms": ("p99 of a cycle", "ms"),
    "wall_s": ("took", "s"),
}


def _table(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{summary['trace']}, {summary['gpus']} GPUs on {summary['nodes']} nodes, policy {summary['policy']}"
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for key, (name, unit) in SHOWN.items():
        if summary.get(key) is not None:
            table.add_row(name, _format_value(float(summary[key]), unit))
    console = Console()
    console.print(table)
    for job in summary.get("infeasible_jobs", []):
        console.print(f"{job['run_id']} can never run ({job['code']}): it needs {job['slots']} slots")


def _format_value(value: float, unit: str) -> str:
    match unit:
        case "s" if value >= 3600:
            return f"{value:,.0f} s ({value / 3600:.1f} h)"
        case "s":
            return f"{value:,.1f} s"
        case "%":
            return f"{100 * value:.1f}%"
        case "percent":
            return f"{value:.2f}%"
        case "ms":
            return f"{value:.2f} ms"
        case _:
            return f"{value:,.0f}"
