"""What ``trainbus submit`` finds out before it uploads anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from PIL import Image

from contracts.data_formats import find_format_mismatch, recognize_format
from contracts.datasets import FieldStatistics
from trainbus.client import submission_check
from trainbus.client.data_format import find_local_format, read_samples
from trainbus.client.errors import UsageError
from trainbus.client.package import pack_project
from trainbus.client.sampled_data import SampledData
from trainbus.client.submission import build_data, build_request
from trainbus.client.submission_check import CheckOutcome, SubmissionCheck
from trainbus.ranks.estimated_statistics import estimate_statistics

pytestmark = pytest.mark.shell

TASK = """
import torch
from trainbus import Task

class Rows(Task):
    def __init__(self, lr=0.1):
        self.lr = lr

    def model(self):
        return torch.nn.Linear(1, 1)

    def decode(self, sample):
        return torch.tensor([super().decode(sample)["x"]])

    def loss(self, model, batch):
        return model(batch).mean()
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"x": 1.0, "y": 2}\n')
    return folder


async def run_check(project: Path, source: str, task: str | None = "task:Rows", **options: Any) -> CheckOutcome:
    if task is not None and "data" not in options:
        options["data"] = source
    async with SubmissionCheck(imports_task=task is not None) as check:
        package = pack_project(project)
        return await check.run(build_request(project, task, package, options), package)


async def check(project: Path, source: str, task: str | None = "task:Rows", **options: Any) -> str:
    return (await run_check(project, source, task, **options)).unchecked


def write_project(tmp_path: Path, source: str = TASK) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "task.py").write_text(source)
    return project


async def test_a_task_that_runs_passes(tmp_path: Path, data: Path) -> None:
    assert await check(write_project(tmp_path), str(data), params={"lr": 1}) == ""


