"""Small datasets in the format that sharding writes, and ranks started as an agent starts them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts import shard_index
from contracts.datasets import SPLITS, Format, Manifest, SplitFiles, split_config_hash
from contracts.events.dataset import ShardFile
from contracts.progress import ring_name
from contracts.ranks import JOURNAL_LINE, JournalLine, Launch
from contracts.spec.data import Split
from contracts.spec.run import RunSpec
from services.kit.ports import free_ports
from services.worker.ranks.ring_reader import RingReader
from trainbus.data.dataset import Dataset

if TYPE_CHECKING:
    from torch import Tensor

REPOSITORY = Path(__file__).parents[2]
Samples = Iterable[tuple[str, dict[str, bytes]]]

#: A task small enough to run in milliseconds: a linear model on eight floats and their class.
LINEAR_TASK = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from trainbus import Task


class Linear(Task):
    def __init__(self, lr=0.05, dropout=0.0, momentum=0.9, adam=True, width=16):
        self.lr, self.dropout, self.momentum, self.adam, self.width = lr, dropout, momentum, adam, width

    def model(self):
        return nn.Sequential(nn.Linear(8, self.width), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(self.width, 3))

    def optimizer(self, model):
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=self.lr)
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)

    def schedule(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps + 1)

    def decode(self, sample):
        return torch.from_numpy(np.frombuffer(sample["bin"], dtype=np.float32).copy()), int(sample["cls"])

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        logits = model(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": (logits.argmax(1) == batch[1]).float()}

    def predict(self, model, batch):
        return model(batch[0]).argmax(1), batch[1]
"""


def write_dataset(
    folder: Path,
    splits: Mapping[str, Samples],
    *,
    format: Format = "images",
    classes: Iterable[str] = (),
    per_shard: int = 50,
) -> str:
    """Write shards, indexes and manifest; return the dataset's id."""
    files: dict[str, SplitFiles] = {}
    for split in SPLITS:
        samples = list(splits.get(split, ()))
        shards = [
            ShardFile(**_write_shard(folder, f"{split}/shard-{number:05d}", samples[first : first + per_shard]))
            for number, first in enumerate(range(0, len(samples), per_shard))
        ]
        files[split] = SplitFiles(samples=len(samples), shards=tuple(shards))
    manifest = Manifest(
        format=format,
        source="s3://lake/made",
        fingerprint="0" * 64,
        split=Split(),
        split_config_hash=split_config_hash(Split()),
        classes=tuple(classes),
        splits=files,
    )
    data = manifest.to_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def _write_shard(folder: Path, name: str, samples: list[tuple[str, dict[str, bytes]]]) -> dict[str, Any]:
    path, index_path = folder / f"{name}.tar", folder / f"{name}.idx"
    path.parent.mkdir(parents=True, exist_ok=True)
    fields: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for _, content in samples for name in content}
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, content in samples:
            for extension, data in content.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                fields[extension][0].append(tar.offset + tarfile.BLOCKSIZE)
                fields[extension][1].append(len(data))
                tar.addfile(info, io.BytesIO(data))
    index_path.write_bytes(shard_index.encode([key for key, _ in samples], fields))
    return {
        "path": f"{name}.tar",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "size_bytes": path.stat().st_size,
        "samples": len(samples),
        "index_path": f"{name}.idx",
        "index_sha256": hashlib.sha256(index_path.read_bytes()).hexdigest(),
    }


def linear_samples(count: int, offset: int = 0) -> Samples:
    """Points in eight dimensions whose class is that of their largest coordinate among the first three."""
    import numpy as np

    rng = np.random.default_rng(offset)
    for number in range(count):
        point = rng.standard_normal(8).astype(np.float32)
        yield f"s{offset + number:06d}", {"bin": point.tobytes(), "cls": str(int(point[:3].argmax())).encode()}


def linear_dataset(folder: Path, train: int = 100, validation: int = 23, test: int = 17) -> Dataset:
    splits = {
        "train": linear_samples(train),
        "validation": linear_samples(validation, 10_000),
        "test": linear_samples(test, 20_000),
    }
    dataset_id = write_dataset(folder, splits, classes=("a", "b", "c"))
    return Dataset(folder, dataset_id)


