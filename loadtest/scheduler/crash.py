"""Kill -9 of the leading scheduler, again and again, while messages come twice and late: is a slot ever given twice?

    python -m loadtest.scheduler.crash --rounds 100

Two schedulers (processes of their own) share a real nats-server, each behind a link that delays what it carries by up
to a quarter of a second; every fact is published twice and every request handled twice. In each round the one that
leads is killed; in every third it is stopped first (SIGSTOP) until the other one has taken over and placed something,
then set going again (a zombie that believes to lead), and killed a little later. Each process is started with another
policy, and operators change the policy all the while, some of them without knowing what the others did. Afterwards
every request must have become one run that ended once; the log is read by a checker that shares no code with the
scheduler; every recorded decision is made again from the log and compared; every change of policy must have been asked
for, answered once, and in force for all decisions after it; and an instance that begins with a snapshot must come to
the same state.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog
from nats.js.errors import KeyNotFoundError
from rich.progress import Progress

from contracts import subjects, topology
from contracts.base import request_id_for, run_id_for
from contracts.envelope import RawMessage, type_for_subject
from contracts.events.capacity import PolicyAdopted
from contracts.events.train import AdoptPolicyRequested
from loadtest.common import report
from loadtest.run_facts import SOURCE
from loadtest.scheduler.bench import connected
from loadtest.scheduler.check import Checker
from loadtest.scheduler.players import Players
from loadtest.server import nats_server
from services.kit.bus import Bus
from services.kit.concurrency import cancel_and_wait
from services.kit.follow import follow
from services.kit.settings import Settings
from services.scheduler import policies
from services.scheduler.cluster_cache import FOLLOWED, ClusterCache
from services.scheduler.snapshot_process import take_snapshot
from trainbus.embedded.servers import NatsServer
from trainbus.operate.history.cycles import cycle_key_of
from trainbus.operate.history.log import Entry, entry_of
from trainbus.operate.history.verification import verify_log

NODES, SLOTS = 6, 4
LEASE_TTL_S = 0.8
#: Messages of a link are late by up to so much; a few are late by ten times that.
LATE_S = 0.025
SELDOM = 0.02
#: Requests for runs a second, and for policies; part of the latter that replace one that is not in force any more.
RATE = 6.0
POLICY_RATE = 2.0
STALE = 0.3
#: What processes are started with, and operators change to.
POLICIES = ("default", "easy-backfill", "even-wait", "fifo", "fifo-skip", "least-attained")
#: After the last round runs that wait are still worked off; nothing ending for so long is the end of it.
PATIENCE_S = 60.0
#: A round that takes longer than this ends the trial: no instance leads any more.
ROUND_LIMIT_S = 180.0
CHUNK = 1 << 16


class Link:
    """Carries bytes to a server and back, late. Their order stays: a connection that mixes it up is no connection."""

    def __init__(self, port: int, late_s: float, rng: random.Random) -> None:
        self.port, self._late_s, self._rng = port, late_s, rng
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await cancel_and_wait(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        for source, drain in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._carry(source, drain))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, drain: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await source.read(CHUNK):
                late_s = self._rng.uniform(0, self._late_s)
                await asyncio.sleep(late_s * 10 if self._rng.random() < SELDOM else late_s)
                drain.write(chunk)
                await drain.drain()
        drain.close()


class Scheduler:
    """A scheduler in a process of its own, behind a link of its own."""

    def __init__(self, name: str, folder: Path, server: NatsServer, rng: random.Random, late_s: float) -> None:
        self.name, self._folder, self._policy = name, folder, rng.choice(POLICIES)
        self._link = Link(server.port, late_s, rng)
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        await self._link.open()
        environment = {
            **os.environ,
            "TRAINBUS_NATS_URL": self._link.url,
            "TRAINBUS_HTTP_PORT": "-1",
            "TRAINBUS_INSTANCE": self.name,
            "TRAINBUS_LEASE_TTL_S": str(LEASE_TTL_S),
            "TRAINBUS_INJECT_DUPLICATES": "true",
            "TRAINBUS_POLICY": self._policy,
        }
        with (self._folder / "schedulers.log").open("ab") as log:
            command = (sys.executable, "-m", "services.scheduler")
            self.process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)

    def send(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        if self.process is not None:
            await self.process.wait()
        await self._link.close()


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    rounds: int = 0
    zombies: int = 0
    requests: int = 0
    policy_requests: int = 0
    #: Those of them that were adopted; the others were refused.
    adoptions: int = 0
    facts: int = 0
    placements: int = 0
    takeover_s: list[float] = field(default_factory=list)
    #: How many facts stand in the log as part of a batch.
    batched: int = 0
    decisions: int = 0
    problems: list[str] = field(default_factory=list)


class Trial:
    """One server, two schedulers, agents, and a process that kills."""

    def __init__(self, bus: Bus, server: NatsServer, folder: Path, seed: int, late_s: float = LATE_S) -> None:
        self.bus, self.server, self.folder = bus, server, folder
        self.rng, self._late_s = random.Random(seed), late_s
        self.requested: dict[str, str] = {}
        #: Requests for a policy, by the id of their answer.
        self.asked_policies: set[str] = set()
        self.outcome = Outcome()
        self._schedulers: dict[str, Scheduler] = {}
        self._started = 0

    async def run(self, rounds: int) -> Outcome:
        """Kill ``rounds`` leaders, let everything end, and check the log."""
        players = Players(self.bus, mean_s=0.3)
        await players.join(NODES, SLOTS)
        playing = asyncio.create_task(players.play())
        asking = [asyncio.create_task(self._ask_for_runs()), asyncio.create_task(self._ask_for_policies())]
        try:
            for _ in range(2):
                await self._start()
            await self._placed_more(1)
            with Progress(transient=True) as progress:
                for _ in progress.track(range(rounds), description="leaders killed"):
                    try:
                        await self._round()
                    except TimeoutError:
                        end_of_log = (self.folder / "schedulers.log").read_text()[-2000:]
                        problem = f"no instance led within {ROUND_LIMIT_S:.0f} s after {self.outcome.rounds} rounds"
                        self.outcome.problems.append(f"{problem}: {end_of_log}")
                        break
            await cancel_and_wait(*asking)
            await self._all_over()
        finally:
            await cancel_and_wait(*asking, playing)
            for scheduler in self._schedulers.values():
                await scheduler.kill()
        await self._judge()
        return self.outcome

    # -- what happens --------------------------------------------------------

    async def _start(self) -> None:
        self._started += 1
        scheduler = Scheduler(f"s{self._started}", self.folder, self.server, self.rng, self._late_s)
        self._schedulers[scheduler.name] = scheduler
        await scheduler.start()

    async def _ask_for_policies(self) -> None:
        """Change the policy again and again, each request twice; some know only what was in force before."""
        adoptions, known = PolicyAdopted.subject_filter(), [""]
        while True:
            await asyncio.sleep(self.rng.expovariate(POLICY_RATE))
            if (last := await self.bus.get_last_message(adoptions)) is None:
                continue
            if last.event.digest != known[-1]:
                known.append(last.event.digest)
            event_id = f"policy-{len(self.asked_policies)}"
            replaces = known[-2] if self.rng.random() < STALE and known[-2] else known[-1]
            request = AdoptPolicyRequested(policy=policies.load(self.rng.choice(POLICIES)), replaces=replaces)
            self.asked_policies.add(request_id_for(SOURCE, request.type, event_id))
            for message_id in (event_id, f"{event_id}-again"):
                headers = {"ce-source": SOURCE, "ce-id": event_id, "Nats-Msg-Id": message_id}
                await self.bus.js.publish(
                    request.subject, request.model_dump_json().encode(), headers=headers, timeout=30
                )

    async def _ask_for_runs(self) -> None:
        """Requests of all sizes, each of them twice."""
        while True:
            number = len(self.requested)
            event_id = f"crash-{number}"
            slots: Any = self.rng.choice([1, 1, 1, 2, 3, {"min": 1, "max": 4}, {"min": 4, "max": 8}, 12])
            body = {"name": event_id, "command": ["true"], "slots": slots, "grace_s": 1}
            body["priority"] = self.rng.choice([0, 0, 0, 5])
            self.requested[run_id_for(SOURCE, event_id)] = event_id
            for message_id in (event_id, f"{event_id}-again"):
                headers = {"ce-source": SOURCE, "ce-id": event_id, "Nats-Msg-Id": message_id}
                await self.bus.js.publish("train.requested", json.dumps(body).encode(), headers=headers, timeout=30)
            await asyncio.sleep(self.rng.expovariate(RATE))

    async def _round(self) -> None:
        leader = await self._leader()
        before = await self._placements()
        begun = time.monotonic()
        if self.outcome.rounds % 3 == 2:
            # It sleeps until another has placed, and then goes on as if nothing had happened.
            leader.send(signal.SIGSTOP)
            await self._another_leader(leader)
            await self._placed_more(self.rng.randint(1, 5))
            leader.send(signal.SIGCONT)
            await asyncio.sleep(self.rng.uniform(0, 0.6))
            self.outcome.zombies += 1
        else:
            await asyncio.sleep(self.rng.uniform(0, 0.5))
            begun = time.monotonic()
        del self._schedulers[leader.name]
        await leader.kill()
        await self._start()
        await self._another_leader(leader)
        self.outcome.takeover_s.append(time.monotonic() - begun)
        await self._placed_more(1, before)
        self.outcome.rounds += 1

    async def _holder(self) -> str:
        with contextlib.suppress(KeyNotFoundError):
            bucket = await self.bus.open_bucket(topology.LEASES)
            entry = await bucket.get("scheduler")
            return str(json.loads(entry.value or b"{}").get("holder", "")).partition("-")[0]
        return ""

    async def _leader(self) -> Scheduler:
        return await self._another_leader(None)

    async def _another_leader(self, but: Scheduler | None) -> Scheduler:
        async with asyncio.timeout(ROUND_LIMIT_S):
            while True:
                name = await self._holder()
                if name in self._schedulers and (but is None or name != but.name):
                    return self._schedulers[name]
                await asyncio.sleep(0.02)

    async def _placements(self) -> int:
        return await self.bus.get_last_sequence("run.*.placed")

    async def _placed_more(self, count: int, before: int | None = None) -> None:
        """Wait until so many placements more stand in the log."""
        async with asyncio.timeout(ROUND_LIMIT_S):
            for _ in range(count):
                before = await self._placements() if before is None else before
                while (now := await self._placements()) <= before:  # noqa: ASYNC110 (the log is what counts)
                    await asyncio.sleep(0.02)
                before = now

    async def _all_over(self) -> None:
        """Wait until the number of runs that are over is that of the requests, and each for a policy is answered."""
        over, since = -1, time.monotonic()
        while time.monotonic() < since + PATIENCE_S:
            found = await self._count_messages("run.*.completed") + await self._count_answers()
            if found >= len(self.requested) + len(self.asked_policies):
                await asyncio.sleep(1.0)
                return
            if found != over:
                over, since = found, time.monotonic()
            await asyncio.sleep(0.2)
        self.outcome.problems.append(f"not all runs came to their end: none for {PATIENCE_S:g} s")

    async def _count_answers(self) -> int:
        """Return how many requests for a policy are answered: all adoptions but the first one, and refusals."""
        adopted = await self._count_messages(PolicyAdopted.subject_filter())
        return adopted - 1 + await self._count_messages(subjects.refused())

    async def _count_messages(self, subject: str) -> int:
        info = await self.bus.js.stream_info("FACTS", subjects_filter=subject)
        return sum((info.state.subjects or {}).values())

    # -- the log -------------------------------------------------------------

    async def _judge(self) -> None:
        outcome, checker = self.outcome, Checker()
        entries: list[Entry] = []
        ended: Counter[str] = Counter()
        async for raw, headers in self._log():
            outcome.facts += 1
            outcome.batched += "Nats-Batch-Id" in headers
            outcome.placements += raw.subject.endswith(".placed")
            name = raw.subject.rsplit(".", 1)[1]
            if name in ("completed", "failed", "cancelled", "rejected"):
                ended[raw.subject.split(".")[1]] += 1
            at = raw.stored_at.isoformat() if raw.stored_at is not None else ""
            kind = type_for_subject(raw.subject)
            checker.read({"type": kind, "sequence": raw.sequence, "time": at, "data": json.loads(raw.body)})
            entries.append(entry_of(raw))
        checker.nothing_lost()
        await self._judge_policies(entries)
        outcome.requests = len(self.requested)
        outcome.problems += checker.problems
        outcome.problems += [f"{run_id} ended {ended[run_id]} times" for run_id in self.requested if ended[run_id] != 1]
        outcome.problems += [f"{run_id} was never asked for" for run_id in ended if run_id not in self.requested]
        counts, differences = verify_log(entries)
        outcome.decisions = counts.decisions
        outcome.problems += [f"replay: {difference}" for difference in differences[:20]]
        await self._compare_snapshot()

    async def _judge_policies(self, entries: list[Entry]) -> None:
        """Check that each request for a policy has one answer, and that what was adopted last was in force."""
        outcome, in_force = self.outcome, [(0, "")]
        answers: Counter[str] = Counter()
        for entry in entries:
            if isinstance(entry.fact, PolicyAdopted):
                in_force.append((entry.sequence, entry.fact.digest))
                if entry.fact.origin != "setting" or len(in_force) > 2:
                    answers[entry.fact.request_id] += 1
            elif (key := cycle_key_of(entry.fact)) is not None:
                _, digest = in_force[bisect_right(in_force, (key.at_sequence, "~")) - 1]
                if digest != key.policy:
                    outcome.problems.append(f"{entry.subject} ({entry.sequence}) was decided by another policy")
        outcome.policy_requests, outcome.adoptions = len(self.asked_policies), sum(answers.values())
        for message in await self.bus.read_history(subjects.refused()):
            answers[message.event.request_id] += 1
        wrong = {each: answers[each] for each in answers.keys() | self.asked_policies if answers[each] != 1}
        outcome.problems += [f"the request {each!r} for a policy has {count} answers" for each, count in wrong.items()]
        outcome.problems += [f"{each!r} was never asked for" for each in answers.keys() - self.asked_policies]

    async def _log(self) -> AsyncIterator[tuple[RawMessage, dict[str, str]]]:
        messages = follow(lambda: self.bus.nc, "FACTS", FOLLOWED, 1, idle_s=0.2, until_caught_up=True)
        async for batch in messages:
            for msg in batch:
                at, headers = msg.metadata, msg.headers or {}
                yield RawMessage(msg.subject, msg.data, headers, "FACTS", at.sequence.stream, at.timestamp), headers

    async def _compare_snapshot(self) -> None:
        async with folded(self.bus) as whole:
            await take_snapshot(Settings(nats_url=self.server.url, http_port=-1))
            async with folded(self.bus) as recalled:
                if not recalled.snapshot_sequence:
                    self.outcome.problems.append("no snapshot was found")
                if recalled.cluster != whole.cluster:
                    self.outcome.problems.append("snapshot and tail are not the whole log")


@asynccontextmanager
async def folded(bus: Bus) -> AsyncIterator[ClusterCache]:
    """The log, folded."""
    cache = ClusterCache(bus)
    task = asyncio.create_task(cache.follow())
    try:
        await asyncio.wait_for(cache.caught_up.wait(), 60)
        yield cache
    finally:
        await cancel_and_wait(task)


async def trial(rounds: int, folder: Path, seed: int = 0, late_s: float = LATE_S) -> Outcome:
    """Kill ``rounds`` leaders on a server of its own."""
    with nats_server(folder) as server:
        async with connected(server) as bus:
            return await Trial(bus, server, folder, seed, late_s).run(rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="scheduler-crash", help="name of the result file")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory(prefix="trainbus-crash-") as name:
        outcome = asyncio.run(trial(given.rounds, Path(name), given.seed))
    # Nobody took over where the very first round failed.
    takeover_s = statistics.median(outcome.takeover_s) if outcome.takeover_s else None
    rows = [
        ("leaders killed", f"{outcome.rounds}", f"{outcome.zombies} of them stopped and set going again before"),
        ("runs asked for, each twice", f"{outcome.requests:,}", ""),
        ("policies asked for, each twice", f"{outcome.policy_requests:,}", f"{outcome.adoptions:,} adopted"),
        ("facts; placements", f"{outcome.facts:,}; {outcome.placements:,}", f"{outcome.batched:,} facts in batches"),
        (
            "kill to the next leader, median",
            f"{takeover_s:.2f} s" if takeover_s is not None else "never",
            f"lease {LEASE_TTL_S:g} s",
        ),
        ("decisions made again", f"{outcome.decisions:,}", "all the same" if not outcome.problems else ""),
        ("violations", f"{len(outcome.problems)}", "0"),
    ]
    figures = asdict(outcome)
    del figures["takeover_s"]
    report(given.name, rows, {**figures, "takeover_median_s": takeover_s})
    for problem in outcome.problems[:20]:
        print(problem)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
