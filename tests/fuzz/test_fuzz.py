"""What anybody may put on the bus can be told in a line. ``loadtest.fuzz`` publishes it on a live stack."""

from __future__ import annotations

from contextlib import suppress

from contracts.envelope import EnvelopeError, RawMessage, decode
from contracts.texts import describe
from tests.fuzz.grammar import Known, draw_messages

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
