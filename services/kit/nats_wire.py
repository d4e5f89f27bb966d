"""Makes nats-py read whatever a server sends, and call ``closed_cb`` always. Import it where a connection is made.

A subject may hold any byte but a blank, a tab, CR and LF. nats-py 2 takes each white space of a regular expression for
the end of a subject (a form feed, a vertical tab), and every subject for UTF-8. On one that is neither it can read
nothing more from the connection; after it has connected again the same message comes first. So every client that may
publish could end every service with one message.

When it closes a connection that the server has ended, what it still has to send fails, and ``closed_cb`` is not called:
then nothing opens the connection again.
"""

from __future__ import annotations

import re
from typing import Any

from nats.aio.client import Client
from nats.protocol import parser

_TOKEN, _GAP = rb"([^ \t\r\n]+)", rb"[ \t]+"
_HEAD = _GAP + _TOKEN + _GAP + _TOKEN + _GAP + rb"(" + _TOKEN + _GAP + rb")?"

parser.MSG_RE = re.compile(rb"\AMSG" + _HEAD + rb"(\d+)\r\n")
parser.HMSG_RE = re.compile(rb"\AHMSG" + _HEAD + rb"(\d+)" + _GAP + rb"(\d+)\r\n")

_build_message = Client._build_message


def _build_any_message(client: Client, sid: int, subject: bytes, *rest: Any) -> Any:
    # The subscription is known by its number, so nothing is lost with a name that no string can hold.
    return _build_message(client, sid, subject.decode("utf-8", "replace").encode(), *rest)


Client._build_message = _build_any_message  # type: ignore[method-assign, assignment]


_close = Client._close


async def _close_with_callbacks(client: Client, status: int, do_cbs: bool = True) -> None:
    try:
        await _close(client, status, do_cbs)
    except OSError:  # sending failed; nothing is left to be sent now
        client._status = Client.DISCONNECTED
        await _close(client, status, do_cbs)


Client._close = _close_with_callbacks  # type: ignore[method-assign, assignment]
