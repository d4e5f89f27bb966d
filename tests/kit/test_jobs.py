"""Long work: durable, claimed once, taken over when its runner dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import nats.errors
import pytest
from nats.js.kv import KeyValue

from contracts import topology
from contracts.events.run import RunCancelled
from services.kit.bus import Bus, PoisonMessage, TransientError
from services.kit.concurrency import cancel_and_wait
from services.kit.jobs import JobQueue
from tests.kit.support import until
from trainbus.embedded.servers import NatsServer


class Recorder:
    def __init__(self) -> None:
        self.worked: list[str] = []
        self.given_up: list[tuple[str, str]] = []

    async def work(self, message: Any) -> None:
        self.worked.append(message.event.run_id)

    async def give_up(self, message: Any, reason: str) -> None:
        self.given_up.append((message.event.run_id, reason))


async def make_message(bus: Bus, run_id: str) -> Any:
    await bus.publish(RunCancelled(run_id=run_id, reason="x"))
    return await bus.get_last_message(f"run.{run_id}.cancelled")


async def empty(bus: Bus) -> bool:
    jobs: dict[str, bytes | None] = {}
    async for batch in bus.follow_bucket(topology.JOBS, ">", idle_s=1.0, until_caught_up=True):
        jobs.update({entry.key: entry.value for entry in batch})
    return not any(value is not None for value in jobs.values())


async def test_a_job_runs_once_however_often_it_is_submitted(bus: Bus) -> None:
    recorder = Recorder()
    runners = [JobQueue(bus, "q", recorder.work, recorder.give_up) for _ in range(3)]
    tasks = [asyncio.create_task(runner.run()) for runner in runners]
    job = await make_message(bus, "r1")
    await asyncio.gather(*(runner.submit("r1", job) for runner in runners))
    await until(lambda: recorder.worked == ["r1"], "the job")
    await until(lambda: empty(bus), "the job to be taken off")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert recorder.worked == ["r1"]


async def test_a_job_of_a_dead_runner_is_taken_over(bus: Bus) -> None:
    recorder = Recorder()
    stuck = asyncio.Event()

    async def never_ends(_: Any) -> None:
        stuck.set()
        await asyncio.Event().wait()

    dying = JobQueue(bus, "q", never_ends, recorder.give_up, ttl_s=0.6)
    task = asyncio.create_task(dying.run())
    await dying.submit("r1", await make_message(bus, "r1"))
    await stuck.wait()
    task.cancel()  # its claim stays behind, no longer renewed
    await asyncio.gather(task, return_exceptions=True)
    heir = asyncio.create_task(JobQueue(bus, "q", recorder.work, recorder.give_up, ttl_s=0.6).run())
    await until(lambda: recorder.worked == ["r1"], "the takeover")
    heir.cancel()
    await asyncio.gather(heir, return_exceptions=True)


class Silent:
    """A bucket whose server stores a renewal and does not say so, nor answers the question what is there."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket, self.renewals, self.questions = bucket, 0, 0
        self.recovered = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    async def update(self, key: str, value: bytes, last: int) -> int:
        revision = await self._bucket.update(key, value, last=last)
        self.renewals += 1
        if self.renewals == 2:  # the first is the claim
            raise nats.errors.TimeoutError
        if self.questions > 1:
            self.recovered.set()
        return revision

    async def get(self, key: str) -> KeyValue.Entry:
        self.questions += 1
        if self.questions == 1:
            raise nats.errors.TimeoutError
        return await self._bucket.get(key)