@pytest.mark.parametrize(
    ("source", "task", "params", "message"),
    [
        pytest.param(TASK, "task:Row", {}, "Row is not there", id="class"),
        pytest.param(TASK, "tusk:Rows", {}, "there is no module 'tusk'", id="module"),
        pytest.param(TASK, "task:Rows", {"lrr": 1}, "did you mean lr", id="param"),
        pytest.param("def f(:\n", "task:Rows", {}, r"SyntaxError: invalid syntax \(task.py:1\)", id="syntax"),
        pytest.param(
            TASK.replace('["x"]', '["f0"]'), "task:Rows", {},
            r"KeyError: 'f0' \(task.py:13, in decode\).*its row \(json\) has x, y", id="decode",
        ),
    ],
)  # fmt: skip
async def test_what_no_attempt_can_change_is_found_before_the_upload(
    tmp_path: Path, data: Path, source: str, task: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        await check(write_project(tmp_path, source), str(data), task, params=params)


#: Options that name a metric, and what is said of it. The Task has the metrics of a kind in its evaluation.
METRICS = [
    ({"evaluate": "test/acuracy", "model": "m"}, "evaluation measures no 'test/acuracy': did you mean 'test/accuracy'"),
    ({"evaluate": "test/accuracy", "model": "m"}, ""),
    ({"retention_metric": "loss"}, "did you mean 'validation/loss'"),
    ({"retention_metric": "validation/los:min"}, "did you mean 'validation/loss'"),
    ({"retention_metric": "validation/loss"}, ""),
]


@pytest.mark.parametrize(("options", "message"), METRICS)
async def test_a_metric_that_the_task_cannot_report_is_refused(
    tmp_path: Path, data: Path, options: dict[str, Any], message: str
) -> None:
    project = write_project(tmp_path, TASK.replace("(Task):", '(Task):\n    kind = "classification"\n'))
    if not message:
        assert await check(project, str(data), **options) == ""
        return
    with pytest.raises(UsageError, match=message):
        await check(project, str(data), **options)


async def test_metrics_of_methods_of_its_own_are_left_to_the_training(tmp_path: Path, data: Path) -> None:
    own = "\n    def metrics(self, model, batch):\n        return {}\n"
    project = write_project(tmp_path, TASK + own)
    assert await check(project, str(data), evaluate="test/x", model="m", retention_metric="validation/y:max") == ""


LINEAR = "return torch.nn.Linear(1, 1)"
#: What a Task has in the place of something of ``TASK``, and what is said of it: a problem, or what was not judged.
STEPS = [
    pytest.param(LINEAR, "return torch.nn.Linear(3, 1)",
        r"mat1 and mat2 shapes cannot be multiplied \(2x1 and 3x1\) \(task.py:16, in loss\)", "", id="shape"),
    pytest.param(LINEAR, "return 'a model'", r"Rows.model\(\) returned str, and no nn.Module", "", id="no model"),
    pytest.param(".mean()", "", r"Rows.loss\(\) returned a tensor of shape \[2, 1\]", "", id="no mean"),
    pytest.param(".mean()", ".mean().detach()", "does not require grad.*Rows.loss", "", id="no gradient"),
    pytest.param(LINEAR, LINEAR + "\n    def optimizer(self, model):\n        return model",
        "optimizer", "", id="optimizer"),
    pytest.param(LINEAR, LINEAR + "\n    def schedule(self, optimizer):\n        return None",
        r"schedule\(\) takes 2 positional arguments but 3 were given", "", id="schedule"),
    pytest.param(LINEAR, "return torch.nn.Linear(1, len(self.classes))",
        "", "uses classes of the prepared dataset", id="classes"),
    pytest.param(LINEAR, "return torch.nn.Linear(1, 1).cuda()", "", "fails on this machine", id="gpu"),
    pytest.param(LINEAR, "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
        "", "the check before the upload has no network", id="download"),
    pytest.param(LINEAR, "return torch.nn.Linear(1, 10**13)", "", "fails on this machine", id="memory"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "problem", "skipped"), STEPS)
async def test_one_step_is_tried(tmp_path: Path, data: Path, old: str, new: str, problem: str, skipped: str) -> None:
    assert old in TASK
    project = write_project(tmp_path, TASK.replace(old, new))
    if problem:
        with pytest.raises(UsageError, match=problem):
            await check(project, str(data))
    else:
        assert re.search(skipped, await check(project, str(data)))


async def test_a_task_of_images_gets_the_classes_of_their_folders(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "pictures" / name / "0.png")
    source = TASK.replace(
        LINEAR, "return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, len(self.classes)))"
    )
    source = source.replace('torch.tensor([super().decode(sample)["x"]])', "super().decode(sample)")
    source = source.replace("model(batch).mean()", "torch.nn.functional.cross_entropy(model(batch[0]), batch[1])")
    project = write_project(tmp_path, source)
    assert await run_check(project, str(tmp_path / "pictures")) == CheckOutcome()


MEAN = """
    def decode(self, sample):
        mean = self.statistics["x"].mean
        return torch.tensor([super().decode(sample)["x"] - mean])
"""
#: A ``decode`` that uses statistics, and what is said of a step with those of two rows.
ESTIMATED = [
    (MEAN, "^one step was tried with statistics of the 2 samples that were read here"),
    (MEAN.replace('statistics["x"]', 'statistics["z"]'), r"KeyError: 'z' \(task.py.*2 samples.*so it is not judged"),
    (MEAN.replace("torch.tensor([", "torch.zeros(7 + 0 * int(mean)) + torch.tensor(["), "mat1 and mat2.*not judged"),
]


@pytest.mark.parametrize(("decode", "text"), ESTIMATED)
async def test_statistics_are_estimated_and_never_a_reason_to_refuse(
    tmp_path: Path, data: Path, decode: str, text: str
) -> None:
    (data / "a.jsonl").write_text('{"x": 1.0}\n{"x": 3.0}\n')
    project = write_project(tmp_path, TASK + decode)
    assert re.search(text, await check(project, str(data)))


def test_estimates_are_those_of_ingestion(tmp_path: Path) -> None:
    from services.ingestion.core.statistics import Statistics, measure_image, measure_row

    rows: list[dict[str, Any]] = [{"x": 1, "in": {"y": 2.5, "deep": {"z": 1}}, "s": "a", "b": True}, {"x": 4}]
    images = [Image.effect_noise((5, 4), 50), Image.effect_noise((5, 4), 90).convert("RGBA")]
    exact, samples = Statistics(), list[dict[str, bytes]]()
    for row in rows:
        exact.add(measure_row(row))
        samples.append({"json": json.dumps(row).encode()})
    assert as_plain(estimate_statistics(samples)) == pytest.approx(as_plain(exact.result()))
    exact, samples = Statistics(), []
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
        exact.add(measure_image(image))
        samples.append({"png": (tmp_path / f"{number}.png").read_bytes(), "cls": b"0"})
    found = as_plain(estimate_statistics(samples))
    assert found == pytest.approx(as_plain(exact.result()) | {name: found[name] for name in found if "nulls" in name})
    assert estimate_statistics([{"png": b"no image"}, {"bin": b"x"}]) == {}


def as_plain(statistics: dict[str, FieldStatistics]) -> dict[str, float]:
    return {f"{name}.{key}": value for name, each in statistics.items() for key, value in each.model_dump().items()}


STORED = SampledData(
    ({"bin": b"\x01\x02", "cls": b"1"},), "", ("a", "b"), {"x": FieldStatistics(count=2, mean=1, std=1, min=0, max=2)}
)
ARRAYS = """
    decode = Task.decode

    def decode_batch(self, fields):
        return torch.from_numpy(fields["bin"]).float() - self.statistics["x"].mean
"""
#: Methods, the layer that a Task has, and what is said of a step on STORED: a problem, or what was not judged.
ON_STORED = [
    pytest.param(ARRAYS, "torch.nn.Linear(2, len(self.classes))", "", "", id="arrays"),
    pytest.param(ARRAYS, "torch.nn.Linear(3, 1)", "mat1 and mat2", "", id="shape"),
    pytest.param(ARRAYS.replace('"bin"', '"png"'), "torch.nn.Linear(2, 1)",
        "KeyError: 'png'.*decode_batch.*has the fields bin, cls", "", id="field"),
    pytest.param(ARRAYS.replace('["x"]', '["y"]'), "torch.nn.Linear(2, 1)", "KeyError: 'y'", "", id="statistics"),
]  # fmt: skip


@pytest.mark.parametrize(("methods", "layer", "problem", "skipped"), ON_STORED)
async def test_a_step_is_tried_on_a_sample_of_a_stored_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, methods: str, layer: str, problem: str, skipped: str
) -> None:
    monkeypatch.setattr(submission_check, "fetch_stored", AsyncMock(return_value=STORED))
    project = write_project(tmp_path, TASK.replace("torch.nn.Linear(1, 1)", layer) + methods)
    if problem:
        with pytest.raises(UsageError, match=problem):
            await check(project, "0" * 64)
    else:
        assert await check(project, "0" * 64) == skipped


