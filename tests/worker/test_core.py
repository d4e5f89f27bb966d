"""The decisions of the agent, as tables and properties."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.node import NodeJoined, NodeLost
from contracts.events.run import CheckpointRef, Member, RunCompleted, RunFailed, RunPlaced, RunReleased, RunStopping
from contracts.ranks import (
    CheckpointLine,
    EndedLine,
    KeepLine,
    MetricsLine,
    StartedLine,
    format_endpoint,
    parse_endpoint,
)
from contracts.spec.run import RunSpec
from services.worker.checkpoints.stager import ready_steps
from services.worker.core import journal, metric_patterns, node_decisions, rank_environment, rank_exits
from services.worker.core.failure_reason import explain_exit
from services.worker.generation.reports import ReportBuilder, RunPosition


def placed(generation: int = 1, node_id: str = "n1", run_id: str = "r", **spec: Any) -> RunPlaced:
    request = RunSpec.model_validate({"name": "x", "command": ["true"], **spec})
    return RunPlaced(
        run_id=run_id,
        generation=generation,
        members=(Member(node_id=node_id, slots=(1, 0), ranks=(2, 3)), Member(node_id="n0", slots=(0, 1), ranks=(0, 1))),
        world_size=4,
        spec=request,
        decided_at_sequence=0,
        decided_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def stopping(generation: int = 1) -> RunStopping:
    return RunStopping(run_id="r", generation=generation, reason="preempted", message="", grace_s=3)


def joined(incarnation: str, node_id: str = "n1") -> NodeJoined:
    return NodeJoined(node_id=node_id, incarnation=incarnation, address="", slots=2, lease_ttl_s=3)


COMMITTED = CheckpointCommitted(
    run_id="r",
    generation=1,
    size_bytes=1,
    checkpoint=CheckpointRef(uri="s3://a-b/c", step=4, epoch=1, samples_consumed=1),
)
RELEASED = RunReleased(run_id="r", generation=1, node_id="n1")
FAILED = RunFailed(run_id="r", reason="it is over")
ELSEWHERE, LOST = placed(2, "n2"), NodeLost(node_id="n1", incarnation="me")
CASES: list[tuple[str, list[Any], list[str]]] = [
    ("ours", [placed()], ["StartGeneration"]),
    ("not ours", [placed(node_id="n2")], []),
    ("twice", [placed(), placed()], ["StartGeneration"]),
    ("older after newer", [placed(2), placed(1)], ["StartGeneration"]),
    ("newer here", [placed(), placed(2)], ["StartGeneration", "DropGeneration", "StartGeneration"]),
    ("newer elsewhere", [placed(), ELSEWHERE], ["StartGeneration", "DropGeneration", "ForgetRun"]),
    ("stop", [placed(), stopping()], ["StartGeneration", "StopGeneration"]),
    ("stop of another generation", [placed(2), stopping(1)], ["StartGeneration"]),
    ("stop of what is not here", [stopping()], []),
    ("committed", [placed(), COMMITTED], ["StartGeneration", "SettleCheckpoint"]),
    ("committed by an old generation", [placed(2), COMMITTED], ["StartGeneration"]),
    ("over", [placed(), RunCompleted(run_id="r", generation=1)], ["StartGeneration", "DropGeneration", "CleanUpRun"]),
    ("failed while it trains", [placed(), FAILED, FAILED], ["StartGeneration", "StopGeneration"]),
    ("joined by somebody else", [joined("other")], ["RejoinCluster"]),
    ("joined by itself", [joined("me"), joined("other", "n2")], []),
    ("said to have ended", [placed(), RELEASED], ["StartGeneration", "DropGeneration"]),
    ("said to have ended elsewhere", [placed(), RELEASED.model_copy(update={"node_id": "n0"})], ["StartGeneration"]),
    ("an old generation said to have ended", [placed(2), RELEASED], ["StartGeneration"]),
    ("lost", [placed(), LOST], ["StartGeneration", "DropGeneration", "RejoinCluster"]),
    (
        "an earlier life lost",
        [placed(), NodeLost(node_id="n1", incarnation="old")],
        ["StartGeneration", "DropGeneration"],
    ),
    ("another node lost", [placed(), NodeLost(node_id="n2", incarnation="me")], ["StartGeneration"]),
    ("stop after lost", [placed(), LOST, stopping()], ["StartGeneration", "DropGeneration", "RejoinCluster"]),
]


def fold(*events: Any) -> node_decisions.NodeState:
    state = node_decisions.NodeState("n1", incarnation="me")
    for sequence, event in enumerate(events, start=1):
        state, _ = node_decisions.decide(state, event, sequence)
    return state


@pytest.mark.parametrize(("events", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_facts_lead_to_decisions(events: list[Any], expected: list[str]) -> None:
    state, decided = node_decisions.NodeState("n1", incarnation="me"), []
    for sequence, event in enumerate(events, start=1):
        state, decisions = node_decisions.decide(state, event, sequence)
        decided += [type(decision).__name__ for decision in decisions]
    assert decided == expected


def test_what_is_left_of_a_failed_run_goes_once_its_ranks_have_ended() -> None:
    state = fold(placed(), FAILED)
    assert node_decisions.end_generation(state, "r", 2) == (state, [])
    over, decisions = node_decisions.end_generation(state, "r", 1)
    assert (dict(over.generations), decisions) == ({}, [node_decisions.CleanUpRun("r")])


def test_a_run_is_not_completed_while_its_ranks_train() -> None:
    completed, state = RunCompleted(run_id="r", generation=1), fold(placed())
    assert "have not ended" in node_decisions.completion_problem(state, completed)
    reported = state.with_generation(replace(state.generations["r"], has_report=True))
    assert node_decisions.completion_problem(reported, completed) == ""
    # The agent's own report, which comes back to it.
    assert node_decisions.decide(reported, RELEASED, 2) == (reported, [])


def test_placement_before_the_join_is_void() -> None:
    state = node_decisions.NodeState("n1", joined_sequence=10)
    assert node_decisions.decide(state, placed(), 9)[1] == []
    assert len(node_decisions.decide(state, placed(), 11)[1]) == 1


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 2000), max_size=12), bad=st.booleans())
def test_journal_read_in_any_parts_gives_each_point_once(cuts: list[int], bad: bool) -> None:
    lines = [{"kind": "metrics", "step": n, "time": n, "values": {"loss": float("nan") if n == 3 else n, "a": 1}}
             for n in range(1, 15)]  # fmt: skip
    raw = [json.dumps(line).encode() + b"\n" for line in lines]
    content = b"".join([*raw[:5], *([b'{"kind": oops\n', b"\xff\n", b"[]\n"] if bad else []), *raw[5:]])
    whose, state, steps, start = journal.JournalSource("r", 1, "n"), journal.RankState(), [], 0
    for end in [*sorted(cut for cut in cuts if cut < len(content)), len(content)]:
        piece = journal.whole_lines(content[start:end])
        found, problems = journal.parse_lines(piece, start)
        assert bad or not problems
        journal.apply_lines(state, (line for _, line in found))
        events = list(journal.progress_events(whose, 0, found))
        # As they are sent: NaN is not equal to itself.
        again = journal.progress_events(whose, 0, journal.parse_lines(piece, start)[0])
        assert [event.model_dump_json() for event in events] == [event.model_dump_json() for event in again]
        steps += [point.step for event in events for point in event.points]
        start += len(piece)
    assert steps == [*range(1, 15)]
    assert state.step == 14


def test_patterns_find_values_and_continue_counting_steps() -> None:
    patterns = metric_patterns.compile_patterns(
        {"loss": r"loss[:=]\s*(\S+)", "acc": r"(?P<step>\d+): acc (?P<value>[\d.]+)"}
    )
    counts: dict[str, int] = {}
    first = list(metric_patterns.match_patterns(patterns, ["loss: 2.5", "loss=nan", "no", "loss= many"], counts))
    second = list(metric_patterns.match_patterns(patterns, ["17: acc 0.5", "loss: 1"], counts))
    assert first[:1] == [(1, "loss", 2.5)]
    assert [(step, str(value)) for step, _, value in first[1:]] == [(2, "nan")]
    assert second == [(17, "acc", 0.5), (4, "loss", 1.0)]
    with pytest.raises(ValueError, match=r"metric_patterns\.x"):
        metric_patterns.compile_patterns({"x": "no group"})


def test_the_last_printed_value_is_the_newest_also_where_steps_begin_anew() -> None:
    patterns = metric_patterns.compile_patterns({"loss": r"step (?P<step>\d+) loss (\S+)", "acc": r"acc (\S+)"})
    lines = ["step 1 loss 1.0", "step 2 loss 0.9", "acc 0.5", "step 1 loss 0.2"]
    matches = list(metric_patterns.match_patterns(patterns, lines, {}))
    state = journal.RankState(step=7)
    event = journal.pattern_event(journal.JournalSource("r", 1, "n"), 0, 0, 0.0, matches, state.step or 0)
    journal.apply_matches(state, matches)
    assert event is not None
    assert (event.points[-1].step, event.points[-1].values) == (1, {"loss": 0.2, "acc": 0.5})
    # A metric that is printed more seldom counts fewer steps: the run is where it was.
    assert (event.step, state.step, state.values) == (7, 7, {"loss": 0.2, "acc": 0.5})


def test_a_script_is_at_the_step_that_it_kept_where_it_has_reported_fewer() -> None:
    """``report(step=i)`` of a loop from 0, and ``checkpoint(step=i + 1)``; or reports of every tenth step."""
    state = journal.RankState()
    journal.apply_lines(state, (MetricsLine(step=359, values={}), KeepLine(path="x", step=365)))
    assert RunPosition.of(placed(), {0: state}).step == 365
    journal.apply_lines(state, (MetricsLine(step=370, values={}), KeepLine(path="x")))
    assert RunPosition.of(placed(), {0: state}).step == 370


def test_output_lines_are_cleaned_for_display() -> None:
    assert journal.log_lines(b"10%\r50%\r100%\nw\xfferld\r\n\n" + b"x" * 5000) == [
        "100%",
        "w�erld",
        "",
        "x" * journal.LINE_MAX_CHARS + " […]",
    ]


def test_rank_inherits_listed_variables_only() -> None:
    agents = {"PATH": "/usr/bin", "HOME": "/root", "AWS_SECRET_ACCESS_KEY": "s", "TRAINBUS_S3_SECRET_KEY": "s"}
    agents |= {"TRAINBUS_NATS_PASSWORD": "s", "NATS_TOKEN": "s", "RANK": "9"}
    place = rank_environment.NodeEnvironment(
        "/l.json", "10.0.0.1", 29, ("/code", "/lib"), "/venv/bin", 8, 2, "eth0", gpus=("GPU-a", "GPU-b")
    )
    event = placed(env={"MODE": "x", "RANK": "7", "PYTHONPATH": "/mine"})
    start, other = rank_environment.build_process_specs(event, event.members[0], agents, place)
    assert "s" not in start.environment.values()
    assert start.environment["PATH"] == "/venv/bin:/usr/bin"
    assert start.environment["PYTHONPATH"] == "/code:/lib:/mine"
    assert (start.environment["MODE"], start.environment["RANK"]) == ("x", "2")
    assert start.environment["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert start.environment["OMP_NUM_THREADS"] == "4"
    assert start.command == other.command == ("true",)
    assert [each.environment["RANK"] for each in (start, other)] == ["2", "3"]
    assert [each.environment["TRAINBUS_JOURNAL"] for each in (start, other)] == ["/rank_2.jsonl", "/rank_3.jsonl"]
    assert start.environment["NODE_RANK"] == "1"


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY")


@pytest.mark.parametrize(
    ("env", "is_ipv6", "expected"),
    [
        pytest.param({}, False, ("eth1", "=eth1", None), id="IPv4"),
        pytest.param({}, True, ("eth1", "=eth1", "AF_INET6"), id="IPv6"),
        pytest.param(dict.fromkeys(INTERFACES, "own"), True, ("own", "own", "own"), id="the request's own"),
    ],
)
def test_ranks_meet_through_the_interface_of_the_announced_address(
    env: dict[str, str], is_ipv6: bool, expected: tuple[str | None, ...]
) -> None:
    place = rank_environment.NodeEnvironment(
        "/l.json", "fd00::1", 29, (), "/venv/bin", 8, 2, interface="eth1", is_ipv6=is_ipv6
    )
    event = placed(env=env)
    found = rank_environment.build_environment(event, event.members[0], 0, {}, place)
    assert tuple(map(found.get, INTERFACES)) == expected
    assert found["MASTER_ADDR"] == "fd00::1"


@pytest.mark.parametrize("host", ["10.0.0.1", "node.lan", "fd00::1"])
def test_the_address_of_a_meeting_point_travels_as_one_text(host: str) -> None:
    text = format_endpoint(host, 17_000)
    assert text == (f"[{host}]:17000" if ":" in host else f"{host}:17000")
    assert parse_endpoint(text) == (host, 17_000)


CHOICES = [
    ("none", {}, "/g1/outputs"),
    ("a folder of the script's", {"TRAINBUS_OUTPUT_DIR": "runs/now"}, "/g1/code/runs/now"),
    ("the whole working folder", {"TRAINBUS_OUTPUT_DIR": "."}, "/g1/outputs"),
    ("outside", {"TRAINBUS_OUTPUT_DIR": "../x"}, "/g1/outputs"),
    ("absolute", {"TRAINBUS_OUTPUT_DIR": "/etc"}, "/g1/outputs"),
]


@pytest.mark.parametrize(("env", "expected"), [case[1:] for case in CHOICES], ids=[case[0] for case in CHOICES])
def test_output_folder_lies_in_the_generations_folder(env: dict[str, str], expected: str) -> None:
    spec = placed(env=env).spec
    chosen = rank_environment.choose_output_dir(spec, PurePosixPath("/g1"), PurePosixPath("/g1/code"))
    assert str(chosen) == expected


def test_long_params_are_in_the_launch_alone() -> None:
    place = rank_environment.NodeEnvironment("/l.json", "10.0.0.1", 29, (), "/venv/bin", 8, 2)
    environments = []
    for value in ("short", "x" * 200_000):
        event = placed(params={"text": value})
        environments.append(rank_environment.build_environment(event, event.members[0], 0, {}, place))
    assert environments[0]["TRAINBUS_PARAMS"] == '{"text": "short"}'
    assert "TRAINBUS_PARAMS" not in environments[1]


ENDS = [
    ("done", [rank_exits.Exit(0, 0, 1.0)], None),
    ("stopped", [rank_exits.Exit(0, 75, 1.0), rank_exits.Exit(1, 0, 1.0)], None),
    ("first is the cause", [rank_exits.Exit(0, 1, 2.0), rank_exits.Exit(1, -9, 1.0)], 1),
]


@pytest.mark.parametrize(("exits", "rank"), [case[1:] for case in ENDS], ids=[case[0] for case in ENDS])
def test_first_failure_is_the_cause(exits: list[rank_exits.Exit], rank: int | None) -> None:
    failure = rank_exits.first_failure(exits)
    assert (failure.rank if failure else None) == rank


MISSES = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31000"
OWN_FAILURES = [
    ("a peer that misses it ends first", [(0, 1, 1.0), (1, 134, 2.0)], {0: MISSES, 1: "ValueError: broken"}, 1),
    ("all miss one of another node", [(0, 1, 1.0), (1, 1, 2.0)], {0: MISSES, 1: MISSES}, 0),
    ("what the agent killed is no cause", [(0, 1, 1.0), (1, -9, 2.0)], {0: MISSES, 1: ""}, 0),
    ("what was killed first is", [(0, 1, 2.0), (1, -9, 1.0)], {0: "KeyError: 1", 1: ""}, 1),
    ("who is done is no cause", [(0, 1, 1.0), (1, 0, 2.0)], {0: MISSES, 1: ""}, 0),
    ("none has failed", [(0, 0, 1.0), (1, 75, 2.0)], {0: MISSES, 1: ""}, None),
]


@pytest.mark.parametrize(
    ("exits", "lines", "rank"), [case[1:] for case in OWN_FAILURES], ids=[case[0] for case in OWN_FAILURES]
)
def test_a_rank_that_misses_a_peer_is_not_the_cause(
    exits: list[tuple[int, int, float]], lines: dict[int, str], rank: int | None
) -> None:
    found = rank_exits.first_own_failure([rank_exits.Exit(*each) for each in exits], lambda rank: [lines[rank]])
    assert (found.rank if found else None) == rank


TORCHRUN = """\
step=2
rank 1 breaks
E1120 failed (exitcode: 3) local_rank: 1 (pid: 7) of binary: python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
python FAILED
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : 3 (pid: 7)
""".splitlines()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(TORCHRUN, (1, 3, tuple(TORCHRUN[:3])), id="torchrun names the rank"),
        pytest.param(TORCHRUN[:-4], (0, 1, tuple(TORCHRUN[:3])), id="a report cut short"),
        pytest.param(["Traceback (most recent call last):", "KeyError"], None, id="an error of its own"),
        pytest.param([f"line {number}" for number in range(99)], None, id="long output"),
        pytest.param([], None, id="no output"),
    ],
)
def test_cause_is_the_output_of_the_script_without_torchruns_report(lines: list[str], expected: Any) -> None:
    failure, tail = rank_exits.find_cause(rank_exits.Exit(0, 1, 9.0), lines)
    assert (failure.rank, failure.code, tail) == (expected or (0, 1, tuple(lines)))


CODE = Path("/runs/r1/code")
SCRIPT_TRACEBACK = """\
epoch 0
Traceback (most recent call last):
  File "/runs/r1/code/train.py", line 9, in <module>
    main()
  File "/runs/r1/code/src/loop.py", line 4, in main
    row["f0"]
    ~~~^^^^^^
  File "/usr/lib/python3.12/collections.py", line 1015, in __getitem__
    raise KeyError(key)
