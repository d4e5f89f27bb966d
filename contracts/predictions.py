"""The predictions of an evaluation: ``predictions.parquet``, one row a sample of the split.

- ``id`` (string): the sample's key in the dataset; no two rows have the same.
- ``target``, ``prediction`` (both int64, double or string): what is true, and what the model says. Absent where they
  are no single values (language modelling).
- ``score`` (double): the larger the better; the main metric is its mean. A null means that the row is no unit of the
  metric: a ranking metric is of queries, so of the rows of a query one has the score.
- ``probabilities`` (list<float>, optional): one a class, in the order of ``PredictionsInfo.classes``.
- any other (int64, double, string, bool): metadata by which results are sliced, a class, a language, a device.

Two evaluations on the same samples are compared row by row: paired by ``id``, by the difference of ``score``.

Reader and writer hold a bounded number of rows in memory. pyarrow is imported at the first use, so that the names here
cost nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

PREDICTIONS_FILE = "predictions.parquet"
ID, TARGET, PREDICTION, SCORE, PROBABILITIES = COLUMNS = ("id", "target", "prediction", "score", "probabilities")
#: Key of ``PredictionsInfo`` in the file's metadata.
INFO_KEY = b"trainbus.predictions"
#: A row group is written once this many rows or bytes are there; a reader holds one at a time.
GROUP_ROWS, GROUP_BYTES = 65_536, 16 * 2**20


class PredictionsError(ValueError):
    """These are no predictions; the text names the column, and what to change."""


class PredictionsInfo(BaseModel):
    """What the predictions are of."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    dataset_id: str | None = None
    split: str = "test"
    #: Names of the classes that integers in ``target`` and ``prediction`` stand for.
    classes: tuple[str, ...] = ()
    #: ``Task.kind``; '' is unknown.
    kind: str = ""
    #: The metric that is the mean of ``score``, perhaps negated: ``accuracy``, ``mse``.
    score_of: str = ""


class PredictionsWriter:
    """Writes a file batch by batch; it is there, whole and valid, once the ``with`` block ends without an error."""

    def __init__(self, path: Path, info: PredictionsInfo | None = None) -> None:
        self._path, self._partial = path, path.with_name(f".{path.name}.partial")
        self._info = info or PredictionsInfo()
        self._schema: Any = None
        self._writer: Any = None
        self._pending: list[Any] = []
        self.rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            if self._writer is not None:
                with contextlib.suppress(OSError):
                    self._writer.close()
            self._partial.unlink(missing_ok=True)

    def write(self, columns: Mapping[str, Any]) -> None:
        """Append rows: each column an Arrow or numpy array or a sequence, all of one length.

        Raises:
            PredictionsError: a column is missing, of another type, or of another length.
        """
        batch = _normalise(_to_table(columns))
        if self._schema is None:
            self._schema = batch.schema
        elif not batch.schema.equals(self._schema):
            raise PredictionsError(
                f"every batch of predictions must have the same columns and types: the first had {_names(self._schema)}"
                f", this one has {_names(batch.schema)}"
            )
        self.rows += batch.num_rows
        self._pending.append(batch)
        pending_rows = sum(each.num_rows for each in self._pending)
        if pending_rows >= GROUP_ROWS or sum(each.nbytes for each in self._pending) >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._writer is None:
            schema = self._schema.with_metadata({INFO_KEY: self._info.model_dump_json().encode()})
            self._writer = pq.ParquetWriter(self._partial, schema, compression="zstd")
        table = pa.concat_tables(self._pending).replace_schema_metadata(None).cast(self._schema)
        self._writer.write_table(table.replace_schema_metadata(self._writer.schema.metadata), row_group_size=GROUP_ROWS)
        self._pending = []

    def _finish(self) -> None:
        if not self.rows:
            raise PredictionsError("there are no predictions to write: the split has no samples")
        if self._pending:
            self._flush()
        self._writer.close()
        self._writer = None
        Predictions(self._partial).check()
        self._partial.replace(self._path)