@pytest.mark.parametrize("source", ["s3://lake/rows/", "0" * 64])
async def test_what_is_not_read_is_told(tmp_path: Path, source: str) -> None:
    text = await check(write_project(tmp_path), source)
    assert text.endswith(", so no step was tried")


async def test_a_method_whose_name_is_nearly_ours_is_told(tmp_path: Path, data: Path) -> None:
    own = "\n    def scheduler(self, optimizer):\n        pass\n\n    def helper(self):\n        pass\n"
    outcome = await run_check(write_project(tmp_path, TASK + own), str(data))
    assert outcome.notes == ("Rows.scheduler() is not called by trainbus: did you mean schedule()?",)


async def test_a_step_that_takes_too_long_is_not_judged(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(submission_check.CHECK_TIMEOUT_VARIABLE, "10")
    project = write_project(tmp_path, TASK.replace(LINEAR, "import time; time.sleep(1000)"))
    assert "a step takes too long on this machine" in await check(project, str(data))


async def test_the_limit_is_a_number(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(submission_check.CHECK_TIMEOUT_VARIABLE, "1m")
    with pytest.raises(UsageError, match="TRAINBUS_CHECK_TIMEOUT_S is '1m': give a number of seconds"):
        await check(write_project(tmp_path), str(data))


async def test_a_task_in_src_is_found(tmp_path: Path, data: Path) -> None:
    project = write_project(tmp_path)
    (project / "src" / "own").mkdir(parents=True)
    (project / "pyproject.toml").write_text('[project]\nname = "own"\nversion = "1"\n')
    (project / "task.py").rename(project / "src" / "own" / "task.py")
    assert await check(project, str(data), "own.task:Rows") == ""
    with pytest.raises(UsageError, match=r"no module 'other' in the code package \(its modules: own\)"):
        await check(project, str(data), "other.task:Rows")


async def test_a_task_needs_data(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a task needs data: give --data"):
        await check(write_project(tmp_path), "", data=None)


async def test_what_this_machine_lacks_is_left_to_the_node(tmp_path: Path, data: Path) -> None:
    project = write_project(tmp_path, "import no_such_package\n" + TASK)
    assert "no_such_package is not installed here" in await check(project, str(data))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python trian.py", "there is no file trian.py in the project"),
        ("python task.py", r"SyntaxError: .* \(task.py:1\)"),
        ("./task.py", "is not executable: `chmod"),
        ("./gone.sh", "there is no file ./gone.sh"),
        ("python hidden.py", "whether .gitignore"),
    ],
)
async def test_a_command_names_files_that_are_there(tmp_path: Path, command: str, message: str) -> None:
    project = write_project(tmp_path, "def f(:\n")
    (project / "hidden.py").write_text("pass")
    (project / ".gitignore").write_text("hidden.py")
    with pytest.raises(UsageError, match=message):
        await check(project, "", None, command=command)
    assert await check(project, "", None, command="python -m pytest") == ""


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["0/a.png", "1/b.JPG", "labels.csv", "README.md"], "images"),
        (["a.jsonl", "b.ndjson"], "jsonl"),
        (["part-0.parquet", "_SUCCESS"], "parquet"),
        (["book.txt"], "text"),
        (["a.csv", "b.tsv"], "csv"),
        (["a.tar"], "webdataset"),
        (["index.json", "shard.00000.mds"], "mds"),
        (["manifest.csv", "a.png", "b.wav"], "binary"),
        (["notes.md", ".hidden.jsonl"], None),
    ],
)
def test_a_folder_is_recognized_by_what_lies_in_it(names: list[str], expected: str | None) -> None:
    assert recognize_format(names) == expected


