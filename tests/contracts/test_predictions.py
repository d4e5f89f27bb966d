"""The format of predictions: what is written is read back, and what fits no column is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contracts import predictions
from contracts.predictions import Predictions, PredictionsError, PredictionsInfo, PredictionsWriter

INFO = PredictionsInfo(dataset_id="d", split="test", classes=("cat", "dog"), kind="classification", score_of="accuracy")


def rows(start: int, count: int) -> dict[str, Any]:
    numbers = np.arange(start, start + count)
    return {
        "id": [f"sample-{number}" for number in numbers],
        "target": numbers % 2,
        "prediction": numbers % 3 % 2,
        "probabilities": np.stack([numbers % 2, 1 - numbers % 2], axis=1).astype(np.float32),
        "country": ["fr" if number % 5 else "de" for number in numbers],
    }


def test_what_is_written_batch_by_batch_is_read_back_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "GROUP_ROWS", 64)
    path = tmp_path / "predictions.parquet"
    with PredictionsWriter(path, INFO) as writer:
        for start in range(0, 230, 23):
            assert not path.exists()
            writer.write(rows(start, 23))
    found = Predictions(path)
    assert found.info == INFO
    assert found.rows == writer.rows == 230
    assert found.columns == ("id", "target", "prediction", "score", "probabilities", "country")
    assert found.slice_columns == ("country",)
    assert pq.ParquetFile(path).num_row_groups > 1
    assert max(len(batch) for batch in found.batches(rows=50)) <= 50
    table = found.table()
    assert table["id"].to_pylist() == [f"sample-{number}" for number in range(230)]
    assert table["score"].to_pylist() == [float(number % 2 == number % 3 % 2) for number in range(230)]
    assert table["probabilities"][0].as_py() == [0.0, 1.0]
    assert found.table(["score"]).column_names == ["score"]
    assert Predictions(path.read_bytes()).table().equals(table)
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    assert [each.name for each in tmp_path.iterdir()] == ["predictions.parquet"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(PredictionsError), PredictionsWriter(tmp_path / "p.parquet") as writer:
        writer.write(rows(0, 100_000) | {"target": []})
    assert list(tmp_path.iterdir()) == []


#: Written by a script with pandas, polars or Arrow -> (column types, scores).
FOREIGN: dict[str, tuple[dict[str, Any], dict[str, str], list[float | None]]] = {
    "integers": (
        {"id": [1, 2], "target": pa.array([0, 1], pa.int32()), "prediction": pa.array([0, 0], pa.uint8())},
        {"id": "string", "target": "int64", "prediction": "int64", "score": "double"},
        [1, 0],
    ),
    "text": (
        {
            "id": pa.array(["a", "b"], pa.large_string()),
            "target": pa.array(["cat", "dog"]).dictionary_encode(),
            "prediction": ["cat", "cat"],
        },
        {"id": "string", "target": "string", "prediction": "string", "score": "double"},
        [1, 0],
    ),
    "truth values": (
        {"id": ["a", "b"], "target": [True, False], "prediction": [True, True], "is_new": [True, False]},
        {"id": "string", "target": "int64", "prediction": "int64", "score": "double", "is_new": "bool"},
        [1, 0],
    ),
    "numbers": (
        {"id": ["a", "b"], "target": pa.array([1, 2], pa.float32()), "prediction": [1, 4]},
        {"id": "string", "target": "double", "prediction": "double", "score": "double"},
        [0, -4],
    ),
    "a score of its own": (
        {"id": ["a", "b"], "score": pa.array([1, None], pa.float32())},
        {"id": "string", "score": "double"},
        [1, None],
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_another_library_wrote_is_read_in_the_formats_types(case: str, tmp_path: Path) -> None:
    columns, types, scores = FOREIGN[case]
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    found = Predictions(tmp_path / "p.parquet")
    found.check()
    table = found.table()
    assert {field.name: str(field.type) for field in table.schema} == types
    assert table["score"].to_pylist() == scores
    assert found.info == PredictionsInfo()


GOOD: dict[str, Any] = {"id": ["a", "b"], "target": [0, 1], "prediction": [0, 0]}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no id": ({"target": [0], "prediction": [0]}, "no column 'id': each row needs the key of its sample"),
    "no target": ({"id": ["a"], "prediction": [0]}, "no column 'target': give 'target' and 'prediction'"),
    "neither": ({"id": ["a"]}, "no column 'target': give 'target' and 'prediction', or 'score' alone"),
    "two rows of one sample": ({**GOOD, "id": ["a", "a"]}, "has 'a' more than once"),
    "no value": ({**GOOD, "prediction": [0, None]}, "column 'prediction' of .* has a row without a value"),
    "other types": (
        {**GOOD, "target": ["cat", "dog"]},
        "'target' .string. and 'prediction' .int64. must have one type",
    ),
    "text as score": ({**GOOD, "score": ["1", "0"]}, "column 'score' of the predictions must hold numbers, not string"),
    "no finite score": ({**GOOD, "score": [1.0, float("inf")]}, "'score' of .* has a value that is no finite number"),
    "nested": ({**GOOD, "where": [{"x": 1}, {"x": 2}]}, "column 'where' .* must hold integers, numbers or text"),
    "no lists": ({**GOOD, "probabilities": [0.1, 0.2]}, "column 'probabilities' .* lists of numbers, one a class"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_fits_no_column_is_refused_by_reader_and_writer(case: str, tmp_path: Path) -> None:
    columns, words = BAD[case]
    with pytest.raises(PredictionsError, match=words), PredictionsWriter(tmp_path / "written.parquet") as writer:
        writer.write(columns)
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    with pytest.raises(PredictionsError, match=words):
        Predictions(tmp_path / "p.parquet").check()


def test_the_writer_refuses_unequal_lengths_other_columns_and_nothing_at_all(tmp_path: Path) -> None:
    with pytest.raises(PredictionsError, match="differ in length: 'id' 1, 'score' 2"):
        PredictionsWriter(tmp_path / "p.parquet").write({"id": ["a"], "score": [1.0, 2.0]})
    with PredictionsWriter(tmp_path / "kept.parquet") as writer:
        writer.write(GOOD)
        with pytest.raises(PredictionsError, match="same columns and types"):
            writer.write({"id": ["c"], "score": [1.0]})
    with pytest.raises(PredictionsError, match="no samples"), PredictionsWriter(tmp_path / "p.parquet") as empty:
        assert empty.rows == 0
    assert [each.name for each in tmp_path.iterdir()] == ["kept.parquet"]


@pytest.mark.parametrize("content", [b"", b"PAR1" * 100, b'{"labels": []}'])
def test_what_is_no_parquet_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_bytes(content)
    with pytest.raises(PredictionsError, match=r"p\.parquet is no Parquet file"):
        Predictions(tmp_path / "p.parquet")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    with PredictionsWriter(path) as writer:
        writer.write(rows(0, 5000))
    content = bytearray(path.read_bytes())
    content[100:400] = bytes(300)
    with pytest.raises(PredictionsError):
        Predictions(bytes(content)).check()