KeyError: 'f0'
""".splitlines()


@pytest.mark.parametrize(
    ("code", "lines", "expected", "is_permanent"),
    [
        pytest.param(1, SCRIPT_TRACEBACK, "KeyError: 'f0' (src/loop.py:4, in main)", False, id="python"),
        pytest.param(1, [*SCRIPT_TRACEBACK, "bye"], "KeyError: 'f0' (src/loop.py:4, in main)", False, id="words after"),
        pytest.param(
            1,
            [f"[rank0]: {line}" for line in SCRIPT_TRACEBACK],
            "KeyError: 'f0' (src/loop.py:4, in main)",
            False,
            id="torch's rank prefix",
        ),
        pytest.param(
            1,
            ['  File "/runs/r1/code/train.py", line 3', "    def f(:", "          ^", "SyntaxError: invalid syntax"],
            "SyntaxError: invalid syntax (train.py:3)",
            True,
            id="syntax",
        ),
        pytest.param(
            1,
            [
                "Traceback (most recent call last):",
                '  File "/runs/r1/code/train.py", line 1, in <module>',
                "    import emoji",
                "ModuleNotFoundError: No module named 'emoji'",
            ],
            "ModuleNotFoundError: No module named 'emoji' (train.py:1)",
            True,
            id="module",
        ),
        pytest.param(
            1,
            [
                "Traceback (most recent call last):",
                '  File "/lib/torch/module.py", line 7, in load_state_dict',
                "    raise RuntimeError(",
                "RuntimeError: Error(s) in loading state_dict for Net:",
                '\tMissing key(s) in state_dict: "a".',
            ],
            'RuntimeError: Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "a".',
            True,
            id="a list below",
        ),
        pytest.param(
            2,
            ["python: can't open file '/runs/r1/code/train.py': [Errno 2] No such file or directory"],
            "there is no file train.py in the project",
            True,
            id="no script",
        ),
        pytest.param(127, ["sh: 1: trian: not found"], "there is no program 'trian'", True, id="no program"),
        pytest.param(126, ["sh: 1: trian: Permission denied"], "'trian' is not executable: `chmod", True, id="no mode"),
        pytest.param(127, ["./a.sh: 3: foo: not found"], "./a.sh: 3: foo: not found", True, id="inner"),
        pytest.param(3, ["loading", "Error: no licence", ""], "Error: no licence (exit code 3)", False, id="other"),
        pytest.param(3, [], "ended with exit code 3 and printed nothing", False, id="silent"),
        pytest.param(
            -9, ["step 3"], "killed by SIGKILL (out of memory?); its last line of output: step 3", False, id="killed"
        ),
        pytest.param(137, ["step 3", "Killed"], "killed by SIGKILL (out of memory?)", False, id="killed below a shell"),
        pytest.param(
            134,
            [*SCRIPT_TRACEBACK, "terminate called without an active exception", "Aborted (core dumped)"],
            "KeyError: 'f0' (src/loop.py:4, in main); then killed by SIGABRT",
            False,
            id="aborts while it exits",
        ),
        pytest.param(
            134,
            ["rank 1 breaks", "terminate called without an active exception", "Aborted"],
            "killed by SIGABRT; its last line of output: rank 1 breaks",
            False,
            id="exits with words and aborts",
        ),
        pytest.param(
            -6,
            [*SCRIPT_TRACEBACK, "step 4", "terminate called after throwing an instance of 'c10::E'", "  what():  bad"],
            "killed by SIGABRT; its last line of output: what():  bad",
            False,
            id="aborts long after an exception",
        ),
        pytest.param(
            139,
            ["step 3", "Segmentation fault"],
            "killed by SIGSEGV; its last line of output: step 3",
            False,
            id="segv",
        ),
    ],
)
def test_a_failed_command_is_explained_by_what_it_printed(
    code: int, lines: list[str], expected: str, is_permanent: bool
) -> None:
    reason = explain_exit(code, lines, ("trian", "--fast"), CODE)
    assert reason.text.startswith(expected)
    assert reason.is_permanent is is_permanent


def test_exit_codes_are_described() -> None:
    assert rank_exits.describe_exit(-9) == rank_exits.describe_exit(137) == "was killed by SIGKILL"
    assert rank_exits.describe_exit(3) == "ended with exit code 3"
    assert rank_exits.is_infrastructure_failure(False, "RuntimeError: EADDRINUSE")
    assert rank_exits.is_infrastructure_failure(False, "OSError: [Errno 28] No space left on device")
    assert not rank_exits.is_infrastructure_failure(True, "RuntimeError: EADDRINUSE")


def test_checkpoint_is_ready_once_all_ranks_have_it_or_at_the_end() -> None:
    def line(step: int) -> CheckpointLine:
        return CheckpointLine(time=0, folder="x", step=step, epoch=1, samples_consumed=0)

    lines = {0: [line(1), line(2)], 1: [line(1)]}
    assert ready_steps(lines, at_end=False) == [1]
    assert ready_steps(lines, at_end=True) == [1, 2]


def test_pathological_pattern_matches_in_linear_time() -> None:
    """Python's own engine would try 2**200 ways here."""
    patterns = metric_patterns.compile_patterns({"x": r"(a+)+$"})
    assert list(metric_patterns.match_patterns(patterns, ["a" * 200 + "!"], {})) == []


