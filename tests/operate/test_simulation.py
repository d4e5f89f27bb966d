"""The simulator: traces in, figures out; the checker agrees; the service over a bus places the same."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from contracts.events.node import NodeJoined, NodeLost
from contracts.events.run import RunAccepted
from contracts.scheduling import Policy
from loadtest.scheduler.check import Checker, check, compare, read_log
from services.kit.settings import Settings
from services.scheduler import policies
from trainbus.commands.main import app
from trainbus.operate.simulation import generate, plots, report, traces
from trainbus.operate.simulation.engine import Effort, simulate
from trainbus.operate.simulation.over_bus import simulate_over_bus
from trainbus.operate.simulation.report import EventLog, Recorder
from trainbus.operate.simulation.traces import Job, Specs, Trace, TraceError, node, nodes_of

FIFO = policies.load("fifo")
LAS = policies.with_settings("least-attained", ["order.attained.levels_slot_s=[600]", "preemption.quantum_s=60"])


def played(trace: Trace, policy: Policy = FIFO, **more: Any) -> tuple[Recorder, dict[str, Any]]:
    recorder = Recorder(trace)
    effort = simulate(trace, policy, listeners=(recorder.record_fact,), **more)
    return recorder, report.figures(recorder, effort)


def small(*jobs: tuple[float, float, int], gpus: int = 4, per_node: int = 4) -> Trace:
    """JobQueue of (submit time, duration, slots)."""
    specs = Specs()
    made = [Job(f"j{i}", submit, duration, specs.get(slots)) for i, (submit, duration, slots) in enumerate(jobs)]
    return Trace(nodes_of(gpus, per_node), tuple(made))


def written(trace: Trace, path: Path) -> Path:
    """The trace as a file in the columns of the Alibaba simulator."""
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["job_id", "submit_time", "num_gpu", "duration", "user", "gpu_type"])
        for job in trace.jobs:
            name = job.run_id.removeprefix("job-")
            out.writerow([name, int(job.submit_s), job.slots, int(job.duration_s), job.user, "MISC"])
    return path


# -- the engine ---------------------------------------------------------------------------------------


def test_waits_are_what_they_are_by_hand() -> None:
    # 4 GPUs: the first two fit, the third waits for the first one's end, and keeps the fourth waiting.
    recorder, found = played(small((0, 100, 2), (10, 50, 2), (20, 30, 4), (30, 10, 1)))
    assert [record.completed_s for record in recorder.records.values()] == [100, 60, 130, 140]
    assert [record.wait_s for record in recorder.records.values()] == [0, 0, 80, 100]
    assert found["avg_wait_s"] == 45
    assert found["max_wait_s"] == 100
    assert found["makespan_s"] == 140
    assert found["utilisation"] == pytest.approx((200 + 100 + 120 + 10) / (4 * 140), abs=1e-6)
    skipping, _ = played(small((0, 100, 2), (10, 50, 2), (20, 30, 4), (65, 10, 1)), policies.load("fifo-skip"))
    assert [record.wait_s for record in skipping.records.values()] == [0, 0, 80, 0]


def test_a_preempted_job_pays_for_every_later_start_and_loses_no_work() -> None:
    # Served by what was attained: the second job takes the slots of the first when that has had its 600 slot-seconds.
    recorder, found = played(small((0, 1000, 4), (200, 100, 4)), LAS, resume_cost_s=30.0)
    first, second = recorder.records.values()
    assert found["preemptions"] == 1
    assert [(span.start_s, span.end_s) for span in second.spans] == [(200, 300)]
    assert [(span.start_s, span.end_s) for span in first.spans] == [(0, 200), (300, 300 + 30 + 800)]
    assert first.wait_s == 130


def test_an_elastic_job_is_as_fast_as_it_has_slots() -> None:
    spec = Specs().get(1, max_slots=4)
    recorder, _ = played(Trace(nodes_of(4, 4), (Job("j", 0.0, 100.0, spec),)))
    assert recorder.records["j"].completed_s == 25


def test_a_job_larger_than_the_cluster_is_explained_and_not_lost() -> None:
    recorder, found = played(small((0, 10, 8), (5, 10, 1)))
    assert found["completed"] == 1
    assert found["infeasible_jobs"] == [{"run_id": "j0", "slots": 8, "code": "infeasible"}]
    assert recorder.records["j1"].wait_s == 0


def test_a_lost_node_costs_the_work_since_the_last_checkpoint() -> None:
    specs = Specs()
    jobs = (Job("j", 0.0, 1000.0, specs.get(2)),)
    lost = NodeLost(node_id="node-0", incarnation="1")
    trace = Trace(nodes_of(8, 4), jobs, events=((700.0, lost),))
    recorder, _ = played(trace)
    (first, second) = recorder.records["j"].spans
    assert (first.end_s, second.start_s) == (700, 700)
    assert second.members[0].node_id == "node-1"
    assert recorder.records["j"].completed_s == 700 + 60 + 400  # 600 of the 700 seconds were in a checkpoint


def test_a_node_that_joins_later_is_used() -> None:
    later = node("late", 8, "gpu")
    trace = Trace(nodes_of(4, 4), small((0, 10, 8)).jobs, events=((50.0, later),))
    recorder, found = played(trace)
    assert recorder.records["j0"].wait_s == 50
    assert found["infeasible"] == 0


def test_the_scheduler_never_learns_how_long_a_job_takes() -> None:
    secret = 987_654.25
    heard: list[str] = []

    def listen(fact: Any, sequence: int, now_s: float) -> None:
        if now_s < 1_000:
            heard.append(fact.model_dump_json())

    simulate(small((0, secret, 4), (1, 10, 4)), LAS, listeners=(listen,))
    assert heard
    assert not any("987654" in text or "987,654" in text for text in heard)


def test_the_same_trace_and_policy_give_the_same_simulation() -> None:
    trace = generate.jobs(150, 32, seed=5)
    first, second = played(trace, LAS)[0], played(trace, LAS)[0]
    assert report.placements(first) == report.placements(second)
    assert generate.jobs(150, 32, seed=5) == trace
    assert generate.jobs(150, 32, seed=6).jobs != trace.jobs


@pytest.mark.parametrize("name", policies.names())
def test_the_checker_finds_the_same_figures_and_nothing_wrong(name: str, tmp_path: Path) -> None:
    trace = generate.jobs(80, 32, seed=1)
    recorder = Recorder(trace)
    policy = policies.load(name)
    with (tmp_path / "events.jsonl").open("w") as file:
        effort = simulate(trace, policy, listeners=(recorder.record_fact, EventLog(file).record_fact))
    said = report.summary(recorder, effort, policy, {"resume_cost_s": 60.0})
    (tmp_path / "said.json").write_text(json.dumps(said))
    figures, problems = check(tmp_path / "events.jsonl", written(trace, tmp_path / "trace.csv"), tmp_path / "said.json")
    assert problems == []
    assert figures["completed"] == 80
    assert figures["avg_wait_s"] == pytest.approx(said["avg_wait_s"], abs=1e-5)


def test_ceilings_are_kept_by_the_log(tmp_path: Path) -> None:
    limits = ["admit.max_slots_per_user=8", 'admit.quotas=[{"team": "team0", "ceiling": 12}]']
    policy = policies.with_settings("fifo-skip", limits)
    drawn = generate.jobs(80, 32, seed=4)
    trace = Trace(drawn.nodes, tuple(job for job in drawn.jobs if job.slots <= 8))
    with (tmp_path / "events.jsonl").open("w") as file:
        simulate(trace, policy, listeners=(EventLog(file).record_fact,))
    checker = Checker()
    for event in read_log(tmp_path / "events.jsonl"):
        checker.read(event)
    checker.nothing_lost()
    assert checker.problems == []
    assert max(checker.most_of_user.values()) == 8
    assert 8 < checker.most_of_team["team0", None] <= 12


# -- the checker sees what is wrong ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The log of a small simulation."""
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with path.open("w") as file:
        simulate(generate.jobs(30, 16, seed=2), LAS, listeners=(EventLog(file).record_fact,))
    return list(read_log(path))


