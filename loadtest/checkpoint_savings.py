"""What deduplication and differences save of real states, by training small models. See ``loadtest.checkpoints``."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from loadtest.common import report
from services.kit import chunks as kit
from services.worker.checkpoints.uploader import file_ranges, state_key
from services.worker.core.checkpoint_chunks import MIN_DELTA_BYTES, is_worthwhile

WIDTH, BLOCKS, VOCABULARY, LENGTH, BATCH = 256, 4, 512, 64, 8
State = dict[str, dict[str, Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BTC: Tensor) -> Tensor:
        normed = self.first(x_BTC)
        mask = nn.Transformer.generate_square_subsequent_mask(x_BTC.shape[1], dtype=x_BTC.dtype)
        x_BTC = x_BTC + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x_BTC + self.mlp(self.second(x_BTC))


class Gpt(nn.Module):
    """A language model of 3.4 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(x_BTC)


@dataclass(frozen=True, slots=True)
class Saved:
    """Of one checkpoint after another: shares of the bytes that need not be sent."""

    deduplicated: float
    differences: float


def batches(seed: int) -> Iterator[Tensor]:
    """Text of a language with grammar: each token allows a few next ones."""
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=torch.Generator().manual_seed(1))
    while True:
        tokens_BT = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        for at in range(1, LENGTH + 1):
            choice_B = torch.randint(4, (BATCH,), generator=generator)
            tokens_BT[:, at] = follows[tokens_BT[:, at - 1], choice_B]
        yield tokens_BT


def train(model: Gpt, optimizer: torch.optim.Optimizer, steps: int, data: Iterator[Tensor]) -> None:
    for _ in range(steps):
        tokens_BT = next(data)
        logits_BTV = model(tokens_BT[:, :-1])
        loss = functional.cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        f"{names[parameter]}/{key}": value
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, Tensor) and value.dim()
    }
    weights = dict(model.state_dict())
    return {"model-0.safetensors": weights, "optimizer-0.safetensors": moments}


def copied(state: State) -> State:
    return {file: {name: value.detach().clone() for name, value in each.items()} for file, each in state.items()}


def saved(before: State, after: State, files: tuple[str, ...]) -> Saved:
    """Measured with the cut, the threshold and the coder of the agent."""
    folder = Path(tempfile.mkdtemp(prefix="trainbus-savings-"))
    try:
        total = new = sent = 0
        for name in files:
            known = _pieces(before[name], folder / name, name)
            hashes = {hashlib.sha256(content).digest() for content, _ in known.values()}
            for key, (content, width) in _pieces(after[name], folder / name, name).items():
                total += len(content)
                if hashlib.sha256(content).digest() in hashes:
                    continue
                new += len(content)
                base, _ = known.get(key, (b"", 1))
                sent += _sent(content, base, width)
        return Saved(1 - new / total, 1 - sent / total)
    finally:
        shutil.rmtree(folder)


def _pieces(tensors: dict[str, Tensor], path: Path, name: str) -> dict[str, tuple[bytes, int]]:
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    content = path.read_bytes()
    with path.open("rb") as file:
        cut = file_ranges(file.fileno(), len(content))
    return {state_key(name, p): (content[p.start : p.start + p.size_bytes], p.width) for p in cut}


def _sent(content: bytes, base: bytes, width: int) -> int:
    if len(base) != len(content) or len(content) < MIN_DELTA_BYTES:
        return len(content)
    blob = kit.encode_difference(content, base, width)
    assert kit.decode_difference(blob, base) == content
    return len(blob) if is_worthwhile(len(blob), len(content)) else len(content)


# -- the cases -----------------------------------------------------------------


def sparse(apart: int) -> tuple[State, State]:
    """A table of 100 000 rows of which a batch looks up 256, with an optimizer that touches only those."""
    torch.manual_seed(0)
    table = nn.Embedding(100_000, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)

    def steps(count: int) -> None:
        for _ in range(count):
            # As words are: few are common, most are rare.
            rows = (torch.rand(256, generator=generator) ** 6 * 100_000).long()
            optimizer.zero_grad()
            table(rows).square().sum().backward()
            optimizer.step()

    steps(20)
    before = copied(state_of(table, optimizer))
    steps(apart)
    return before, state_of(table, optimizer)


def dense(apart: int, lr: float, warm: int, *, frozen: int = 0, bf16: bool = False) -> tuple[State, State]:
    """The language model; ``frozen`` of its blocks (and the embedding) learn no more. bf16: its weights are that."""
    torch.manual_seed(0)
    model, data = Gpt(), batches(0)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), warm, data)
    if bf16:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0 if bf16 else 0.01)
    train(model, optimizer, 5, data)
    if frozen:
        # Their moments stay as they are, as those of a run that freezes its first layers on the way.
        for part in (model.embed, *model.blocks[:frozen]):
            part.requires_grad_(False)
    before = copied(state_of(model, optimizer))
    train(model, optimizer, apart, data)
    return before, state_of(model, optimizer)


MODEL, MOMENTS = ("model-0.safetensors",), ("optimizer-0.safetensors",)
WHOLE = MODEL + MOMENTS
Measure = tuple[str, tuple[str, ...], str]
#: How it is trained; then what is measured of it: a name, which files, and what was measured elsewhere (share saved).
CASES: tuple[tuple[Callable[[int, int], tuple[State, State]], tuple[Measure, ...]], ...] = (
    (lambda apart, warm: sparse(apart), (("sparse embeddings, whole state", WHOLE, "98 %"),)),
    (lambda a, w: dense(a, 1e-4, w, frozen=3), (("3 of 4 blocks frozen, whole state", WHOLE, "84 %"),)),
    (lambda a, w: dense(a, 1e-5, w, bf16=True), (("bf16 weights, fine-tuning at 1e-5", MODEL, "75 to 95 %"),)),
    (lambda a, w: dense(a, 1e-5, w), (("fp32 weights, fine-tuning at 1e-5", MODEL, "20 to 55 %"),)),
    (
        lambda a, w: dense(a, 1e-3, w),
        (
            ("fp32 weights, training at 1e-3", MODEL, "20 to 55 %"),
            ("Adam moments", MOMENTS, "15 to 30 %"),
            ("dense fp32 + Adam, whole state", WHOLE, "20 to 25 %"),
        ),
    ),
)


def savings(apart: int, warm: int) -> None:
    rows, figures = [], {}
    for make, measures in CASES:
        before, after = make(apart, warm)
        for name, files, expected in measures:
            found = saved(before, after, files)
            rows.append((name, f"same pieces {found.deduplicated:.1%}, differences {found.differences:.1%}", expected))
            figures[name] = {"deduplicated": found.deduplicated, "differences": found.differences}
            print(rows[-1], flush=True)
    report("checkpoints-savings", rows, {"steps_apart": apart, "steps_before": warm, "saved": figures})