def digits_dataset(folder: Path) -> Dataset:
    """scikit-learn's digits as PNG files, seven tenths of them to train on."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    splits: dict[str, list[tuple[str, dict[str, bytes]]]] = {"train": [], "validation": [], "test": []}
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        buffer = io.BytesIO()
        Image.fromarray((image * 15.9375).astype("uint8")).save(buffer, "PNG")
        place = int(hashlib.sha256(str(number).encode()).hexdigest(), 16) % 20
        split = "train" if place < 14 else "validation" if place < 17 else "test"
        splits[split].append((f"digit-{number:04d}", {"png": buffer.getvalue(), "cls": str(label).encode()}))
    dataset_id = write_dataset(folder, splits, classes=[str(digit) for digit in range(10)], per_shard=500)
    return Dataset(folder, dataset_id)


def text_dataset(folder: Path, data: bytes, window_length: int = 65) -> Dataset:
    windows = [data[i : i + window_length] for i in range(0, len(data) - window_length, window_length)]
    samples = [(f"w{number:06d}", {"bin": window}) for number, window in enumerate(windows)]
    cut = len(samples) * 9 // 10
    dataset_id = write_dataset(
        folder, {"train": samples[:cut], "validation": samples[cut:]}, format="text", per_shard=2000
    )
    return Dataset(folder, dataset_id)


def write_exact_code(folder: Path, **modules: str) -> Path:
    """Make a code folder with ``exact_tasks.py`` and these modules; return it."""
    from tests.trainbus import exact_tasks

    folder.mkdir(parents=True)
    shutil.copy(exact_tasks.__file__, folder / "exact_tasks.py")
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def exact_dataset(folder: Path, train: int = 90, validation: int = 37) -> Dataset:
    """The dataset that all of ``exact_tasks`` train on."""
    from tests.trainbus import exact_tasks

    splits = {"train": exact_tasks.samples(train), "validation": exact_tasks.samples(validation, 1)}
    return Dataset(folder, write_dataset(folder, splits, classes=exact_tasks.CLASSES))


def write_task(folder: Path, source: str = LINEAR_TASK, name: str = "task") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(source)
    return folder


class FakeAgent:
    """The agent's end of the control socket: records hellos, and sends the lines of a test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hellos: list[dict[str, Any]] = []
        self.wanted: list[dict[str, Any]] = []
        self.rings = 0
        self.changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError), connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line) if line.strip() else {}
                with self.changed:
                    if message.get("kind") == "hello":
                        self._connections.append(connection)
                        self.hellos.append(message)
                    elif message.get("kind") == "shard_request":
                        self.wanted.append(message)
                    elif not message:
                        self.rings += 1
                    self.changed.notify_all()

    def wait_for_hellos(self, count: int, timeout_s: float = 300) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.hellos) >= count, timeout_s), self.hellos

    def send(self, line: Mapping[str, Any]) -> None:
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # of a rank that is gone
                connection.sendall(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.path.unlink(missing_ok=True)


def request(**changes: Any) -> RunSpec:
    training = {"epochs": 2, "global_batch": 16, **changes.pop("training", {})}
    defaults: dict[str, Any] = {
        "name": "test",
        "task": "task:Linear",
        "code": {"uri": "s3://code/package", "sha256": "0" * 64},
        "training": training,
    }
    return RunSpec.model_validate({**defaults, **changes})


def rank_env(launch_path: Path, rank: int, world_size: int, port: int, **extra: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": str(REPOSITORY),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TRAINBUS_LAUNCH": str(launch_path),
        **extra,
    }


def write_launch(
    folder: Path,
    spec: RunSpec,
    dataset: Dataset,
    code_folder: Path,
    *,
    world_size: int = 1,
    socket_path: Path | None = None,
    resume_folder: Path | None = None,
    init_folder: Path | None = None,
    generation: int = 1,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    launch = Launch(
        run_id="rtest",
        generation=generation,
        node_id="n1",
        world_size=world_size,
        spec=spec,
        folder=folder,
        socket=socket_path or folder / "agent.sock",
        code_folder=code_folder,
        dataset_folder=dataset.folder,
        dataset_id=dataset.dataset_id,
        resume_folder=resume_folder,
        init_folder=init_folder,
    )
    path = folder / "launch.json"
    path.write_text(launch.model_dump_json())
    return path


def start_rank(env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "trainbus.ranks.rank"], env=dict(env), stdout=output, stderr=output, cwd=log.parent
        )


def journal(folder: Path, rank: int = 0) -> list[JournalLine]:
    """Everything a rank wrote to its journal, and to the ring beside it."""
    # Up to the last end of a line: the rank may be in the middle of the next one.
    content = (folder / f"rank_{rank}.jsonl").read_bytes()
    lines = [JOURNAL_LINE.validate_json(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    ring = RingReader.open(folder / ring_name(rank))
    records = [record for _, record in ring.read(0, ring.head)] if ring is not None else []
    return sorted([*lines, *records], key=lambda line: line.time)


def whole_checkpoint(folder: Path, step: int | None = None) -> Path:
    """Put all ranks' files of a checkpoint (the last one, if no step is named) into one folder, as an agent does."""
    parts = sorted((folder / "checkpoints").glob("step_*" if step is None else f"step_{step:08d}-*"))
    name = parts[-1].name.partition("-")[0]
    whole = folder / f"whole_{name}"
    whole.mkdir(exist_ok=True)
    for part in parts:
        if part.name.startswith(f"{name}-"):
            for path in part.iterdir():
                shutil.copy(path, whole / path.name)
    return whole


def load_tensors(folder: Path, kind: str) -> dict[str, Tensor]:
    """Read all ranks' tensors of a kind (``model``, ``optimizer``, ``ema``) from a checkpoint."""
    from trainbus.trainer.checkpoint import open_tensors

    return {name: saved.read() for name, saved in open_tensors(folder, kind).items()}


def keys_by_step(folder: Path, world_size: int) -> dict[int, list[str]]:
    """The keys each step was trained on, in the order of the ranks."""
    steps: dict[int, list[str]] = {}
    for rank in range(world_size):
        for line in (folder / f"samples_rank_{rank}.jsonl").read_text().splitlines():
            record = json.loads(line)
            steps.setdefault(record["step"], []).extend(record["keys"])
    return dict(sorted(steps.items()))


class Warm:
    """A warm process and a client of it: ranks start in milliseconds instead of seconds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "warm.sock"
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainbus.ranks.warm", "--socket", str(self.path)], env=env, start_new_session=True
        )
        deadline = time.monotonic() + 300
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        while True:
            try:
                self.socket.connect(str(self.path))
                break
            except OSError:
                assert time.monotonic() < deadline, "the warm process does not listen"
                time.sleep(0.05)
        self.socket.settimeout(600)
        self.lines = self.socket.makefile("rb")
        self.ended: dict[int, int] = {}

    def ask(self, **message: Any) -> dict[str, Any]:
        self.socket.sendall(json.dumps(message).encode() + b"\n")
        while True:
            answer: dict[str, Any] = json.loads(self.lines.readline())
            if answer["op"] != "exited":
                return answer
            self.ended[answer["pid"]] = answer["code"]

    def fork(self, env: dict[str, str], folder: Path, rank: int) -> int:
        answer = self.ask(
            op="fork",
            id=str(rank),
            env=env,
            cwd=str(folder),
            log=str(folder / f"rank_{rank}.log"),
            exit_file=str(folder / f"rank_{rank}.exit"),
        )
        assert answer["op"] == "forked", answer
        return int(answer["pid"])

    def wait(self, pid: int) -> int:
        while pid not in self.ended:
            answer = json.loads(self.lines.readline())
            if answer["op"] == "exited":
                self.ended[answer["pid"]] = answer["code"]
        return self.ended[pid]


class Gang:
    """The ranks of one generation, forked from the warm process."""

    def __init__(self, warm: Warm, folder: Path, launch: Path, world_size: int, **env: str) -> None:
        port = free_ports(1)[0]
        self.warm, self.folder = warm, folder
        self.pids = [
            warm.fork(rank_env(launch, rank, world_size, port, **env), folder, rank) for rank in range(world_size)
        ]

    def wait(self) -> list[int]:
        return [self.warm.wait(pid) for pid in self.pids]

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("rank_*.log")))
