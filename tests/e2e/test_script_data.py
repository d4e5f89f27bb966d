"""A script finds its data as plain files in the folder that TRAINBUS_DATA_DIR names."""

from __future__ import annotations

import io
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.support import DONE_S, Stack

pytestmark = [pytest.mark.e2e]

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
    from mlflow import MlflowClient

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
    del MlflowClient
