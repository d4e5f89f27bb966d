"""EC2: spot interruptions and rebalance recommendations, from the instance metadata service (IMDSv2).

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
.../rebalance-recommendations.html
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from datetime import datetime

import aiohttp

from services.worker.notices.base import PROBE_TIMEOUT_S, MetadataServer, Notice, poll_notices

TOKEN_TTL_S = 21_600
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class Ec2Source:
    name = "ec2"

    def __init__(self, metadata: MetadataServer) -> None:
        self._metadata = metadata
        self._token = ""

    async def applies(self) -> bool:
        try:
            await self._renew_token(PROBE_TIMEOUT_S)
        except (aiohttp.ClientError, TimeoutError):
            return False
        return bool(self._token)

    def watch(self) -> AsyncIterator[Notice]:
        return poll_notices(self.name, self._metadata.interval_s, self._fetch)

    async def _fetch(self) -> list[Notice]:
        return [*self._action_notices(await self._get(ACTION)), *self._rebalance_notices(await self._get(REBALANCE))]

    async def acknowledge(self, notice: Notice) -> None:
        """EC2 expects no acknowledgement."""

    def _action_notices(self, body: str) -> list[Notice]:
        if not body:
            return []
        action = json.loads(body)
        at = datetime.fromisoformat(action["time"]).timestamp()
        return [Notice(self.name, action["action"], max(at - time.time(), 0.0), f"at {action['time']}", token=body)]

    def _rebalance_notices(self, body: str) -> list[Notice]:
        if not body:
            return []
        return [Notice(self.name, "rebalance", None, "an interruption is likely", leave=False, token="rebalance")]

    async def _get(self, path: str) -> str:
        """Return the document; '' while there is none."""
        for _ in range(2):
            status, body, _ = await self._metadata.request(path, {"X-aws-ec2-metadata-token": self._token})
            if status == 401:  # the token has expired
                await self._renew_token()
                continue
            if status == 404:
                return ""
            if status != 200:
                raise ValueError(f"{path} returned status {status}")
            return body
        raise ValueError("the metadata service accepts no token")

    async def _renew_token(self, timeout_s: float = 5.0) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        status, body, _ = await self._metadata.request("/latest/api/token", headers, method="PUT", timeout_s=timeout_s)
        self._token = body if status == 200 else ""
