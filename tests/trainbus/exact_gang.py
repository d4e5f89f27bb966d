"""Strategies driven without the trainer: a few steps in several processes, forked from this one."""

from __future__ import annotations

import hashlib
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from contracts.spec.training import Training
from trainbus.data.sampler import slice_bounds
from trainbus.task import Task
from trainbus.trainer.checkpoint.weights import match_weights
from trainbus.trainer.optimizer_state import OptimizerState
from trainbus.trainer.readable_tensor import ReadableTensor, make_readable
from trainbus.trainer.strategies import (
    fsdp2,  # noqa: F401  (the forked ranks need not import it each)
    make_strategy,
)
from trainbus.trainer.strategies.base import Strategy
from trainbus.trainer.training_state import State, assemble
from trainbus.trainer.world import World, seed_all

BATCH = 28


class Mlp(nn.Sequential):
    """Wide enough that its first weight is more than one piece."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 1200), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1200, 10))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self[3](self[2](self[1](self[0](x))))  # type: ignore[no-any-return]


class Cnn(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout2d(0.1),
            nn.Conv2d(8, 16, 3, stride=2, padding=1).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 10),
        )
        self.register_buffer("fixed", torch.arange(100.0))


class Gpt(nn.Module):
    """Two blocks, with the head tied to the embedding."""

    def __init__(self, width: int = 64, depth: int = 2, tokens: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        block = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.1, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, **block) for _ in range(depth))  # type: ignore[arg-type]
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            hidden = block(hidden, mask, is_causal=True)
        return self.head(hidden)  # type: ignore[no-any-return]


class Adapter(nn.Linear):
    """A frozen layer with a trained low-rank addition, as LoRA has it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Frozen(Gpt):
    """A frozen embedding and block, an adapter, and a block that no step uses."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.embedding.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].linear2 = nn.Sequential(nn.Linear(256, 64), Adapter(64))
        self.unused = nn.ModuleList([nn.Linear(4, 4)])


class UnusedBlockGpt(Gpt):
    """Without dropout, and with a last block that no step uses."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.eval()

    def train(self, mode: bool = True) -> UnusedBlockGpt:
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.embedding(x)) + self.blocks[1](self.embedding(x)))  # type: ignore[no-any-return]