def problems_of(events: list[dict[str, Any]]) -> str:
    checker = Checker()
    for event in events:
        checker.read(event)
    checker.nothing_lost()
    return "\n".join(checker.problems)


def doctored(events: list[dict[str, Any]], kind: str, nth: int, **changes: Any) -> list[dict[str, Any]]:
    """The log with other data in the nth event of a kind."""
    at = [i for i, event in enumerate(events) if event["type"] == f"trainbus.run.{kind}.v1"][nth]
    changed = {**events[at], "data": {**events[at]["data"], **changes}}
    return [*events[:at], changed, *events[at + 1 :]]


def test_the_log_as_it_is_has_no_problems(events: list[dict[str, Any]]) -> None:
    assert problems_of(events) == ""


def test_the_checker_sees_a_slot_used_twice(events: list[dict[str, Any]]) -> None:
    placed = [event["data"] for event in events if event["type"] == "trainbus.run.placed.v1"]
    assert "is used twice" in problems_of(doctored(events, "placed", 1, members=placed[0]["members"]))


def test_the_checker_sees_half_a_gang(events: list[dict[str, Any]]) -> None:
    assert "has the ranks" in problems_of(doctored(events, "placed", 0, world_size=17))


def test_the_checker_sees_a_lost_job(events: list[dict[str, Any]]) -> None:
    first = next(event["data"]["run_id"] for event in events if event["type"] == "trainbus.run.placed.v1")
    kept = [event for event in events if event["data"].get("run_id") != first or event["type"].endswith("accepted.v1")]
    assert f"{first} of" in problems_of(kept)
    assert "is lost" in problems_of(kept)


