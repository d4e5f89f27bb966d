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
            await self._renew(PROBE_TIMEOUT_S)
        except (aiohttp.ClientError, TimeoutError):
            return False
        return bool(self._token)

    def watch(self) -> AsyncIterator[Notice]:
        return poll_notices(self.name, self._metadata.interval_s, self._look)

    async def _look(self) -> list[Notice]:
        return [*self._action(await self._get(ACTION)), *self._rebalance(await self._get(REBALANCE))]

    async def acknowledge(self, notice: Notice) -> None:
        """EC2 takes no answer."""

    def _action(self, body: str) -> list[Notice]:
        if not body:
            return []
        said = json.loads(body)
        at = datetime.fromisoformat(said["time"]).timestamp()
        return [Notice(self.name, said["action"], max(at - time.time(), 0.0), f"at {said['time']}", token=body)]

    def _rebalance(self, body: str) -> list[Notice]:
        if not body:
            return []
        return [Notice(self.name, "rebalance", None, "an interruption is likely", leave=False, token="rebalance")]

    async def _get(self, path: str) -> str:
        """The document, '' while there is none."""
        for _ in range(2):
            status, body, _ = await self._metadata.ask(path, {"X-aws-ec2-metadata-token": self._token})
            if status == 401:  # the token is used up
                await self._renew()
                continue
            if status == 404:
                return ""
            if status != 200:
                raise ValueError(f"{path} answers {status}")
            return body
        raise ValueError("the metadata service takes no token")

    async def _renew(self, timeout_s: float = 5.0) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        status, body, _ = await self._metadata.ask("/latest/api/token", headers, method="PUT", timeout_s=timeout_s)
        self._token = body if status == 200 else ""
