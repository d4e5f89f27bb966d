"""What a script wrote about a checkpoint becomes the result of its run, or an error that says what to write."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contracts.predictions import Predictions
from contracts.ranks import JOURNAL_LINE, Launch, ResultLine
from contracts.spec.run import RunSpec

pytestmark = pytest.mark.shell
EXAMPLE = Path(__file__).parents[2] / "examples" / "scikit-learn"
REPOSITORY = Path(__file__).parents[2]


class Rank:
    """A rank of an evaluation run, as an agent starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.outputs, self.resumed = folder / "g1", folder / "outputs", folder / "checkpoint"
        for each in (self.folder, self.outputs, self.resumed):
            each.mkdir()
        spec = RunSpec.model_validate(
            {
                "name": "e",
                "kind": "evaluate",
                "command": ["x"],
                "evaluate": {"run_id": "r", "checkpoint_uri": "s3://models/c"},
            }
        )
        launch = Launch(
            run_id="re", generation=1, node_id="n", world_size=1, spec=spec, folder=self.folder, socket=folder / "s",
            dataset_id="d" * 64,
        )  # fmt: skip
        (self.folder / "launch.json").write_text(launch.model_dump_json())

    def run(self, *command: str, **env: str) -> tuple[int, str]:
        """Run the evaluation; return its exit code and what it printed."""
        variables = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "TRAINBUS_LAUNCH": str(self.folder / "launch.json"),
            "TRAINBUS_JOURNAL": str(self.folder / "rank_0.jsonl"),
            "TRAINBUS_OUTPUT_DIR": str(self.outputs),
            "TRAINBUS_RESUME_DIR": str(self.resumed),
            **env,
        }
        module = [sys.executable, "-m", "trainbus.script_evaluation", *command]
        done = subprocess.run(module, env=variables, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def run_python(self, code: str, **env: str) -> tuple[int, str]:
        prelude = "import json, os, pathlib\nout = pathlib.Path(os.environ['TRAINBUS_OUTPUT_DIR'])\n"
        return self.run(sys.executable, "-c", prelude + code, **env)

    @property
    def result(self) -> ResultLine | None:
        journal = self.folder / "rank_0.jsonl"
        lines = journal.read_text().splitlines() if journal.exists() else []
        found = [line for line in map(JOURNAL_LINE.validate_json, lines) if isinstance(line, ResultLine)]
        return found[-1] if found else None


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def test_the_example_is_trained_and_measured(rank: Rank) -> None:
    env = {**os.environ, "TRAINBUS_OUTPUT_DIR": str(rank.resumed), "EPOCHS": "2"}
    subprocess.run([sys.executable, str(EXAMPLE / "train.py")], env=env, check=True, capture_output=True)
    # What training left lies in the output folder again: none of it is a result.
    shutil.copytree(rank.resumed, rank.outputs, dirs_exist_ok=True)
    (rank.outputs / "metrics.json").write_text('{"accuracy": 2}')
    code, text = rank.run(sys.executable, str(EXAMPLE / "evaluate.py"))
    assert code == 0, text
    assert rank.result is not None
    assert set(rank.result.metrics) == {"test/accuracy", "test/macro_f1", "test/log_loss"}
    assert rank.result.artifacts == ("predictions.parquet",)
    predictions = Predictions(rank.folder / "predictions.parquet")
    assert predictions.info.dataset_id == "d" * 64
    scores = predictions.table()["score"].to_pylist()
    assert sum(scores) / len(scores) == pytest.approx(rank.result.metrics["test/accuracy"])
    assert len(predictions.table()["probabilities"][0].as_py()) == 10


PREDICTIONS: dict[str, tuple[str, str]] = {
    "csv": ("predictions.csv", "id,target,prediction,country\n7,cat,dog,de\n8,cat,cat,fr\n"),
    "json lines": (
        "predictions.jsonl",
        '{"id": 7, "target": "cat", "prediction": "dog", "country": "de"}\n'
        '{"id": 8, "target": "cat", "prediction": "cat", "country": "fr"}\n',
    ),
}


@pytest.mark.parametrize("case", PREDICTIONS)
def test_predictions_as_text_are_kept_as_parquet(case: str, rank: Rank) -> None:
    name, content = PREDICTIONS[case]
    metrics = "(out / 'metrics.json').write_text('{\"test/accuracy\": 0.5, \"f1\": 1}')"
    code, text = rank.run_python(f"{metrics}\n(out / {name!r}).write_text({content!r})")
    assert code == 0, text
    assert rank.result is not None
    assert rank.result.metrics == {"test/accuracy": 0.5, "test/f1": 1.0}
    predictions = Predictions(rank.folder / "predictions.parquet")
    assert predictions.table().to_pylist() == [
        {"id": "7", "target": "cat", "prediction": "dog", "score": 0.0, "country": "de"},
        {"id": "8", "target": "cat", "prediction": "cat", "score": 1.0, "country": "fr"},
    ]


def test_metrics_alone_are_a_result_and_other_ranks_have_none(rank: Rank) -> None:
    write = "(out / 'metrics.json').write_text('{\"loss\": 0.5}')"
    assert rank.run_python(write, RANK="1")[0] == 0
    assert rank.result is None
    assert rank.run_python(write)[0] == 0
    assert rank.result is not None
    assert (rank.result.metrics, rank.result.artifacts) == ({"test/loss": 0.5}, ())


BAD: dict[str, tuple[str, dict[str, str], int, str]] = {
    "fails": ("raise SystemExit(3)", {}, 3, ""),
    "killed": ("os.kill(os.getpid(), 9)", {}, 137, ""),
    "no metrics": ("", {}, 1, "wrote no metrics.json into TRAINBUS_OUTPUT_DIR: write an object of numbers"),
    "no JSON": ("(out / 'metrics.json').write_text('{')", {}, 1, "is not JSON"),
    "a list": ("(out / 'metrics.json').write_text('[1]')", {}, 1, "must be an object of 1 to 1,000 numbers"),
    "nothing": ("(out / 'metrics.json').write_text('{}')", {}, 1, "must be an object of 1 to 1,000 numbers"),
    "no number": ("(out / 'metrics.json').write_text('{\"a\": \"b\"}')", {}, 1, "'a' is 'b', and no finite number"),
    "not finite": ("(out / 'metrics.json').write_text('{\"a\": NaN}')", {}, 1, "'a' is nan, and no finite number"),
    "bad predictions": (
        "(out / 'metrics.json').write_text('{\"a\": 1}'); (out / 'predictions.csv').write_text('x,y\\n1,2\\n')",
        {},
        1,
        "no column 'id'",
    ),
    "no checkpoint": ("", {"TRAINBUS_RESUME_DIR": ""}, 1, "there is no checkpoint to evaluate"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_result_fails_and_says_what_to_write(case: str, rank: Rank) -> None:
    code, env, expected, words = BAD[case]
    found, text = rank.run_python(code, **env)
    assert (found, rank.result) == (expected, None)
    assert words in text.strip().splitlines()[-1] if words else True


def test_a_command_that_is_not_there_is_named(rank: Rank) -> None:
    code, text = rank.run("no-such-program")
    assert code == 1
    assert "evaluation.command cannot be started: [Errno 2] No such file or directory: 'no-such-program'" in text


def test_the_metrics_are_json_numbers_of_any_library(rank: Rank) -> None:
    written: Any = json.dumps({"validation/auc": 1e-3, "n": 10**6})
    assert rank.run_python(f"(out / 'metrics.json').write_text({written!r})")[0] == 0
    assert rank.result is not None
    assert rank.result.metrics == {"validation/auc": 0.001, "test/n": 1e6}