def test_the_checker_sees_a_placement_before_the_submission(events: list[dict[str, Any]]) -> None:
    first = next(event["data"]["run_id"] for event in events if event["type"] == "trainbus.run.placed.v1")
    without = [
        event for event in events if event["type"] != "trainbus.run.accepted.v1" or event["data"]["run_id"] != first
    ]
    assert "was never accepted" in problems_of(without)


def test_the_checker_sees_a_broken_ceiling(events: list[dict[str, Any]]) -> None:
    adopted = events[0]
    policy = {**adopted["data"]["policy"], "admit": {"max_slots_per_run": 1}}
    changed = {**adopted, "data": {**adopted["data"], "policy": policy}}
    assert "more than the 1 of the policy" in problems_of([changed, *events[1:]])


def test_the_checker_sees_work_that_was_not_done(events: list[dict[str, Any]]) -> None:
    checker = Checker()
    for event in events:
        checker.read(event)
    run = next(run for run in checker.runs.values() if run.ended_s is not None)
    jobs = {r.run_id: (r.submitted_s, r.least, 0.5, r.user or "") for r in checker.runs.values()}
    checker.against_trace(jobs, 60.0)
    assert f"{run.run_id} is over after" in "\n".join(checker.problems)


def test_the_checker_finds_a_report_with_other_figures() -> None:
    assert compare({"avg_wait_s": 10.0, "jobs": 3, "name": "x"}, {"avg_wait_s": 10.0, "jobs": 3}) == []
    assert compare({"avg_wait_s": 9.9}, {"avg_wait_s": 10.0}) == ["the report says avg_wait_s 9.9, the log 10.0"]
    assert compare({"jobs": 2}, {"jobs": 3}) == ["the report says jobs 2, the log 3"]


# -- over a bus -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FIFO, LAS], ids=["fifo", "least-attained"])
async def test_the_service_over_a_bus_places_the_same_to_the_last(policy: Policy, settings: Settings) -> None:
    trace = generate.jobs(60, 16, seed=3)
    alone, _ = played(trace, policy)
    over_bus = Recorder(trace)
    effort = await simulate_over_bus(trace, policy, settings.nats_url, listeners=(over_bus.record_fact,))
    assert report.placements(over_bus) == report.placements(alone)
    mine, theirs = report.figures(alone, Effort()), report.figures(over_bus, effort)
    timed = {"decisions", "decisions_per_s", "decide_p99_ms", "decide_s", "wall_s"}
    assert {k: v for k, v in theirs.items() if k not in timed} == {k: v for k, v in mine.items() if k not in timed}


