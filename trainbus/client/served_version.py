"""Which version of a model answers, as the serving server says it of itself in the headers of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

import httpx

from trainbus.client import connection
from trainbus.client.errors import StackUnreachableError

#: Version, run, and the SHA-256 of the manifest of what the process has loaded.
VERSION_HEADER, RUN_HEADER, DIGEST_HEADER = "Trainbus-Version", "Trainbus-Run", "Trainbus-Digest"
#: Seconds without an answer.
ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """What a serving server says of the version that answers; '' for what it does not say."""

    version: str
    run_id: str
    manifest_sha256: str


async def read_served_version(url: str, model: str, version: int | None = None) -> ServedVersion | None:
    """Return the version of a model that answers at a serving server, or that version if it answers beside it.

    None: the server does not serve it.

    Raises:
        StackUnreachableError: the server does not answer, or answers with an error.
    """
    path = f"/v2/models/{quote(model, safe='')}" + (f"/versions/{version}" if version is not None else "")
    timeout = httpx.Timeout(ANSWER_S, connect=connection.CONNECT_S)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=timeout, verify=url.startswith("https:")) as http:
            answer = await http.get(path)
    except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
        raise StackUnreachableError(f"the serving server at {url} does not answer ({reason})") from error
    if answer.status_code == httpx.codes.NOT_FOUND:
        return None
    if not answer.is_success:
        raise StackUnreachableError(f"{answer.request.url} answers {answer.status_code}")
    return ServedVersion(*(answer.headers.get(name, "") for name in (VERSION_HEADER, RUN_HEADER, DIGEST_HEADER)))
