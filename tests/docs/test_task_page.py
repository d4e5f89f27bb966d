"""The reference of a Task has what the class has, and its examples train."""

from __future__ import annotations

import importlib.util
import inspect
import io
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from contracts.datasets import FieldStatistics
from tests.docs.document import read_blocks
from trainbus.client.task_reference import TaskMember, read_task_members
from trainbus.task import Task
from trainbus.trainer.chained_optimizer import make_optimizer

PAGE = Path(__file__).parents[2] / "docs" / "task.md"
MEMBERS = read_task_members()
CLASSES = ("circle", "square")


def make_image(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(256, size=(8, 8), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


SAMPLES = [{"png": make_image(number), "cls": str(number % 2).encode()} for number in range(8)]
#: The same samples where nothing has to be decoded.
FIELDS = {
    "bin": np.random.default_rng(0).integers(256, size=(8, 64), dtype=np.uint8),
    "cls": np.array([[ord("0") + number % 2] for number in range(8)], dtype=np.uint8),
}


def make_task(example: str, folder: Path) -> Task:
    """Return the Task of the page with an example in its body."""
    [block] = [each for each in read_blocks(PAGE.read_text()) if each.kind == "file"]
    body = textwrap.indent(example, "    ")
    (folder / "task.py").write_text(f"import json\n\n{block.content}\n\nclass Example(Glyphs):\n{body}\n")
    spec = importlib.util.spec_from_file_location("task_of_the_page", folder / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    task: Task = module.Example()
    task.classes = CLASSES
    task.statistics = {"l": FieldStatistics(count=512, mean=0.5, std=0.25, min=0.0, max=1.0)}
    return task


def is_own(task: Task, name: str) -> bool:
    return getattr(type(task), name) is not getattr(Task, name)


def use_task(task: Task, folder: Path) -> None:
    """Call each method as training, evaluation and serving do, and check what it returns."""
    for name, content in task.artifacts().items():
        assert isinstance(content, bytes)
        (folder / name).write_bytes(content)
    if is_own(task, "load_artifacts"):
        (folder / "labels.json").write_text(json.dumps(CLASSES))
        task.load_artifacts(folder)
        assert task.classes == CLASSES
    model = task.model()
    units = task.fsdp_units(model)
    assert units is None or list(units)
    optimizer = make_optimizer(task, model)
    schedule = task.schedule(optimizer, 10)
    batch = task.collate([task.augment(task.decode(each), np.random.default_rng(0)) for each in SAMPLES])
    if is_own(task, "decode_batch"):
        decoded = task.decode_batch(FIELDS)
        assert [(each.dtype, each.shape) for each in decoded] == [(each.dtype, each.shape) for each in batch]
    if is_own(task, "loss_weight"):
        assert task.loss_weight(batch) == len(SAMPLES)
    loss = task.loss(model, batch)
    assert loss.shape == ()
    loss.backward()
    optimizer.step()
    if schedule is not None:
        schedule.step()  # type: ignore[call-arg]
    with torch.no_grad():
        evaluate_task(task, model, batch)


def evaluate_task(task: Task, model: torch.nn.Module, batch: Any) -> None:
    assert all(value.shape in [(), (len(SAMPLES),)] for value in task.metrics(model, batch).values())
    predicted = task.predict(model, batch)
    assert predicted is not None
    if not isinstance(predicted, Mapping):
        predicted = dict(zip(("prediction", "target"), predicted, strict=True))
    assert {len(column) for column in predicted.values()} == {len(SAMPLES)}
    summary = task.summarize({name: column.numpy() for name, column in predicted.items()})
    assert all(isinstance(value, float) for value in summary.values())
    if is_own(task, "serve"):
        served = task.serve(model, batch)
        assert isinstance(served, Mapping)
        assert set(served["class"]) <= set(CLASSES)


def test_the_reference_has_what_a_task_may_define() -> None:
    members = [name for name in vars(Task) if not name.startswith("_")]
    assert [each.name for each in MEMBERS] == members


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_a_signature_is_that_of_the_class(member: TaskMember) -> None:
    value = getattr(Task, member.name)
    if callable(value):
        signature = str(inspect.signature(value)).replace("'", "")
        assert member.signature == f"{member.name}{signature}"
    else:
        annotation = Task.__annotations__[member.name].replace('"', "'")
        default = repr(value).replace("mappingproxy", "MappingProxyType")
        assert member.signature == f"{member.name}: {annotation} = {default}"


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_an_entry_has_an_example_that_works(member: TaskMember, tmp_path: Path) -> None:
    assert member.summary.endswith((".", ":"))
    assert 1 <= len(member.example.splitlines()) <= 6
    task = make_task(member.example, tmp_path)
    assert member.name in member.example
    use_task(task, tmp_path)


def test_the_task_of_the_page_works(tmp_path: Path) -> None:
    use_task(make_task("pass", tmp_path), tmp_path)
