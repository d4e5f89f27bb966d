"""The embedded stack for real: what a person types, what dies and comes back, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainbus.embedded.launch import StackError, StackInfo, StackProcess, read_stack
from trainbus.embedded.layout import StackOptions, stack_file
from trainbus.embedded.supervisor import lock

pytestmark = pytest.mark.shell

READY_S = 90.0


class Up:
    """``trainbus up`` on a data folder of its own."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self.data_dir = data_dir
        self.output = data_dir.with_suffix(".out")
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainbus", "up", "--nodes", "1", "--slots", "1", *self.where, *options],
                stdout=out,
                stderr=out,
                env=environment(),
                start_new_session=True,
            )

    @property
    def where(self) -> list[str]:
        return ["--data-dir", str(self.data_dir)]

    def wait_ready(self) -> StackInfo:
        def ready() -> StackInfo | None:
            assert self.process.poll() is None, self.output.read_text()
            info = read_stack(self.data_dir)
            return info if info is not None and info.ready else None

        return until(ready, READY_S, lambda: self.output.read_text())

    def info(self) -> StackInfo:
        info = read_stack(self.data_dir)
        assert info is not None
        return info

    def pid(self, name: str) -> int | None:
        return next(each["pid"] for each in self.info().processes if each["name"] == name)

    def everything(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trainbus", *arguments, *self.where]
        return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment())

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TRAINBUS_")}


