"""A thousand messages of any kind on the bus of a live stack; nothing is worse for them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from contracts.envelope import EnvelopeError, RawMessage, decode
from contracts.texts import describe
from tests.e2e.support import DONE_S, own_stack
from tests.fuzz.grammar import Known, draw_messages
from tests.fuzz.siege import Siege

MESSAGES = 1000


def test_the_same_number_draws_the_same_messages() -> None:
    known = Known(("r1",), ("n1",))
    assert draw_messages(20, 7, known) == draw_messages(20, 7, known)


def test_whatever_can_be_decoded_can_be_told_in_a_line() -> None:
    told = 0
    for message in draw_messages(600, 3, Known(("r1",), ("n1",))):
        headers = {name.lower(): value for name, value in message.headers.items()}
        with suppress(EnvelopeError):
            _, event = decode(RawMessage(message.subject, message.body, headers, "FACTS", 1))
            assert "\n" not in describe(event)
            told += 1
    assert told > 15


@pytest.mark.e2e
async def test_whatever_is_published_everything_works_afterwards(tmp_path: Path) -> None:
    async with own_stack(tmp_path) as stack:
        with stack.hold() as hold:
            # One run trains meanwhile, and another is over: lies are told about both.
            over = await stack.publish(await stack.slow_run(epochs=1, step_s=0.0))
            await stack.wait_for(over, "completed", DONE_S)
            running = await stack.publish(await stack.slow_run(epochs=2, step_s=0.0, holds={hold: 20}))
            await stack.wait_for_step(running, 15)
            siege = Siege(stack)
            await siege.publish(MESSAGES, 1, (over, running))
        await siege.look_around()
    assert siege.problems == []
    assert siege.published > MESSAGES / 2
