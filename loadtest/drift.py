"""What it costs to find ranks that drift apart, and whether one flipped bit is always found.

    python -m loadtest.drift [--trials 200]

One process takes steps of models of several sizes, and the checksum of what ranks would compare: weights, Adam's
moments, buffers. The price is the checksum's share of the steps between two of them. It does not depend on the number
of ranks, which exchange it with the numbers that they exchange in each step anyway. Then one bit of that state is
flipped, at random, in each trial, and the checksum is compared with the one of the unchanged state.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contracts.spec.training import Training
from loadtest.common import report
from tests.trainbus.exact_gang import Cnn, Gpt, Mlp
from trainbus.task import Task
from trainbus.trainer.drift import CHECK_EVERY_STEPS, checksum
from trainbus.trainer.exact.layout import in_memory_order
from trainbus.trainer.strategies import make_strategy
from trainbus.trainer.strategies.base import Strategy
from trainbus.trainer.world import World

LIMIT = 0.01
CPU = torch.device("cpu")
BATCH = 32
TOKENS = 50_257
REPEATS = 5

Make = Callable[[], nn.Module]
#: Model, what makes a batch for it, steps that are timed.
MODELS: dict[str, tuple[Make, Callable[[], Tensor], int]] = {
    "a linear model of 650 parameters": (lambda: nn.Linear(64, 10), lambda: torch.randn(BATCH, 64), 200),
    "MLP, 0.1M parameters": (Mlp, lambda: torch.randn(BATCH, 64), 200),
    "CNN with BatchNorm, 6k parameters": (Cnn, lambda: torch.randn(BATCH, 64), 200),
    "GPT, 124M parameters": (lambda: Gpt(768, 12, TOKENS), lambda: torch.randint(TOKENS, (2, 65)), 4),
}


class Model(Task):
    """A model with a loss that uses all of it, and Adam."""

    def __init__(self, make: Make) -> None:
        self.make = make

    def model(self) -> nn.Module:
        return self.make()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        if batch.dtype == torch.int64:
            return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        return F.cross_entropy(model(batch), batch[:, :10].argmax(1))


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rows, prices, found = [], {}, 0
    for name, (make, batch, steps) in MODELS.items():
        torch.manual_seed(0)
        training = Training(max_steps=1, logical_ranks=1)
        task = Model(make)
        strategy = make_strategy(task, training, World())
        step_s = _step_s(strategy, batch, steps)
        check_s = min(_timed(lambda strategy=strategy: _check(strategy)) for _ in range(REPEATS))  # type: ignore[misc]
        size_bytes = sum(tensor.nbytes for tensor in strategy.copied_tensors())
        share = check_s / (CHECK_EVERY_STEPS * step_s)
        prices[name] = {"step_s": step_s, "check_s": check_s, "state_bytes": size_bytes, "share": share}
        rows.append((name, f"{share:.3%} of the time", f"{LIMIT:.0%}"))
        found = _found(strategy, args.trials)
        rows.append(("", f"{found} of {args.trials} flipped bits found", f"{args.trials}"))
        prices[name]["found"] = found
        print(*rows[-2], *rows[-1], flush=True)
    figures: dict[str, Any] = {"every_steps": CHECK_EVERY_STEPS, "trials": args.trials, "models": prices}
    report("drift", rows, figures)


def _step_s(strategy: Strategy, batch: Callable[[], Tensor], steps: int) -> float:
    """Return the median seconds of a step, after the first."""
    taken = []
    strategy.model.train()
    for _ in range(steps + 1):
        samples = batch()
        taken.append(_timed(lambda samples=samples: _step(strategy, samples)))  # type: ignore[misc]
    return statistics.median(taken[1:])


def _step(strategy: Strategy, samples: Tensor) -> None:
    strategy.begin_step(has_empty=False, counted=None)
    strategy.backward(samples, 1.0, leaf=0, first=True, last=True)
    strategy.step(None)


def _check(strategy: Strategy) -> Tensor:
    return checksum(strategy.copied_tensors(), CPU)


def _found(strategy: Strategy, trials: int) -> int:
    """Flip a random bit of the state in each trial, and return how often the checksum is another one."""
    tensors, generator = strategy.copied_tensors(), random.Random(0)
    whole, sizes, found = checksum(tensors, CPU), [tensor.nbytes for tensor in tensors], 0
    for _ in range(trials):
        (tensor,) = generator.choices(tensors, sizes)
        memory = in_memory_order(tensor).view(torch.uint8)
        place, bit = generator.randrange(len(memory)), 1 << generator.randrange(8)
        memory[place] ^= bit
        found += not torch.equal(checksum(tensors, CPU), whole)
        memory[place] ^= bit
    return found


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
