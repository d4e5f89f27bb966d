"""``trainbus replay``."""

from __future__ import annotations

from datetime import datetime

from services.gateway.rebuild import rebuild
from trainbus.client.address import StackAddress
from trainbus.client.errors import UsageError
from trainbus.commands import render


async def rebuild_read_model(address: StackAddress, start: str | None, *, as_json: bool) -> None:
    """Rebuild the gateway's read model from a sequence number, a time or the beginning of the log."""
    settings = address.settings()
    if address.data_dir is not None:
        settings = settings.model_copy(update={"data_dir": address.data_dir / "gateway"})
    sequence: int | None = None
    time: datetime | None = None
    if start is not None:
        try:
            sequence, time = (int(start), None) if start.isdigit() else (None, datetime.fromisoformat(start))
        except ValueError as error:
            raise UsageError(f"--from {start!r} is neither a sequence number nor an ISO 8601 time") from error
    done = await rebuild(settings, from_sequence=sequence, from_time=time)
    if as_json:
        print(render.as_json(done))
    else:
        print(
            f"the gateway's read model: {done.runs} runs from {done.to_sequence} facts in {done.seconds:.2f} s, "
            f"read from sequence {done.from_sequence} on"
        )
