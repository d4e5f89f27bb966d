"""A script finds its data as plain files in the folder that TRAINBUS_DATA_DIR names."""

from __future__ import annotations

import io
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.support import DONE_S, Stack
from trainbus.embedded.launch import read_stack

pytestmark = [pytest.mark.e2e]

EXAMPLES = Path(__file__).parents[2] / "examples"

#: Writes what it finds into its output folder, writes beside the data, and tries to write into it.
SCRIPT = """
import json, os, pathlib, stat, sys

data = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["TRAINBUS_DATA_DIR"])
found = {}
for path in sorted(data.rglob("*")):
    if path.is_file():
        found[str(path.relative_to(data))] = stat.filemode(path.stat().st_mode)
        path.open("rb").read()
folders = sorted(str(path.relative_to(data)) for path in data.rglob("*") if path.is_dir())
(data / "train.cache").write_text("as Ultralytics does")
out = pathlib.Path(os.environ["TRAINBUS_OUTPUT_DIR"])
(out / "found.json").write_text(json.dumps({"files": found, "folders": folders}))
"""


def image(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (number * 7 % 256, number % 256, 99)).save(buffer, "PNG")
    return buffer.getvalue()


async def put(stack: Stack, files: dict[str, bytes]) -> str:
    source = f"s3://lake/{uuid.uuid4().hex}/"
    for name, content in files.items():
        await stack.objects.put(f"{source}{name}", content)
    return source


async def submit(stack: Stack, project: Path, *options: str, command: str = "python look.py") -> str:
    (project / "look.py").write_text(SCRIPT)
    done = await stack.cli("submit", str(project), "--command", command, *options)
    assert done.code == 0, done.text
    return str(done.out.split()[0])


async def found(stack: Stack, run_id: str, tmp_path: Path) -> Any:
    ended = await stack.wait_for(run_id, "completed", DONE_S)
    assert ended is not None
    folder = tmp_path / run_id
    done = await stack.cli("fetch", run_id, str(folder))
    assert done.code == 0, done.text
    return json.loads((folder / "found.json").read_text())