async def test_a_renewal_without_an_answer_costs_no_work(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, recorder = Silent(await bus.open_bucket(topology.JOBS)), Recorder()
    begun: list[str] = []

    async def work(job: Any) -> None:
        begun.append(job.event.run_id)
        await silent.recovered.wait()
        await recorder.work(job)

    async def bucket() -> Any:
        return silent

    jobs = JobQueue(bus, "q", work, recorder.give_up, ttl_s=0.3)
    monkeypatch.setattr(jobs, "_bucket", bucket)
    task = asyncio.create_task(jobs.run())
    await jobs.submit("r1", await make_message(bus, "r1"))
    await until(lambda: recorder.worked == ["r1"], "the job")
    await cancel_and_wait(task)
    assert begun == ["r1"]


async def test_transient_errors_are_retried_and_lasting_ones_are_published(bus: Bus) -> None:
    recorder = Recorder()
    tries: dict[str, int] = {}

    async def work(job: Any) -> None:
        run_id = job.event.run_id
        tries[run_id] = tries.get(run_id, 0) + 1
        if run_id == "poison":
            raise PoisonMessage("the source is empty")
        if run_id == "stubborn" or tries[run_id] < 2:
            raise TransientError("the store is away")
        recorder.worked.append(run_id)

    jobs = JobQueue(bus, "q", work, recorder.give_up, max_attempts=2, concurrency=3)
    task = asyncio.create_task(jobs.run())
    for run_id in ("passing", "stubborn", "poison"):
        await jobs.submit(run_id, await make_message(bus, run_id))
    await until(lambda: recorder.worked == ["passing"] and len(recorder.given_up) == 2, "all outcomes")
    await until(lambda: empty(bus), "the jobs to be taken off")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert dict(recorder.given_up)["poison"] == "the source is empty"
    assert "given up after 2 attempts" in dict(recorder.given_up)["stubborn"]


async def test_jobs_are_found_again_after_the_server_was_killed(bus: Bus, nats_server: NatsServer) -> None:
    recorder = Recorder()
    jobs = JobQueue(bus, "q", recorder.work, recorder.give_up)
    task = asyncio.create_task(jobs.run())
    for run_id in ("r1", "r2"):
        if run_id == "r2":
            nats_server.kill()
            nats_server.start()
        await jobs.submit(run_id, await make_message(bus, run_id))
        await until(lambda run_id=run_id: run_id in recorder.worked, f"job {run_id}")
        # A job that has been done and is still in the bucket when the server dies is done again.
        await until(lambda: empty(bus), "the job to be taken off")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert recorder.worked == ["r1", "r2"]


async def test_waiting_for_jobs_asks_next_to_nothing_of_the_server(bus: Bus, make_bus: Callable[..., Any]) -> None:
    runner = await make_bus("idle")
    recorder = Recorder()
    task = asyncio.create_task(JobQueue(runner, "q", recorder.work, recorder.give_up).run())
    stream = f"KV_{topology.JOBS.name}"

    async def followed() -> bool:
        return (await bus.js.stream_info(stream)).state.consumer_count == 1

    await until(followed, "the runner to follow the bucket")
    sent = runner.nc.stats["out_msgs"]
    await asyncio.sleep(1.5)  # the time that is measured
    # Nothing, or at most one consumer opened again on a machine so busy that the server seemed silent.
    assert runner.nc.stats["out_msgs"] - sent <= 5
    assert await followed()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_runner_claims_no_more_than_it_can_begin(bus: Bus) -> None:
    """A claim that waits for its turn is not renewed: another instance could have had the job."""
    busy, may_end = asyncio.Event(), asyncio.Event()
    recorder = Recorder()

    async def work(job: Any) -> None:
        busy.set()
        await may_end.wait()
        recorder.worked.append(job.event.run_id)

    jobs = JobQueue(bus, "q", work, recorder.give_up)
    for run_id in ("r1", "r2", "r3"):
        await jobs.submit(run_id, await make_message(bus, run_id))
    task = asyncio.create_task(jobs.run())
    await busy.wait()
    other = Recorder()
    idle = asyncio.create_task(JobQueue(bus, "q", other.work, other.give_up).run())
    await until(lambda: len(other.worked) == 2, "the idle runner to have the others")
    may_end.set()
    await until(lambda: len(recorder.worked) == 1, "the first")
    await cancel_and_wait(task, idle)
    assert sorted(recorder.worked + other.worked) == ["r1", "r2", "r3"]


async def test_an_invalid_job_delays_no_other_job(bus: Bus) -> None:
    bucket = await bus.open_bucket(topology.JOBS)
    invalid = (b"", b"no json", b"[]", b"[" * 100_000, b'{"holder": ""}', b'{"subject": 7, "headers": []}')
    for number, nonsense in enumerate(invalid):
        await bucket.put(f"q.nonsense{number}", nonsense)
    recorder = Recorder()
    jobs = JobQueue(bus, "q", recorder.work, recorder.give_up)
    task = asyncio.create_task(jobs.run())
    await jobs.submit("r1", await make_message(bus, "r1"))
    await until(lambda: recorder.worked == ["r1"], "the job")
    assert not task.done()
    await cancel_and_wait(task)
