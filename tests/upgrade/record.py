"""Record a small real history of this release: ``python -m tests.upgrade.record v0.1.0``.

It plays the demo (two runs, a preemption, evaluations, promotions), a restore and a failure on an embedded
stack, and writes the streams and the read model to ``tests/upgrade/<version>/``. A recording is never changed
after its release: later versions must read it.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

from contracts import topology
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.run import RunStopping
from tests.e2e.support import Stack, connected
from tests.upgrade.recording import RecordedMessage, dump_database, write_messages
from trainbus.embedded.launch import StackProcess
from trainbus.embedded.layout import StackOptions

STREAMS = tuple(stream.name for stream in topology.STREAMS)
SETTLE_S = 120.0


async def play(stack: Stack) -> None:
    """Make the history: demo, restore, failure, a rejected request, a dead letter."""
    done = await stack.cli("demo", "--running")
    if done.code:
        raise RuntimeError(f"the demo failed:\n{done.text}")
    facts = [message.event for message in await stack.bus.read_history("run.*.*")]
    assert any(isinstance(fact, RunStopping) for fact in facts), "the demo preempted nothing"
    # Retention has deleted the early ones.
    checkpoint = next(fact for fact in reversed(facts) if isinstance(fact, CheckpointCommitted))
    restored = await stack.request(
        "restore.requested", {"run_id": checkpoint.run_id, "step": checkpoint.checkpoint.step}
    )
    failing = await stack.publish(
        {"name": "failing", "command": ["sh", "-c", "echo no such file; exit 3"], "max_attempts": 2}
    )
    rejected = await stack.publish({"name": "rejected", "command": ["true"], "slots": {"min": 2, "max": 1}})
    await stack.publish(b"this is no JSON")
    await stack.wait_for(rejected, "rejected")
    await stack.wait_for(failing, "failed")
    await stack.wait_for(restored, "completed")


async def wait_for_read_model(stack: Stack, database: Path) -> None:
    """Wait until the tracking service has followed every run and the read model holds every fact."""
    deadline = time.monotonic() + SETTLE_S
    stable_since, last = time.monotonic(), -1
    while time.monotonic() - stable_since < 3.0 or last < 0:
        assert time.monotonic() < deadline, "the read model does not come to rest"
        sequence = (await stack.bus.js.stream_info("FACTS")).state.last_seq
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            [position] = connection.execute("SELECT position FROM projections WHERE stream = 'FACTS'").fetchone()
        if position != sequence or sequence != last:
            stable_since, last = time.monotonic(), sequence
        await asyncio.sleep(0.2)


async def read_streams(stack: Stack) -> list[RecordedMessage]:
    """Return every message of every stream."""
    found = []
    for stream in STREAMS:
        state = (await stack.bus.js.stream_info(stream)).state
        for sequence in range(max(state.first_seq, 1), state.last_seq + 1):
            message = await stack.bus.js.get_msg(stream, sequence)
            stored_at = message.time.isoformat() if message.time else ""
            body = (message.data or b"").decode()
            found.append(
                RecordedMessage(stream, sequence, stored_at, message.subject or "", dict(message.headers or {}), body)
            )
    return found


async def record(version: str, data_dir: Path) -> None:
    """Play the history on the running stack in ``data_dir`` and write it down."""
    async with connected(data_dir) as stack:
        await play(stack)
        [database] = data_dir.rglob("gateway.sqlite")
        await wait_for_read_model(stack, database)
        messages = await read_streams(stack)
        write_messages(version, messages)
        dump_database(version, database)
    print(f"recorded {len(messages)} messages of {version}")


def main() -> None:
    """Start a stack, play, record, stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="for example v0.1.0")
    version = parser.parse_args().version
    folder = Path(tempfile.mkdtemp())
    try:
        with StackProcess(StackOptions(folder / "data"), output=folder / "output.log") as process:
            process.wait_ready()
            asyncio.run(record(version, folder / "data"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
