"""The last part of the demo: the promoted model answers, and a broken promotion is refused while it goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from contracts.events.train import PromoteRequested, RollbackRequested
from examples.demo.screen import Board, Screen
from trainbus.client.connection import Connection

MODEL = "digits"
#: What a picture's greys are drawn with, from dark to light.
SHADES = " .:-=+*#%@"
#: Waits until a condition on the stack holds.
Wait = Callable[[Callable[[], bool]], Awaitable[None]]


@dataclass(slots=True)
class ServedDemo:
    """What the demo saw of serving."""

    #: The true digit, the answer, and the version that gave it.
    digit: str = ""
    answer: str = ""
    version: int | None = None
    #: Why the broken version is not served, and what answered meanwhile.
    refusal: str = ""
    answer_after: str = ""

    def problems(self) -> list[str]:
        """Return what was promised and not seen."""
        found = []
        if not self.answer:
            found.append("the promoted model did not answer")
        elif self.answer != self.digit:
            found.append(f"the served model took a {self.digit} for a {self.answer}")
        if not self.refusal:
            found.append("the broken promotion was not refused")
        elif self.answer_after != self.answer:
            found.append(f"beside the broken promotion the model answered {self.answer_after or 'nothing'}")
        return found


async def show_answer(
    seen: ServedDemo, board: Board, screen: Screen, url: str, scans: dict[str, bytes], wait: Wait
) -> None:
    """Ask the served champion for a drawn digit."""
    stage = screen.stage("served model")
    await wait(lambda: MODEL in board.models and board.models[MODEL].served_version == board.models[MODEL].version)
    name, picture = next((name, body) for name, body in sorted(scans.items()) if name.startswith("7/"))
    seen.digit = name.partition("/")[0]
    seen.answer, seen.version = await ask(url, picture)
    for line in draw(picture):
        screen.print_line(line)
    screen.done(
        stage, f"version {seen.version} answers a drawn {seen.digit} with {seen.answer} ({url}/predict/{MODEL})"
    )


async def show_refusal(
    seen: ServedDemo,
    board: Board,
    screen: Screen,
    connection: Connection,
    url: str,
    run_id: str,
    scans: dict[str, bytes],
    wait: Wait,
) -> None:
    """Promote a run that cannot be served, see it refused, and take the promotion back."""
    stage = screen.stage("broken promotion")
    before = board.models[MODEL].version
    await connection.publish_request(PromoteRequested(model=MODEL, run_id=run_id, reason="the demo breaks something"))
    await wait(lambda: board.models[MODEL].version > before and bool(board.models[MODEL].serving_problem))
    seen.refusal = board.models[MODEL].serving_problem
    picture = next(body for name, body in sorted(scans.items()) if name.startswith("7/"))
    seen.answer_after, version = await ask(url, picture)
    # Read before the request: its answer may be here before the request returns.
    broken = board.models[MODEL].version
    await connection.publish_request(RollbackRequested(model=MODEL, reason="the demo mends it"))
    await wait(lambda: board.models[MODEL].version > broken and board.models[MODEL].served_version != version)
    screen.done(stage, f"{seen.refusal[:160]}; version {version} went on answering, and a rollback mended it")


async def ask(url: str, picture: bytes) -> tuple[str, int]:
    """Return the predicted class of a picture, and the version that answered."""
    async with httpx.AsyncClient(timeout=30) as http:
        response = await http.post(f"{url}/predict/{MODEL}", content=picture, headers={"Content-Type": "image/png"})
        response.raise_for_status()
        content: dict[str, Any] = response.json()
    return content["predictions"][0]["class"], content["version"]


def draw(picture: bytes) -> list[str]:
    """Return a picture as lines of text."""
    import io

    from PIL import Image

    with Image.open(io.BytesIO(picture)) as image:
        width, pixels = image.width, list(image.convert("L").tobytes())
    shades = [SHADES[value * (len(SHADES) - 1) // 255] * 2 for value in pixels]
    return ["".join(shades[start : start + width]) for start in range(0, len(shades), width)]