def until(
    condition: Callable[[], Any], timeout_s: float = 90.0, explain: Callable[[], object] = lambda: "timed out"
) -> Any:
    """The first true value of ``condition``."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)
    return value


def living(processes: list[psutil.Process]) -> list[str]:
    found = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{each.pid} {' '.join(each.cmdline())[:120]}")
    return found


def test_what_a_killed_stack_said_of_itself_is_not_taken_for_the_next_ones(tmp_path: Path) -> None:
    urls = dict.fromkeys(("nats_url", "s3_endpoint", "gateway_url", "mlflow_tracking_uri"), "http://127.0.0.1:1")
    said = {"state": "ready", "pid": 1, "nodes": 1, "slots": 1, "processes": [], **urls}
    stack_file(tmp_path).write_text(json.dumps(said))
    assert read_stack(tmp_path) is None
    held = lock(tmp_path)
    assert held is not None
    with held:
        assert read_stack(tmp_path) is None


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    stack = Up(tmp_path_factory.mktemp("stack") / "data", "--without", "evaluation")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


def test_it_says_what_runs_where(up: Up) -> None:
    text = until(lambda: "ready after" in (out := up.output.read_text()) and out)
    names = {each["name"] for each in up.info().processes}
    services = {"scheduler", "ingestion", "sharding", "checkpoint", "tracking", "tuning", "serving", "gateway"}
    assert names == {"nats", "s3", *services, "node-0"}
    assert all(name in text for name in names)
    assert up.info().gateway_url in text
    # A person who looks for a service with ps finds it by its name.
    pid = up.pid("scheduler")
    assert pid is not None
    if sys.platform == "linux":
        assert psutil.Process(pid).cmdline()[0] == "trainbus service scheduler"


def test_keys_are_the_owners_alone_and_in_no_log(up: Up) -> None:
    secrets = up.data_dir / "secrets.json"
    assert secrets.stat().st_mode & 0o077 == 0
    secret = json.loads(secrets.read_text())["s3_secret_key"]
    logs = [*up.data_dir.glob("logs/*.log"), up.data_dir / "stack.json", up.output]
    assert [path.name for path in logs if secret in path.read_text(errors="replace")] == []


def test_a_service_needs_little_memory_and_no_torch(up: Up) -> None:
    pid = up.pid("scheduler")
    assert pid is not None
    process = psutil.Process(pid)
    assert process.memory_info().rss < 120 * 2**20
    assert not [each.path for each in process.memory_maps() if "torch" in each.path]


@pytest.mark.parametrize("options", [[], ["-d"]])
def test_a_second_up_shows_the_stack_that_runs(up: Up, options: list[str]) -> None:
    second = up.cli("up", *options)
    assert second.returncode == 0, second.stderr
    assert f"already up (process {up.info().pid}): 1 nodes of 1 slots" in second.stdout
    assert up.info().gateway_url in second.stdout
    assert "trainbus down" in second.stdout


def test_any_folder_finds_the_stack(up: Up, tmp_path: Path) -> None:
    def cli(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trainbus", *arguments]
        given = environment() | variables
        return subprocess.run(command, capture_output=True, text=True, timeout=150, env=given, cwd=tmp_path)

    assert cli("nodes").returncode == 0
    (known,) = json.loads(cli("stacks", "--json").stdout)
    assert (known["name"], Path(known["data_dir"])) == ("data", up.data_dir.resolve())
    assert cli("nodes", "--stack", "data").returncode == 0
    unknown = cli("nodes", TRAINBUS_STACK="other")
    assert unknown.returncode == 2
    assert "no stack 'other'" in unknown.stderr
    # A stack of this folder wins, also where it does not run.
    (tmp_path / ".trainbus").mkdir()
    (tmp_path / ".trainbus" / "stack.lock").touch()
    own = cli("nodes")
    assert own.returncode == 1
    assert "no stack runs on" in own.stderr
    assert "--stack" in own.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["ps"], 0, "no runs yet"),
        (["ps", "--json"], 0, "[]"),
        (["nodes"], 0, "node-0"),
        (["events"], 0, "joined"),
        (["models", "--json"], 0, "[]"),
        (["models"], 0, "no champions yet"),
        (["datasets"], 0, "no datasets yet"),
        (["show", "nothing"], 2, "there is no run 'nothing'"),
        (["drain", "node-9"], 2, "there are node-0"),
        (["checkpoints", "restore", "x"], 2, "name one checkpoint: RUN@best"),
        (["submit", "."], 2, "say what to run"),
        (["service", "mailer"], 2, "there is no service 'mailer'"),
        (["service", "scheduler"], 2, "up --without scheduler"),
        (["up", "--without", "mailer"], 0, "already up"),
        (["nodes", "--stack", "data"], 2, "either --stack or --data-dir"),
    ],
)
def test_commands_and_their_exit_codes(up: Up, arguments: list[str], code: int, text: str) -> None:
    done = up.cli(*arguments)
    assert (done.returncode, text in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


def test_without_a_stack_a_command_says_how_to_start_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainbus", "ps", "--data-dir", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment())
    assert done.returncode == 1
    assert f"start one with `trainbus up --data-dir {tmp_path / 'none'}`" in done.stderr


def test_submit_follows_a_command_to_its_end(up: Up, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys; print('hello from the run'); sys.exit(int(sys.argv[1]))\n")
    good = up.cli("submit", str(tmp_path), "--command", "python job.py 0", "--name", "good", "--follow")
    assert good.returncode == 0, good.stdout + good.stderr
    bad = up.cli("submit", str(tmp_path), "--command", "python job.py 7", "--name", "bad", "--id", "one", "--follow")
    assert bad.returncode == 1
    again = up.cli("submit", str(tmp_path), "--command", "python job.py 7", "--name", "bad", "--id", "one")
    assert again.stdout.split()[0] == bad.stdout.split()[0]
    runs = {each["name"]: each for each in json.loads(up.cli("ps", "--json").stdout)}
    assert (runs["good"]["state"], runs["bad"]["state"], len(runs)) == ("completed", "failed", 2)
    assert "hello from the run" in up.cli("logs", "good").stdout
    shown = up.cli("show", runs["good"]["run_id"][:8])
    assert shown.returncode == 0
    assert "placed on 1 slot of node-0" in shown.stdout
    why = up.cli("why", "bad").stdout
    assert "(bad) failed: hello from the run (exit code 7); after 2 attempts (twice the same before" in why
    hint = up.cli("show", "godo")
    assert "did you mean good?" in hint.stderr
    replayed = up.cli("replay", "--json")
    assert json.loads(replayed.stdout)["runs"] == 2, replayed.stderr


def find_problems(up: Up) -> set[str]:
    """Return what the doctor shows in red, after it named every service."""
    done = up.cli("doctor", "--json")
    results = json.loads(done.stdout)
    services = {"scheduler", "ingestion", "sharding", "checkpoint", "tracking", "gateway", "evaluation", "node-0"}
    assert services <= {each["what"] for each in results}
    missing = [each for each in results if each["grade"] == "missing"]
    assert done.returncode == bool(missing)
    assert all(each["remedy"] for each in missing)
    return {each["what"] for each in missing}


def test_a_left_out_service_takes_its_place(up: Up) -> None:
    assert find_problems(up) == {"evaluation"}
    service = subprocess.Popen(
        [sys.executable, "-m", "trainbus", "service", "evaluation", *up.where],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert service.stderr is not None
    try:
        lines = iter(service.stderr.readline, "")
        assert any('"service started"' in line for line in lines)
        until(lambda: find_problems(up) == set())
    finally:
        service.terminate()
        assert service.wait(60) == 0


@pytest.mark.parametrize("name", ["gateway", "nats", "s3"])
def test_what_is_killed_comes_back(up: Up, name: str) -> None:
    before = up.info()
    pid = up.pid(name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: up.pid(name) not in (None, pid))
    until(lambda: find_problems(up) == {"evaluation"})
    after = up.info()
    assert (after.nats_url, after.s3_endpoint) == (before.nats_url, before.s3_endpoint)
    [restarts] = [each["restarts"] for each in after.processes if each["name"] == name]
    assert restarts >= 1


def test_stopping_is_clean_and_the_data_is_there_again(up: Up) -> None:
    processes = up.everything()
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0, up.output.read_text()
    assert living(processes) == []
    assert "is killed" not in up.output.read_text().split("stopping")[-1]
    assert read_stack(up.data_dir) is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel helps on Linux alone")
@pytest.mark.parametrize("victim", ["launcher", "supervisor"])
def test_a_kill_leaves_nothing_behind(victim: str, tmp_path: Path) -> None:
    stack = Up(tmp_path / "data", "--without", "tracking", "--without", "gateway", "--without", "evaluation")
    try:
        supervisor = stack.wait_ready().pid
        processes = until(lambda: len(found := stack.everything()) > 8 and found)
        if victim == "supervisor":
            os.kill(supervisor, signal.SIGKILL)
        else:
            stack.process.kill()
        stack.process.wait(60)
        # A warm process that was still importing when its agent ended hears of nothing; it goes after a minute alone.
        until(lambda: not living(processes), 90.0, lambda: living(processes))
        assert read_stack(stack.data_dir) is None
    finally:
        stack.end()


def test_asked_to_stop_while_it_starts_it_stops(tmp_path: Path) -> None:
    stack = Up(tmp_path / "data")
    try:
        until(lambda: read_stack(stack.data_dir), READY_S, lambda: stack.output.read_text())
        stack.process.send_signal(signal.SIGINT)
        assert stack.process.wait(60) == 0, stack.output.read_text()
        assert "did not start" not in stack.output.read_text()
    finally:
        stack.end()


def test_a_stack_that_does_not_get_ready_names_the_parts(tmp_path: Path) -> None:
    stack = StackProcess(StackOptions(tmp_path / "data", 1, 1), output=tmp_path / "out", detach=True)
    stack.start()
    try:
        until(lambda: read_stack(tmp_path / "data"), READY_S)
        with pytest.raises(StackError, match=r"(?s)Not ready yet:.*\n  gateway: see .*gateway\.log"):
            stack.wait_ready(timeout_s=0)
    finally:
        stack.stop()