# -- packing ------------------------------------------------------------------------------------------------


def write_openb(folder: Path, seed: int) -> tuple[Path, Path]:
    nodes, pods = folder / "nodes.csv", folder / "pods.csv"
    with nodes.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["sn", "cpu_milli", "memory_mib", "gpu", "model"])
        for each in generate.cluster(12, seed):
            cpu_milli, memory_mib = int(each.cpus * 1000), each.memory_bytes // traces.MIB
            out.writerow([each.node_id, cpu_milli, memory_mib, each.slots, each.accelerator])
    with pods.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec"])
        for i, pod in enumerate(generate.pods(80, seed)):
            out.writerow([f"p{i}", pod.cpu_milli, pod.memory_mib, pod.gpus, pod.gpu_milli, "T4" if i % 9 == 0 else ""])
    return nodes, pods


@pytest.mark.parametrize("strategy", ["fgd", "pack", "balanced"])
def test_packing_never_allocates_more_than_the_capacity(strategy: str, tmp_path: Path) -> None:
    nodes, pods = write_openb(tmp_path, 4)
    trace = traces.read_openb(nodes, pods, tune=1.3, seed=1)
    assert sum(job.gpus for job in trace.jobs) >= 1.3 * trace.slots
    recorder = Recorder(trace)
    policy = policies.with_settings("fgd", [f"place.by={strategy}"])
    with (tmp_path / "events.jsonl").open("w") as file:
        effort = simulate(trace, policy, listeners=(recorder.record_fact, EventLog(file).record_fact))
    said = report.summary(recorder, effort, policy, {})
    (tmp_path / "said.json").write_text(json.dumps(said))
    figures, problems = check(tmp_path / "events.jsonl", None, tmp_path / "said.json")
    assert problems == []
    assert 50 < said["allocated_gpu_percent_at_100"] <= 100
    assert figures["allocated_gpu_percent_at_100"] == pytest.approx(said["allocated_gpu_percent_at_100"], abs=1e-5)
    assert said["arrived"] == said["placed"] + said["unplaced"] == len(trace.jobs)


def test_pods_are_drawn_to_the_share_that_is_asked_for() -> None:
    pods = generate.pods(50, seed=1)
    total = sum(pod.gpu_milli_total for pod in pods)
    more = traces.tuned(pods, 2 * total, seed=7)
    assert 2 * total <= sum(pod.gpu_milli_total for pod in more) < 2 * total + 8000
    assert traces.tuned(pods, 2 * total, seed=7) == more
    assert traces.tuned(pods, 2 * total, seed=8) != more
    less = traces.tuned(pods, total / 2, seed=7)
    assert total / 2 <= sum(pod.gpu_milli_total for pod in less) < total / 2 + 8000


# -- reading ---------------------------------------------------------------------------------------------------


def test_a_job_log_is_read_with_any_further_columns(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("user,duration,num_gpu,submit_time,other\nann,20,2,50,x\nbob,10,0,7,y\nann,5,0.5,7,z\n")
    trace = traces.read_pai(path, gpus=10, per_node=4)
    assert [joined.slots for joined in trace.nodes] == [4, 4, 2]
    assert [(job.submit_s, job.slots, job.gpus, job.user) for job in trace.jobs] == [
        (7, 1, 0, "bob"), (7, 1, 0.5, "ann"), (50, 2, 2, "ann"),
    ]  # fmt: skip
    _, found = played(trace)
    assert found["completed"] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("submit_time,num_gpu,user\n", "no column duration"),
        ("submit_time,num_gpu,duration,user\n1,1,x,u\n", "line 2: duration is 'x'"),
        ("submit_time,num_gpu,duration,user\n1,-1,2,u\n", "num_gpu is '-1'"),
        ("job_id,submit_time,num_gpu,duration,user\n1,1,1,2,u\n1,1,1,2,u\n", "same job_id"),
    ],
)
def test_a_bad_trace_is_refused_with_the_reason(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=said):
        traces.read_pai(path, 8)


# -- policies ----------------------------------------------------------------------------------------------------