def test_a_folder_of_two_kinds_names_both(data: Path) -> None:
    (data / "b.parquet").touch()
    with pytest.raises(UsageError, match=r"both jsonl \(a.jsonl\) and parquet \(b.parquet\) are there"):
        find_local_format(data)
    assert build_data(str(data), "jsonl")["format"] == "jsonl"


def test_the_format_of_most_files_is_advised(tmp_path: Path) -> None:
    names = ["notes.txt", *(f"cat/{number}.png" for number in range(80))]
    with pytest.raises(
        ValueError, match=r"images \(80 files, such as cat/0.png\) and text \(notes.txt\).*--format images"
    ):
        recognize_format(names)


@pytest.mark.parametrize(
    ("other", "advice"), [("notes.txt", "other files are then skipped"), ("a.tar", "then count as broken records")]
)
def test_what_becomes_of_files_beside_images_is_said(other: str, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        recognize_format(["cat/0.png", "cat/1.png", other])


PICTURES = ["cat/0.png", "dog/1.png", "notes.txt"]
#: A format, files, and what is wrong with them.
MISMATCHES = [
    ("text", PICTURES, r"the format is to be text \(--format text\), but the files are images \(2 files, such as"),
    ("tokens", PICTURES, "but the files are images"),
    ("csv", ["a.parquet"], r"but the files are parquet \(a.parquet\)"),
    ("jsonl", PICTURES, "but the files are images"),
    ("images", ["a.png", "b.png"], "put each into one that is named after its class"),
    ("images", ["a.csv"], "but the files are csv"),
    ("images", PICTURES, ""),
    ("images", ["a.png", "labels.csv"], ""),
    ("text", ["a.jsonl", "b.jsonl"], ""),
    ("text", ["book"], ""),
    ("tokens", ["a.bin"], ""),
    ("jsonl", ["a.jsonl.gz", "notes.txt"], ""),
    ("csv", ["a.csv", "b.parquet", "c.parquet"], ""),
    ("binary", ["a.png"], ""),
    ("mds", ["index.json", "a.png", "b.png"], ""),
    ("auto", PICTURES, ""),
]


@pytest.mark.parametrize(("data_format", "names", "text"), MISMATCHES)
def test_a_format_that_the_files_cannot_have_is_told(data_format: str, names: list[str], text: str) -> None:
    found = find_format_mismatch(data_format, names)
    assert re.search(text, found)
    assert bool(found) == bool(text)


async def test_images_are_not_submitted_as_text(tmp_path: Path) -> None:
    (tmp_path / "pictures" / "cat").mkdir(parents=True)
    (tmp_path / "pictures" / "cat" / "0.png").touch()
    with pytest.raises(UsageError, match="but the files are images"):
        await check(write_project(tmp_path), str(tmp_path / "pictures"), data_format="text")


def test_a_sample_is_what_the_task_gets(tmp_path: Path, data: Path) -> None:
    import polars

    from contracts.spec.data import DataSource

    polars.DataFrame({"x": [1, 2]}).write_parquet(tmp_path / "t.parquet")
    source = DataSource(source=data.as_uri(), format="parquet")
    assert [json.loads(each["json"]) for each in read_samples(tmp_path / "t.parquet", source)] == [{"x": 1}, {"x": 2}]
    assert read_samples(data, source) == []
    (tmp_path / "c.csv").write_text("x;name\n1.5;a\n")
    (row,) = read_samples(tmp_path / "c.csv", DataSource(source=data.as_uri(), format="csv"))
    assert json.loads(row["json"]) == {"x": 1.5, "name": "a"}
    Image.new("L", (2, 2)).save(tmp_path / "i.png")
    (image,) = read_samples(tmp_path / "i.png", DataSource(source=data.as_uri(), format="images"))
    assert image.keys() == {"png", "cls"}
