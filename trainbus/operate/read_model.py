"""The gateway's read model, made anew from the log."""

from __future__ import annotations

from datetime import datetime

from services.gateway.rebuild import RebuildResult, rebuild
from trainbus.client.address import StackAddress
from trainbus.operate.stack_settings import read_settings


async def rebuild_read_model(
    address: StackAddress, *, from_sequence: int | None = None, from_time: datetime | None = None
) -> RebuildResult:
    """Rebuild the gateway's read model; of what lies before ``from_sequence`` or ``from_time``, from its own copy."""
    settings = read_settings(address)
    if address.data_dir is not None:
        settings = settings.model_copy(update={"data_dir": address.data_dir / "gateway"})
    return await rebuild(settings, from_sequence=from_sequence, from_time=from_time)
