"""Models of a usual size for the load test of serving: the examples' CNN on images, and their GPT on bytes."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import torch

import examples.digits.task as digits
import examples.gpt.task as gpt
from examples.demo.lake import draw_scans
from loadtest.served_models import SUMS, ServedKind

DIGITS = tuple("0123456789")
#: A sample whose two best answers are nearer to each other is left out: rounding would decide it.
MARGIN = 1e-3
GPT_PARAMS = {"context": 64, "width": 128, "layers": 4, "heads": 4}
SERVED_GPT = """
from gpt_task import ByteGPT


class NextByte(ByteGPT):
    def serve(self, model, batch):
        return {"prediction": model(batch[:, : self.context])[:, -1].argmax(1)}
"""


def _source(module: object) -> bytes:
    return Path(str(getattr(module, "__file__", ""))).read_bytes()


@functools.cache
def _net() -> digits.Net:
    torch.manual_seed(0)
    return digits.Net(16, len(DIGITS), 0.1).eval()


@functools.cache
def _gpt() -> gpt.GPT:
    torch.manual_seed(0)
    return gpt.GPT(**GPT_PARAMS).eval()


def _clear_answers(logits_NC: torch.Tensor) -> list[int | None]:
    """Return the best class of each row, None where it is not clear."""
    best = logits_NC.topk(2, dim=1)
    is_clear = best.values[:, 0] - best.values[:, 1] > MARGIN
    return [int(each) if clear else None for each, clear in zip(best.indices[:, 0], is_clear, strict=True)]


@functools.cache
def _scans() -> list[tuple[dict[str, bytes], int]]:
    """Return the handwritten digits, and what the net makes of each."""
    task = digits.Digits()
    bodies = [body for name, body in sorted(draw_scans().items()) if "broken" not in name]
    images = torch.stack([task.decode({"png": body, "cls": b"0"})[0] for body in bodies])
    with torch.inference_mode():
        answers = _clear_answers(_net()(images))
    return [({"png": body}, answer) for body, answer in zip(bodies, answers, strict=True) if answer is not None]


def _draw_scans(count: int, seed: int) -> list[tuple[dict[str, bytes], int]]:
    return random.Random(seed).sample(_scans(), count)


def _draw_windows(count: int, seed: int) -> list[tuple[dict[str, bytes], int]]:
    """Return windows of the text of this folder's code, and the byte that the GPT expects after each."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    source, width = random.Random(seed), GPT_PARAMS["context"] + 1
    starts = [source.randrange(len(text) - width) for _ in range(2 * count)]
    windows = [text[start : start + width] for start in starts]
    bytes_NT = torch.from_numpy(np.stack([np.frombuffer(each, np.uint8) for each in windows]).astype(np.int64))
    with torch.inference_mode():
        answers = _clear_answers(_gpt()(bytes_NT[:, :-1])[:, -1])
    found = [({"bin": each}, answer) for each, answer in zip(windows, answers, strict=True) if answer is not None]
    return found[:count]


def _net_weights(scale: float) -> dict[str, torch.Tensor]:
    weights = {name: value.clone() for name, value in _net().state_dict().items()}
    return weights | {name: weights[name] * scale for name in ("head.2.weight", "head.2.bias")}


def _gpt_weights(scale: float) -> dict[str, torch.Tensor]:
    weights = {name: value.clone() for name, value in _gpt().state_dict().items()}
    return weights | {name: weights[name] * scale for name in ("norm.weight", "norm.bias")}


CNN = ServedKind(
    task="digits_task:Digits",
    code={"digits_task.py": _source(digits)},
    classes=DIGITS,
    draw=_draw_scans,
    weights=_net_weights,
    encode=lambda sample: (sample["png"], "image/png"),
)
GPT = ServedKind(
    task="served_gpt:NextByte",
    code={"gpt_task.py": _source(gpt), "served_gpt.py": SERVED_GPT.encode()},
    classes=(),
    draw=_draw_windows,
    weights=_gpt_weights,
    encode=lambda sample: (sample["bin"], "application/octet-stream"),
    params=GPT_PARAMS,
)
KINDS = {"linear": SUMS, "CNN": CNN, "GPT": GPT}