class Predictions:
    """Reads such a file, also one that a script wrote with another library."""

    def __init__(self, source: Path | bytes) -> None:
        """Read the file's columns and its ``info``.

        Raises:
            PredictionsError: it is no Parquet file, or a column is missing or of another type.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._name = source.name if isinstance(source, Path) else PREDICTIONS_FILE
        try:
            self._file = pq.ParquetFile(source if isinstance(source, Path) else io.BytesIO(source))
        except (OSError, pa.ArrowException) as error:
            raise PredictionsError(f"{self._name} is no Parquet file: {error}") from error
        self.rows: int = self._file.metadata.num_rows
        schema = _normalise(self._file.schema_arrow.empty_table()).schema
        self.columns: tuple[str, ...] = tuple(schema.names)
        #: Columns by whose values results can be sliced.
        self.slice_columns: tuple[str, ...] = tuple(
            field.name for field in schema if field.name not in COLUMNS and not pa.types.is_floating(field.type)
        )
        try:
            self.info = PredictionsInfo.model_validate_json(
                (self._file.schema_arrow.metadata or {}).get(INFO_KEY, b"{}")
            )
        except ValidationError:
            self.info = PredictionsInfo()

    def batches(self, columns: Sequence[str] | None = None, rows: int = GROUP_ROWS) -> Iterator[Any]:
        """Yield the rows in order, as ``pyarrow.RecordBatch`` of at most ``rows`` rows.

        Raises:
            PredictionsError: a value is not what its column may hold.
        """
        import pyarrow as pa

        # Whatever is read, these are checked.
        needed = None if columns is None else {*columns, ID, TARGET, PREDICTION, SCORE}
        stored = [name for name in self._file.schema_arrow.names if needed is None or name in needed]
        try:
            for batch in self._file.iter_batches(rows, columns=stored):
                table = _normalise(pa.Table.from_batches([batch]))
                _check_values(table, self._name)
                yield from table.select(list(self.columns if columns is None else columns)).to_batches()
        except (OSError, pa.ArrowException) as error:
            raise PredictionsError(f"{self._name} cannot be read: {error}") from error

    def table(self, columns: Sequence[str] | None = None) -> Any:
        """Return these columns of all rows, a ``pyarrow.Table``."""
        import pyarrow as pa

        names = list(self.columns if columns is None else columns)
        schema = _normalise(self._file.schema_arrow.empty_table()).select(names).schema.remove_metadata()
        batches = [batch.cast(schema) for batch in self.batches(names)]
        return pa.Table.from_batches(batches, schema)

    def check(self) -> None:
        """Read everything once.

        Raises:
            PredictionsError: a value is not what its column may hold, or two rows have one id.
        """
        import pyarrow.compute as pc

        for _ in self.batches():
            pass
        counts = pc.value_counts(self.table([ID])[ID].combine_chunks())
        if len(counts) != self.rows:
            repeated = next(each["values"].as_py() for each in counts if each["counts"].as_py() > 1)
            raise PredictionsError(
                f"column {ID!r} of {self._name} has {repeated!r} more than once: it must name each sample once"
            )


def _to_table(columns: Mapping[str, Any]) -> Any:
    import numpy as np
    import pyarrow as pa

    arrays = {}
    for name, values in columns.items():
        if isinstance(values, pa.Array | pa.ChunkedArray):
            arrays[name] = values
        elif isinstance(values, np.ndarray) and values.ndim == 2:
            ends = np.arange(0, values.size + 1, max(values.shape[1], 1), dtype=np.int32)
            arrays[name] = pa.ListArray.from_arrays(ends[: len(values) + 1], pa.array(values.ravel()))
        else:
            try:
                arrays[name] = pa.array(values)
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise PredictionsError(f"column {name!r} of the predictions: {error}") from error
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r} {length:,}" for name, length in lengths.items())
        raise PredictionsError(f"the columns of the predictions differ in length: {listed}")
    return pa.table(arrays)


def _normalise(table: Any) -> Any:
    """Return the table in the format's types, with a score; the columns of the format first.

    Raises:
        PredictionsError: a column is missing or cannot be of its type.
    """
    import pyarrow as pa

    if ID not in table.column_names:
        raise PredictionsError(
            f"the predictions have no column {ID!r}: each row needs the key of its sample "
            f"(they have {_names(table.schema)})"
        )
    columns = {name: _convert(name, table[name]) for name in table.column_names}
    present = [name for name in (TARGET, PREDICTION) if name in columns]
    if len(present) == 1 or (not present and SCORE not in columns):
        missing = next(name for name in (TARGET, PREDICTION) if name not in columns)
        raise PredictionsError(
            f"the predictions have no column {missing!r}: give {TARGET!r} and {PREDICTION!r}, or {SCORE!r} alone"
        )
    if present:
        columns[TARGET], columns[PREDICTION] = _of_one_type(columns[TARGET], columns[PREDICTION])
        columns.setdefault(SCORE, _default_score(columns[TARGET], columns[PREDICTION]))
    ordered = [*(name for name in COLUMNS if name in columns), *(name for name in columns if name not in COLUMNS)]
    return pa.table({name: columns[name] for name in ordered})


def _convert(name: str, values: Any) -> Any:
    import pyarrow as pa

    kind = values.type
    if pa.types.is_dictionary(kind):
        values = values.cast(kind.value_type)
        kind = values.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    is_real = pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    wanted: Any = None
    if name == ID:
        wanted = pa.string() if is_text or pa.types.is_integer(kind) else None
    elif name == PROBABILITIES:
        wanted = pa.list_(pa.float32()) if is_list else None
    elif name == SCORE:
        wanted = pa.float64() if is_number or is_real else None
    elif is_text:
        wanted = pa.string()
    elif pa.types.is_boolean(kind) and name not in (TARGET, PREDICTION):
        wanted = kind
    elif is_number or is_real:
        wanted = pa.int64() if is_number else pa.float64()
    if wanted is None:
        may_be = {
            ID: "text or integers",
            PROBABILITIES: "lists of numbers, one a class",
            SCORE: "numbers",
        }.get(name, "integers, numbers or text")
        raise PredictionsError(f"column {name!r} of the predictions must hold {may_be}, not {kind}")
    try:
        return values.cast(wanted)
    except pa.ArrowException as error:
        raise PredictionsError(f"column {name!r} of the predictions: {error}") from error


def _of_one_type(target: Any, prediction: Any) -> tuple[Any, Any]:
    import pyarrow as pa

    if target.type.equals(prediction.type):
        return target, prediction
    if pa.types.is_string(target.type) or pa.types.is_string(prediction.type):
        raise PredictionsError(
            f"columns {TARGET!r} ({target.type}) and {PREDICTION!r} ({prediction.type}) must have one type"
        )
    return target.cast(pa.float64()), prediction.cast(pa.float64())


def _default_score(target: Any, prediction: Any) -> Any:
    """Return 1 or 0 for right or wrong, for real numbers minus the squared error."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(target.type):
        difference = pc.subtract(prediction, target)
        return pc.negate(pc.multiply(difference, difference))
    return pc.equal(prediction, target).cast(pa.float64())


def _check_values(table: Any, name: str) -> None:
    import pyarrow.compute as pc

    for column in (ID, TARGET, PREDICTION, PROBABILITIES):
        if column in table.column_names and table[column].null_count:
            raise PredictionsError(f"column {column!r} of {name} has a row without a value")
    score = table[SCORE].drop_null()
    if len(score) and not pc.all(pc.is_finite(score)).as_py():
        raise PredictionsError(f"column {SCORE!r} of {name} has a value that is no finite number")


def _names(schema: Any) -> str:
    return json.dumps({field.name: str(field.type) for field in schema}).replace('"', "") if len(schema) else "none"