class RoutedGpt(Gpt):
    """Each batch chooses the blocks that it goes through."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for number, block in enumerate(self.blocks):
            if (int(x.sum()) + number) % 2:
                hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "cnn": Cnn,
    "gpt": Gpt,
    "frozen": Frozen,
    "routed": RoutedGpt,
    "unused": UnusedBlockGpt,
}
#: Models of text.
TEXT = {"gpt", "frozen", "routed", "unused"}


@dataclass(frozen=True)
class Case(Task):
    """A model, an optimizer, and data generated from (step, leaf)."""

    name: str
    optimizer_kind: str = "adamw"
    rules: dict[str, Any] = field(default_factory=dict)
    batch_size: int = BATCH
    finds_unused: bool = False

    @property
    def find_unused_parameters(self) -> bool:  # type: ignore[override]
        return self.finds_unused or self.name == "routed"

    def model(self) -> nn.Module:
        return MODELS[self.name]()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "lr": 0.003, "weight_decay": 0.0}]
        if self.optimizer_kind == "sgd":
            return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        if self.optimizer_kind == "two":
            return [torch.optim.SGD(decayed, lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
        if self.optimizer_kind == "muon":
            return [torch.optim.Muon(decayed, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
        if self.optimizer_kind == "lbfgs":
            return torch.optim.LBFGS(model.parameters())
        if self.optimizer_kind == "adagrad":
            return torch.optim.Adagrad(groups, lr=0.01)
        return torch.optim.AdamW(groups, lr=0.01)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.name in TEXT:
            return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    def training(self) -> Training:
        return Training.model_validate({"max_steps": 1, "global_batch": BATCH, "logical_ranks": 7, **self.rules})

    def batch(self, step: int, start: int, stop: int) -> Any:
        generator = torch.Generator().manual_seed(step)
        if self.name in TEXT:
            return torch.randint(0, 32, (BATCH, 17), generator=generator)[start:stop]
        x = torch.randn(BATCH, 64, generator=generator)
        return x[start:stop], x[start:stop, :10].argmax(1)


def train(case: Case, world: World, steps: range, state: State[ReadableTensor] | None) -> tuple[Strategy, list[float]]:
    """Take ``steps`` from ``state`` on, as the trainer does; return the strategy and the gradient norms."""
    training = case.training()
    seed_all(training.seed, "model")
    strategy = make_strategy(
        case, training, world, lambda model: {} if state is None else match_weights(state.model, model)
    )
    if state is not None:
        strategy.load_state(state)
    strategy.model.train()
    norms = []
    size = case.batch_size
    pieces = min(training.accumulate, -(-size // strategy.leaf_count))
    for step in steps:
        strategy.begin_step(has_empty=pieces > size // strategy.leaf_count)
        for leaf in strategy.leaves:
            seed_all(training.seed, step, leaf)
            start, stop = slice_bounds(size, strategy.leaf_count, leaf)
            for piece in range(pieces):
                low, high = slice_bounds(stop - start, pieces, piece)
                batch = case.batch(step, start + low, start + high) if high > low else None
                first, last = piece == 0, piece == pieces - 1
                strategy.backward(batch, (high - low) / size, leaf=leaf, first=first, last=last)
        norms.append(float(strategy.step(training.clip_norm).grad_norm))
    return strategy, norms


def loadable(state: State[Tensor]) -> State[ReadableTensor]:
    """Return a state in memory as one that is loaded."""
    optimizer = state.optimizer
    return State(
        make_readable(state.model),
        OptimizerState(make_readable(optimizer.tensors), optimizer.values, optimizer.groups),
        make_readable(state.ema),
        state.scaler,
    )


def merged(parts: list[State[Tensor]]) -> State[Tensor]:
    """Put the ranks' shares together again, copied."""
    whole: State[Tensor] = State(scaler=parts[0].scaler)
    for part in parts:
        for mine, theirs in (
            (whole.model, part.model),
            (whole.optimizer.tensors, part.optimizer.tensors),
            (whole.ema, part.ema),
        ):
            assert not mine.keys() & theirs.keys()
            mine.update({name: tensor.clone() for name, tensor in theirs.items()})
        whole.optimizer.values |= part.optimizer.values
        whole.optimizer.groups = whole.optimizer.groups or part.optimizer.groups
    return whole


def digest(state: State[Tensor]) -> str:
    """Return the hash of everything that training resumes from."""
    found = hashlib.sha256(repr((state.scaler, state.optimizer.groups, state.optimizer.values)).encode())
    for tensors in (state.model, state.optimizer.tensors, state.ema):
        for name, tensor in sorted(tensors.items()):
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(
                tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else repr(tensor).encode()
            )
    return found.hexdigest()


@dataclass
class Result:
    state: State[Tensor]
    norms: list[float]
    sent_bytes: list[int]
    parts: list[State[Tensor]]

    @property
    def digest(self) -> str:
        return digest(self.state)


def gang(case: Case, world_size: int, steps: range, state: State[Tensor] | None = None) -> Result:
    """Take ``steps`` in ``world_size`` processes; return the state that they would have saved."""

    def work(world: World) -> tuple[State[Tensor], list[float], int]:
        strategy, norms = train(case, world, steps, None if state is None else loadable(state))
        tree = getattr(strategy, "_tree", None)
        sent = tree.link.sent_bytes if tree is not None else 0
        return assemble(strategy.state_entries(), world), norms, sent

    saved = run_ranks(world_size, work)
    parts = [part for part, _, _ in saved]
    assert all(norms == saved[0][1] for _, norms, _ in saved)
    return Result(merged(parts), saved[0][1], [sent for _, _, sent in saved], parts)


def run_ranks(world_size: int, work: Callable[[World], Any]) -> list[Any]:
    """Call ``work`` on as many ranks, forked from this process; return what each rank's call returned."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        processes = [context.Process(target=_rank, args=(rank, world_size, work, folder)) for rank in range(world_size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(600)
        errors = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
        assert not errors, "\n".join(errors)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(rank: int, world_size: int, work: Callable[[World], Any], folder: str) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        torch.save(work(World(rank, world_size, 0)), Path(folder) / f"{rank}.pt")
        if world_size > 1:
            dist.barrier()
    except BaseException:
        (Path(folder) / f"error{rank}").write_text(traceback.format_exc())
    finally:
        import os

        os._exit(0)