def test_every_policy_that_comes_along_is_valid_and_named_after_its_file() -> None:
    assert policies.DEFAULT in policies.names()
    assert all(policies.load(name).name == name for name in policies.names())


def test_a_policy_file_may_be_toml_or_json(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[order]\nby = ["deadline"]\n')
    (tmp_path / "other.json").write_text('{"order": {"by": ["deadline"]}, "name": "x"}')
    assert policies.load(str(tmp_path / "mine.toml")).name == "mine"
    assert policies.load(str(tmp_path / "mine.toml")).order.by == ("deadline",)
    assert policies.load(str(tmp_path / "other.json")).name == "x"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["order.skp=true"], "order.skp: unknown field: did you mean order.skip"),
        (["order.skip=perhaps"], "order.skip: "),
        (["order"], "write it like"),
        (["name.x=1"], "name is no part"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_reason(settings: list[str], said: str) -> None:
    with pytest.raises(policies.PolicyError, match=said):
        policies.with_settings("fifo", settings)


def test_an_unknown_policy_lists_those_there_are() -> None:
    with pytest.raises(policies.PolicyError, match="fifo, fifo-skip"):
        policies.load("no-such-policy")


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_figures_that_the_issue_names(tmp_path: Path) -> None:
    trace = written(generate.jobs(40, 16, seed=1), tmp_path / "trace.csv")
    arguments = ["simulate", "--trace", str(trace), "--format", "pai", "--gpus", "16", "--policy", "fifo", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--set", "order.skip=true", "--events", str(tmp_path / "e.jsonl")])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    wanted = "jobs avg_wait_s p50_wait_s p99_wait_s max_wait_s avg_jct_s p99_jct_s makespan_s utilisation preemptions"
    assert set(f"{wanted} decisions decisions_per_s decide_p99_ms".split()) <= set(found)
    assert found["policy_digest"] == policies.with_settings("fifo", ["order.skip=true"]).digest
    assert check(tmp_path / "e.jsonl", trace)[1] == []


def test_the_command_packs(tmp_path: Path) -> None:
    nodes, pods = write_openb(tmp_path, 5)
    arguments = ["simulate", "--nodes", str(nodes), "--pods", str(pods), "--format", "openb", "--tune", "1.3"]
    result = CliRunner().invoke(app, [*arguments, "--seed", "1", "--policy", "fgd", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"allocated_gpu_percent_at_100", "arrived", "placed", "unplaced", "decide_p99_ms"} <= set(found)


def test_the_command_prints_a_table_and_draws(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", "--generate", "40", "--gpus", "16", "--plot", str(tmp_path / "p")])
    assert result.exit_code == 0, result.output
    assert "longest wait" in result.stdout
    assert {path.name for path in (tmp_path / "p").iterdir()} == {"gantt.png", "waits.png", "use.png"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate"], "--trace FILE"),
        (["simulate", "--format", "openb"], "--nodes FILE"),
        (["simulate", "--generate", "5", "--policy", "nope"], "there is no policy"),
        (["simulate", "--trace", "/nowhere.csv"], "cannot be read"),
    ],
)
def test_wrong_use_is_told(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert said in str(result.exception)


def test_charts_of_packing_are_drawn(tmp_path: Path) -> None:
    nodes, pods = write_openb(tmp_path, 6)
    recorder, _ = played(traces.read_openb(nodes, pods, 1.0, 1), policies.load("fifo-skip"))
    assert [path.name for path in plots.draw(recorder, tmp_path / "p", "pack")] == ["packing.png"]


def test_quantiles_are_linear_between_neighbours() -> None:
    assert report.quantile([], 0.5) == 0
    assert report.quantile([1.0], 0.99) == 1
    assert report.quantile([0.0, 10.0], 0.25) == 2.5
    assert math.isclose(report.quantile([float(i) for i in range(101)], 0.99), 99.0)


def test_the_facts_of_a_trace_are_valid() -> None:
    trace = generate.jobs(20, 16, seed=9)
    for job in trace.jobs:
        fact = traces.accepted(job)
        assert RunAccepted.model_validate_json(fact.model_dump_json()) == fact
    assert all(isinstance(joined, NodeJoined) for joined in trace.nodes)
