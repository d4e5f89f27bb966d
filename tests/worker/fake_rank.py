"""A rank without torch: counts steps, reports them, checkpoints, obeys. Behaves as ``spec.params`` demand."""

import array
import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

launch = json.loads(Path(os.environ["TRAINBUS_LAUNCH"]).read_text())
params = launch["spec"]["params"]
rank, folder = int(os.environ["RANK"]), Path(launch["folder"])
journal = os.open(folder / f"rank_{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
stopping = threading.Event()
link = None


def report(**line: Any) -> None:
    os.write(journal, json.dumps({"time": time.time(), **line}).encode() + b"\n")
    if line["kind"] != "metrics" and link is not None:
        with contextlib.suppress(OSError):
            link.send(b"\n")


def listen() -> None:
    global link
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(launch["socket"])
            hello = {"kind": "hello", "rank": rank, "pid": os.getpid(), "generation": launch["generation"]}
            connection.send(json.dumps(hello).encode() + b"\n")
            link = connection
            for line in connection.makefile():
                if json.loads(line)["kind"] == "stop" and not params.get("ignores_stop"):
                    stopping.set()
        except OSError as error:
            print(f"agent is away: {error}", file=sys.stderr) if params.get("talkative") else None
        link = None
        time.sleep(0.02)


def checkpoint(step: int, final: bool = False) -> None:
    target = folder / "checkpoints" / f"step_{step}" / f"rank_{rank}"
    target.mkdir(parents=True, exist_ok=True)
    (target / f"state_{rank}.json").write_text(json.dumps({"step": step, "rank": rank}))
    if count := params.get("weights"):
        period = params.get("period", count)
        values = array.array("f", (number % period * (0.37 * (1 + step * 1e-6)) for number in range(count)))
        described = {"w": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}
        header = json.dumps(described).encode()
        content = len(header).to_bytes(8, "little") + header + values.tobytes()
        (target / f"model-{rank}.safetensors").write_bytes(content)
    report(kind="checkpoint", folder=str(target), step=step, epoch=1, samples_consumed=step * 8, final=final)


threading.Thread(target=listen, daemon=True).start()
if params.get("ignores_stop"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"env_{rank}.json").write_text(json.dumps(dict(os.environ)))
if params.get("missing"):
    report(kind="rendezvous", address="127.0.0.1:1", missing=params["missing"], waited_s=5.0)
step = (launch.get("resume") or {}).get("step", 0)
if launch.get("resume_folder"):
    assert json.loads((Path(launch["resume_folder"]) / "state_0.json").read_text())["step"] == step
shards, arrival = [], None
if params.get("read"):
    from contracts.events.dataset import ShardFile
    from trainbus.data.reader import DatasetError
    from trainbus.data.shard_prefetch import ShardPrefetcher

    dataset = Path(launch["dataset_folder"])
    manifest = json.loads((dataset / "manifest.json").read_bytes())
    shards = [ShardFile.model_validate(shard) for shard in manifest["splits"]["train"]["shards"]]
    arrival = ShardPrefetcher(
        Path(launch["socket"]), dataset, rank=rank, generation=launch["generation"], patience_s=60
    )
print(f"rank {rank} starts at {step}", flush=True)
report(kind="started", step=step, samples_consumed=step * 8)
while step < params["steps"]:
    step += 1
    if arrival is not None:
        shard = shards[(step - 1) % len(shards)]
        try:
            arrival.wait(shard)
        except DatasetError as error:
            report(kind="ended", outcome="failed", step=step, error=str(error))
            sys.exit(1)
        assert hashlib.sha256((dataset / shard.path).read_bytes()).hexdigest() == shard.sha256
    time.sleep(params.get("step_s", 0.01))
    report(kind="metrics", step=step, values={"loss": 1 / step}, samples_consumed=step * 8, epoch=1)
    print(f"step {step}", flush=True)
    if params.get("crash_at") == step and rank == params.get("crash_rank", 0):
        if params.get("diverges"):  # what it remembers of this step is not what another attempt begins with
            (Path(launch["memory_folder"]) / f"g{launch['generation']}" / f"step_{step}-rank_{rank}").mkdir(
                parents=True
            )
        report(
            kind="ended", outcome="failed", step=step, error="the loss exploded", diverged=params.get("diverges", False)
        )
        sys.exit(3)
    while params.get("hold_at") == step and not (folder / "go").exists() and not stopping.is_set():
        time.sleep(0.02)
    if stopping.is_set():
        checkpoint(step, final=True)
        report(kind="ended", outcome="stopped", step=step, samples_consumed=step * 8)
        os._exit(75)
    if step % params.get("every", 1000) == 0:
        checkpoint(step)
checkpoint(step, final=True)
(folder / "report.txt").write_text("done\n")
report(kind="result", metrics={"accuracy": 0.9}, artifacts=["report.txt", "../../../secret"])
report(kind="ended", outcome="succeeded", step=step, samples_consumed=step * 8)