async def test_images_lie_in_the_folders_of_their_classes_and_are_unpacked_once_a_node(
    stack: Stack, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    pets = {
        f"{kind}/{number}.png": image(number + 40 * (kind == "dog")) for kind in ("cat", "dog") for number in range(40)
    }
    source = await put(stack, pets)
    first = await submit(stack, project, "--data", source)
    seen = await found(stack, first, tmp_path)
    assert {path.split("/", 1)[1] for path in seen["files"]} == set(pets)
    assert {path.split("/")[0] for path in seen["files"]} == {"train", "val", "test"}
    assert set(seen["files"].values()) == {"-r--r--r--"}
    assert {"train/cat", "train/dog", "val/cat", "val/dog", "test/cat", "test/dog"} <= set(seen["folders"])
    prepared = await stack.wait_for(first, "prepared", DONE_S)
    show = await stack.cli("show", first)
    assert prepared.dataset_id[:12] in show.text

    # A second run, which wants it in a folder of its project, sees nothing of what the first wrote beside it.
    second = await submit(
        stack, project, "--data", source, "--env", "TRAINBUS_DATA_DIR=data/pets", command="python look.py data/pets"
    )
    again = await found(stack, second, tmp_path)
    assert again == seen


async def test_files_are_copied_while_others_have_the_slots_and_the_run_then_starts_with_them(
    stack: Stack, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    hold = stack.hold()
    occupants = [await stack.occupant(hold, priority=1) for _ in range(4)]
    homes = {run_id: (await stack.wait_for(run_id, "started", DONE_S)).node_id for run_id in occupants}
    birds = {f"{kind}/{n}.png": image(n + 90 + 40 * (kind == "owl")) for kind in ("elk", "owl") for n in range(40)}
    source = await put(stack, birds)
    script = await submit(stack, project, "--data", f"pets={source}")
    await stack.wait_for(script, "queued", DONE_S)
    # Its files are there, and all slots are those of others.
    facts = {each.event.fact: each for each in await stack.facts(script)}
    assert "placed" not in facts
    (node_id,) = facts["staging"].event.node_ids
    answers = await stack.bus.read_history(f"node.{node_id}.staged")
    (staged,) = [each for each in answers if each.event.run_id == script]
    assert facts["staging"].sequence < staged.sequence < facts["queued"].sequence
    dataset_id = facts["prepared"].event.datasets["pets"].dataset_id
    assert (staged.event.error, staged.event.dataset_ids) == ("", (dataset_id,))
    (tree,) = stack.data_dir.glob(f"**/cache/trees/{dataset_id}")
    made = tree.stat().st_ino
    # A slot on the other node would do as well, if it were free first.
    await stack.cli("cancel", next(run_id for run_id, home in homes.items() if home == node_id))
    started = await stack.wait_for(script, "started", DONE_S)
    assert started.node_id == node_id
    hold.release()
    await found(stack, script, tmp_path)
    assert [each.stat().st_ino for each in stack.data_dir.glob(f"**/cache/trees/{dataset_id}")] == [made]
    show = await stack.cli("show", script)
    assert f"the files of dataset pets are being copied to {node_id}, for 600 s at most" in show.text


async def test_several_datasets_lie_in_folders_of_their_names_and_stand_in_mlflow(stack: Stack, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    project = tmp_path / "project"
    project.mkdir()
    rows = [{"id": number, "x": number / 2 if number % 2 else number, "y": f"row {number}"} for number in range(200)]
    table = await put(stack, {"rows.jsonl": b"\n".join(json.dumps(row).encode() for row in rows)})
    texts = await put(stack, {"a.txt": " ".join(map(str, range(20_000))).encode()})
    run_id = await submit(stack, project, "--data", f"table={table}", "--data", f"corpus={texts}")
    seen = await found(stack, run_id, tmp_path)
    assert sorted(seen["files"]) == [
        f"{name}/{split}/00000.{suffix}"
        for name, suffix in (("corpus", "txt"), ("table", "parquet"))
        for split in ("test", "train", "val")
    ]
    prepared = await stack.wait_for(run_id, "prepared", DONE_S)
    assert prepared.datasets.keys() == {"table", "corpus"}
    assert prepared.datasets["table"].train_samples > 100
    timeline = await stack.cli("show", run_id)
    assert all(each.dataset_id[:12] in timeline.text for each in prepared.datasets.values()), timeline.text

    await stack.tracked(run_id)
    info = read_stack(stack.data_dir)
    assert info is not None
    tracked = await stack.wait_for(run_id, "tracked", DONE_S)
    logged = MlflowClient(info.mlflow_tracking_uri).get_run(tracked.mlflow_run_id)
    assert {each.dataset.name: each.dataset.digest for each in logged.inputs.dataset_inputs} == {
        name: each.dataset_id[:36] for name, each in prepared.datasets.items()
    }
    assert logged.data.params["dataset_id.table"] == prepared.datasets["table"].dataset_id


async def test_a_dataset_that_cannot_be_used_is_named(stack: Stack, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    good = await put(stack, {f"{kind}/{n}.png": image(n) for kind in ("a",) for n in range(40)})
    broken = await put(stack, {"rows.jsonl": b"no json\n" * 50})
    run_id = await submit(stack, project, "--data", f"good={good}", "--data", f"bad={broken}")
    failed = await stack.wait_for(run_id, "failed", DONE_S)
    assert "dataset 'bad': " in failed.reason
    refused = await stack.cli(
        "submit", str(project), "--command", "python look.py", "--data", f"good={good}", "--data", broken
    )
    assert refused.code == 2
    assert "give each a name" in refused.text


async def test_a_project_that_has_files_where_its_data_is_to_be_is_told(stack: Stack, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    (project / "data" / "old.txt").write_text("of the last year")
    source = await put(stack, {f"a/{n}.png": image(n) for n in range(40)})
    run_id = await submit(stack, project, "--data", source, "--env", "TRAINBUS_DATA_DIR=data")
    failed = await stack.wait_for(run_id, "failed", DONE_S)
    assert "the project has 'data', where its data is to be" in failed.reason
    run_id = await submit(stack, project, "--data", source, "--env", "TRAINBUS_DATA_DIR=/data")
    failed = await stack.wait_for(run_id, "failed", DONE_S)
    assert "name a folder below the project" in failed.reason


@pytest.fixture
def vision(tmp_path: Path) -> str:
    """The path of torchvision and Ultralytics for a script, on a node whose torch is the CPU build.

    torchvision's wheel on PyPI needs torch for GPUs: without it these two operators, which no classifier uses, are
    unknown, and torchvision cannot be imported.
    """
    folder = Path(sys.prefix) / "vision"
    assert folder.is_dir(), "run `make vision`"
    (tmp_path / "operators").mkdir()
    (tmp_path / "operators" / "sitecustomize.py").write_text(OPERATORS)
    return f"{tmp_path / 'operators'}:{folder}"


OPERATORS = """
import torch

if not torch.cuda.is_available():
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def drawing(kind: int, number: int) -> bytes:
    """A yellow square on black, or on a ground that is as bright."""
    picture = Image.new("RGB", (32, 32), ((0, 0, number), (200, number, 255))[kind])
    picture.paste((255, 255, number), (8, 8, 24, 24))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.needs("vision")
async def test_mobilenet_is_fine_tuned_on_class_folders(stack: Stack, tmp_path: Path, vision: str) -> None:
    source = await put(stack, {f"{'ab'[kind]}/{n}.png": drawing(kind, n) for kind in (0, 1) for n in range(60)})
    done = await stack.cli(
        *("submit", str(EXAMPLES / "torchvision"), "--command", "python train.py --epochs 2 --size 32"),
        *("--data", source, "--env", "TRAINBUS_DATA_DIR=data", "--env", "TRAINBUS_OUTPUT_DIR=out"),
        *("--env", f"PYTHONPATH={vision}", "--metric-pattern", "loss=loss=([0-9.]+)"),
    )
    assert done.code == 0, done.text
    completed = await stack.wait_for(done.out.split()[0], "completed", DONE_S)
    assert 0 < completed.metrics["loss"] < 0.7
    fetched = await stack.cli("fetch", completed.run_id, str(tmp_path / "out"))
    assert (tmp_path / "out" / "last.pt").stat().st_size > 1_000_000, fetched.text


@pytest.mark.needs("vision")
async def test_yolo_trains_a_classifier_from_its_yaml(stack: Stack, tmp_path: Path, vision: str) -> None:
    source = await put(stack, {f"{'ab'[kind]}/{n}.png": drawing(kind, n) for kind in (0, 1) for n in range(60)})
    done = await stack.cli(
        *("submit", str(EXAMPLES / "ultralytics"), "--command", "python train.py 1 32", "--data", source),
        *("--env", "TRAINBUS_DATA_DIR=data", "--env", "TRAINBUS_OUTPUT_DIR=runs", "--env", f"PYTHONPATH={vision}"),
        # Nothing is downloaded or reported.
        *("--env", "YOLO_OFFLINE=true", "--env", f"YOLO_CONFIG_DIR={tmp_path}"),
    )
    assert done.code == 0, done.text
    await stack.wait_for(done.out.split()[0], "completed", DONE_S)
    fetched = await stack.cli("fetch", done.out.split()[0], str(tmp_path / "runs"))
    assert (tmp_path / "runs" / "train" / "weights" / "best.pt").is_file(), fetched.text
    assert not (EXAMPLES.parent / "runs").exists(), "it wrote where its libraries are installed"