@pytest.mark.parametrize(
    ("reason", "then", "expected"),
    [
        ("crashed", "queue", True),
        ("node_lost", "queue", True),
        ("infrastructure", "queue", True),
        ("unfit", "queue", True),
        ("stalled", "queue", True),
        ("start_deadline", "queue", True),
        ("drained", "queue", False),
        ("preempted", "queue", False),
        ("crashed", "fail", False),
    ],
)
def test_stop_says_whether_a_peer_was_lost(reason: Any, then: Any, expected: bool) -> None:
    state, _ = node_decisions.decide(node_decisions.NodeState("n1", incarnation="me"), placed(), 1)
    order = RunStopping(run_id="r", generation=1, reason=reason, message="x", grace_s=0, then=then)
    [stop] = node_decisions.decide(state, order, 2)[1]
    assert isinstance(stop, node_decisions.StopGeneration)
    assert stop.peer_lost is expected


MEMORY = (
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 72.8 TiB for an array with shape (10000000000000,)"
)
STEPPED = journal.RankState(started=StartedLine(time=0, step=0, samples_consumed=0), step=3)


@pytest.mark.parametrize(
    ("error", "at_start", "after_a_step", "if_elastic", "advice"),
    [
        ("ModuleNotFoundError: No module named 'emoji'", True, True, True, "requirements.txt"),
        ("SyntaxError: invalid syntax", True, True, True, ""),
        ("NameError: name 'x' is not defined", True, True, True, ""),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x32 and 33x3)", True, False, True, ""),
        ("RuntimeError: The size of tensor a (3) must match the size of tensor b (4)", True, False, True, ""),
        ("RuntimeError: Given groups=1, weight of size [4, 3, 3, 3], expected input", True, False, True, ""),
        ("RuntimeError: expected target dtype to be Long or Byte, but got Float", True, False, True, ""),
        ("ValueError: Expected input batch_size (3) to match target batch_size (2).", True, False, True, ""),
        ("IndexError: Target 9 is out of bounds.", True, False, True, ""),
        ("TypeError: f() takes 0 positional arguments but 1 was given", True, False, True, ""),
        ("TypeError: 'NoneType' object is not subscriptable", False, False, False, ""),
        ("MemoryError", True, False, False, "smaller batch"),
        (MEMORY, True, False, False, "smaller batch"),
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory",
            True,
            False,
            False,
            "smaller batch",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", True, False, False, "more slots"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False, False, False, ""),
        ("KeyError: 'f0'", False, False, False, ""),
        ("ConnectionError: refused", False, False, False, ""),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'x'", False, False, False, ""),
    ],
)
def test_an_error_that_comes_again_is_permanent_whether_a_script_or_a_task_has_it(
    error: str, at_start: bool, after_a_step: bool, if_elastic: bool, advice: str
) -> None:
    printed = ["Traceback (most recent call last):", '  File "/runs/r1/code/train.py", line 1, in <module>', error]
    for lines, ended in ((printed, None), ([], EndedLine(time=0, outcome="failed", error=f"{error} (train.py:1)"))):
        for state, elastic, expected in (
            (journal.RankState(), False, at_start),
            (journal.RankState(), True, if_elastic),
            (STEPPED, False, after_a_step),
        ):
            event = placed(slots={"min": 1, "max": 2} if elastic else 1)
            ranks = {2: state.model_copy(update={"ended": ended})}
            report = ReportBuilder(event, "n1").crashed(rank_exits.Exit(2, 1, 0.0), ranks, lines, CODE)
            assert report.permanent is expected, report
            assert report.reason.startswith(f"{error} (train.py:1)")
            assert advice in report.reason


@pytest.mark.parametrize(("code", "could_not_start"), [(1, True), (-9, False)])
def test_only_a_rank_that_ends_itself_could_not_start(code: int, could_not_start: bool) -> None:
    """A signal says nothing about the next attempt: a run that is killed twice starts a third time."""
    report = ReportBuilder(placed(), "n1").crashed(rank_exits.Exit(2, code, 0.0), {2: journal.RankState()}, ())
    assert (report.made_no_step, report.permanent) == (could_not_start, False)


def test_a_node_that_knows_of_no_step_names_none() -> None:
    """Of a script that goes on from step 24, only the node of rank 0 sees how far it gets."""
    resumed = CheckpointRef(uri="s3://models/24.json", step=24, epoch=0, samples_consumed=0)
    builder = ReportBuilder(placed().model_copy(update={"resume": resumed}), "n1")
    assert builder.succeeded({1: journal.RankState()}, ()).step == 0
    assert builder.succeeded({0: journal.RankState()}, ()).step == 24
    assert builder.succeeded({1: journal.RankState(step=30)}, ()).step == 30
