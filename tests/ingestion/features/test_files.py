"""Parquet files in, Parquet files out: types, damage, drift; how much is taken at a time changes nothing."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from contracts.spec.data import FeatureJoin, FeatureTable
from services.ingestion.core.records import InvalidRecord
from services.ingestion.features import enrich, table_join, tables
from services.ingestion.features.enrich import join_files
from services.ingestion.features.table_join import load_table
from services.kit.bus import PoisonMessage

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(*seconds: float | None) -> list[datetime | None]:
    return [None if s is None else START + timedelta(seconds=s) for s in seconds]


def stamps(*seconds: float | None, unit: str = "us", tz: str | None = "UTC") -> Any:
    return pyarrow.array(at(*seconds), pyarrow.timestamp(unit, "UTC")).cast(pyarrow.timestamp(unit, tz))


def write(path: Path, columns: dict[str, Any]) -> tuple[str, Path]:
    path.parent.mkdir(exist_ok=True, parents=True)
    parquet.write_table(pyarrow.table(columns), path, row_group_size=7)
    return f"s3://lake/{path.name}", path


def table(**more: Any) -> FeatureTable:
    return FeatureTable(**{"name": "t", "source": "s3://lake/t", "keys": ("user",), "created_time": None, **more})


class Lake:
    """Writes tables into a folder and joins them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, 0

    def file(self, **columns: Any) -> tuple[str, Path]:
        self._count += 1
        return write(self.folder / f"{self._count:03d}.parquet", columns)

    def join(
        self,
        entity_files: list[tuple[str, Path]],
        *tables: tuple[FeatureTable, list[tuple[str, Path]]],
        **rule: Any,
    ) -> list[Any]:
        """The columns of each joined file, or its ``InvalidRecord``."""
        spec = FeatureJoin(tables=tuple(spec for spec, _ in tables), **rule)
        loaded = [load_table(one, files) for one, files in tables]
        self._count += 1
        out = self.folder / f"out-{self._count}"
        out.mkdir()
        found = join_files(entity_files, loaded, spec, out, lambda done, total: None)
        return [one if isinstance(one, InvalidRecord) else parquet.read_table(one).to_pydict() for one in found]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def test_rows_stay_in_order_with_features_beside_them(lake: Lake) -> None:
    asked = lake.file(
        user=[2, 1, None, 1, 9], event_timestamp=stamps(10, 10, 10, None, 10), label=["a", "b", "c", "d", "e"]
    )
    clicks = lake.file(
        user=[1, 1, 2], event_timestamp=stamps(1, 2, 3), created=stamps(1, 20, 3), n=[10, 11, 12], text=["x", "y", "z"]
    )
    (found,) = lake.join([asked], (table(name="clicks", created_time="created"), [clicks]))
    assert found["label"] == ["a", "b", "c", "d", "e"]
    assert found["clicks__n"] == [12, 10, None, None, None]
    assert found["clicks__text"] == ["z", "x", None, None, None]
    assert list(found) == ["user", "event_timestamp", "label", "clicks__n", "clicks__text"]


@pytest.mark.parametrize(
    "times",
    [
        {"unit": "ns"},
        {"unit": "us"},
        {"unit": "ms"},
        {"unit": "s"},
        {"unit": "ns", "tz": None},
        {"unit": "ms", "tz": "Europe/Berlin"},
        {"unit": "us", "tz": "+05:30"},
    ],
)
def test_units_and_zones_of_time(lake: Lake, times: dict[str, Any]) -> None:
    asked = lake.file(user=[1, 1, 1], event_timestamp=stamps(9, 10, 11, unit="us"))
    feature = lake.file(user=[1], event_timestamp=stamps(10, **times), v=[1])
    assert lake.join([asked], (table(), [feature]))[0]["t__v"] == [None, 1, 1]
    turned = lake.file(user=[1], event_timestamp=stamps(10, **times))
    earlier = lake.file(user=[1, 1], event_timestamp=stamps(10, 11, unit="ns"), v=[1, 2])
    assert lake.join([turned], (table(), [earlier]))[0]["t__v"] == [1]


def test_a_nanosecond_matters(lake: Lake) -> None:
    nanos = pyarrow.array([1_000_000_001, 1_000_000_002], pyarrow.int64()).cast(pyarrow.timestamp("ns"))
    asked = lake.file(user=[1, 1], event_timestamp=nanos)
    feature = lake.file(user=[1], event_timestamp=nanos[1:], v=[1])
    assert lake.join([asked], (table(), [feature]))[0]["t__v"] == [None, 1]


def test_dates_and_the_end_of_time(lake: Lake) -> None:
    days = pyarrow.array([date(2026, 1, 1), date(2026, 1, 2)], pyarrow.date32())
    asked = lake.file(user=[1, 1, 1], event_timestamp=stamps(-1, 0, 86_400))
    feature = lake.file(user=[1, 1], event_timestamp=days, v=[1, 2])
    assert lake.join([asked], (table(), [feature]))[0]["t__v"] == [None, 1, 2]
    # Some write the year 9999 for "never": it is beyond the range of nanoseconds.
    never = pyarrow.array([datetime(9999, 12, 31), datetime(2026, 1, 1)], pyarrow.timestamp("us"))
    feature = lake.file(user=[1, 1], event_timestamp=stamps(-9, -8, unit="ns"), created=never, v=[1, 2])
    asked = lake.file(user=[1], event_timestamp=stamps(5))
    assert lake.join([asked], (table(created_time="created"), [feature]))[0]["t__v"] == [2]


def test_a_ttl_is_exact(lake: Lake) -> None:
    feature = lake.file(user=[1], event_timestamp=stamps(0), v=[1])
    for ttl_s, expected in ((0.3, [1, 1, None]), (0.299999, [1, None, None]), (None, [1, 1, 1])):
        asked = lake.file(user=[1] * 3, event_timestamp=stamps(0.299999, 0.3, 0.300001))
        assert lake.join([asked], (table(ttl_s=ttl_s), [feature]))[0]["t__v"] == expected


def test_a_snapshot_and_corrections(lake: Lake) -> None:
    feature = lake.file(user=[1, 1, 1], event_timestamp=stamps(1, 1, 2), created=stamps(1, 5, 9), v=[1, 2, 3])
    spec = table(created_time="created")
    for rule, expected in (
        ({}, [1, 2, 3]),
        ({"as_known": False}, [3, 3, 3]),
        ({"snapshot_at": START + timedelta(seconds=5)}, [1, 2, 2]),
        ({"snapshot_at": START + timedelta(seconds=4.999999), "as_known": False}, [1, 1, 1]),
    ):
        asked = lake.file(user=[1] * 3, event_timestamp=stamps(4, 5, 9))
        assert lake.join([asked], (spec, [feature]), **rule)[0]["t__v"] == expected


KEYS: dict[str, tuple[Any, Any, list[Any]]] = {
    "int32 and int64": (pyarrow.int32(), pyarrow.int64(), [1, 2**31 - 1]),
    "uint8 and int64": (pyarrow.uint8(), pyarrow.int64(), [1, 255]),
    "uint64 and uint64": (pyarrow.uint64(), pyarrow.uint64(), [1, 2**64 - 1]),
    "uint64 and int64": (pyarrow.uint64(), pyarrow.int64(), [1, 2**63 - 1]),
    "text and categories": (pyarrow.string(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), ["", "ü"]),
    "text and large text": (pyarrow.string(), pyarrow.large_string(), ["a", "A"]),
    "bytes": (pyarrow.binary(2), pyarrow.binary(), [b"ab", b"\x00\xff"]),
    "dates": (pyarrow.date32(), pyarrow.date32(), [date(2026, 1, 1), date(1900, 1, 1)]),
    "booleans": (pyarrow.bool_(), pyarrow.bool_(), [True, False]),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_two_types(lake: Lake, name: str) -> None:
    mine, theirs, values = KEYS[name]
    asked = lake.file(user=pyarrow.array([*values, None], mine), event_timestamp=stamps(5, 5, 5))
    feature = lake.file(
        uid=pyarrow.array([*reversed(values), None], theirs), event_timestamp=stamps(1, 1, 1), v=[1, 2, 3]
    )
    assert lake.join([asked], (table(keys=("uid",), entity_keys=("user",)), [feature]))[0]["t__v"] == [2, 1, None]


def _sound(**changed: Any) -> dict[str, Any]:
    return {"user": [1], "event_timestamp": stamps(1), "v": [1], **changed}


def _less(name: str) -> dict[str, Any]:
    return {key: value for key, value in _sound().items() if key != name}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], FeatureTable, str]] = {
    "no key": (
        _sound(),
        _less("user"),
        table(),
        "feature table 't' .* has no column 'user' .* it has event_timestamp, v",
    ),
    "no key in the entity table": (_less("user"), _sound(), table(), "entity table .* has no column 'user'"),
    "no time": (
        _sound(),
        _less("event_timestamp"),
        table(),
        "feature table .* no column 'event_timestamp' .event_time",
    ),
    "no time in the entity table": (_less("event_timestamp"), _sound(), table(), "entity table .*features.time_field"),
    "no created time": (
        _sound(),
        _sound(),
        table(created_time="created"),
        "no column 'created' .*null if it is unknown",
    ),
    "no such feature": (_sound(), _sound(), table(features=("w",)), "feature table 't' .* has no column 'w' .features"),
    "no features": (_sound(), _less("v"), table(), "nothing to join"),
    "a number as time": (
        _sound(),
        _sound(event_timestamp=[1]),
        table(),
        "'event_timestamp' of .* is int64, not a time",
    ),
    "text as time": (_sound(event_timestamp=["2026"]), _sound(), table(), "is string, not a time .features.time_field"),
    "text and number": (_sound(), _sound(user=["1"]), table(), "is int64 and key 'user' .* is string: write both"),
    "fractions as key": (_sound(user=[1.0]), _sound(), table(), "is double, which is not compared exactly .pandas"),
    "a moment as key": (_sound(user=stamps(1)), _sound(), table(), "which is not compared exactly"),
    "a feature that is there": (_sound(t__v=[1]), _sound(), table(), "more than one column 't__v'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(lake: Lake, name: str) -> None:
    asked, feature, spec, reason = REFUSED[name]
    with pytest.raises(PoisonMessage, match=reason):
        lake.join([lake.file(**asked)], (spec, [lake.file(**feature)]))


def test_two_tables_that_make_one_name(lake: Lake) -> None:
    one = (table(name="a", features=("b__c",)), [lake.file(**_less("v"), b__c=[1])])
    two = (table(name="a__b", features=("c",)), [lake.file(**_less("v"), c=[1])])
    with pytest.raises(PoisonMessage, match="more than one column 'a__b__c'"):
        lake.join([lake.file(**_less("v"))], one, two)


def test_files_of_a_feature_table_must_be_alike(lake: Lake) -> None:
    first = lake.file(**_sound())
    for other, reason in (
        (_sound(v=["1"]), "column 'v' is string in .* and int64 in"),
        (_less("v"), "has no column 'v'"),
        (_sound(w=[1]), "has columns that .* does not have: w"),
    ):
        with pytest.raises(PoisonMessage, match=reason):
            lake.join([lake.file(**_sound())], (table(), [first, lake.file(**other)]))
    # What is not joined may differ.
    found = lake.join([lake.file(**_less("v"))], (table(features=("v",)), [first, lake.file(**_sound(w=[1]))]))
    assert found[0]["t__v"] == [1]


def test_a_damaged_feature_file_ends_the_join(lake: Lake) -> None:
    uri, path = lake.file(user=list(range(5000)), event_timestamp=stamps(*range(5000)), v=list(range(5000)))
    whole = path.read_bytes()
    for damaged in (whole[:-20], whole[:100], b"", whole[:40] + bytes(4000) + whole[4040:]):
        path.write_bytes(damaged)
        with pytest.raises(PoisonMessage, match=f"{uri} of feature table 't' cannot be read"):
            lake.join([lake.file(**_sound())], (table(), [lake.file(**_sound()), (uri, path)]))


def test_a_damaged_entity_file_is_quarantined(lake: Lake) -> None:
    feature = lake.file(user=[1], event_timestamp=stamps(0), v=[7])
    rows = 500

    def entity() -> tuple[str, Path]:
        return lake.file(
            user=[1] * rows, event_timestamp=stamps(*range(rows)), text=[f"row {n}" * 9 for n in range(rows)]
        )

    cut, no_keys, no_text = entity(), entity(), entity()
    cut[1].write_bytes(cut[1].read_bytes()[:-9])
    for (_, path), column in ((no_keys, 0), (no_text, 2)):
        place = parquet.read_metadata(path).row_group(40).column(column)
        content = bytearray(path.read_bytes())
        start = place.dictionary_page_offset or place.data_page_offset
        content[start : start + place.total_compressed_size] = bytes(place.total_compressed_size)
        path.write_bytes(content)
    found = lake.join([cut, no_keys, entity(), no_text], (table(), [feature]))
    assert [isinstance(one, InvalidRecord) for one in found] == [True, True, False, True]
    assert {one.code for one in found if isinstance(one, InvalidRecord)} == {"broken_parquet"}
    assert found[2]["t__v"] == [7] * rows


def test_flipped_and_lost_bytes_crash_nothing(lake: Lake) -> None:
    chance = random.Random(0)
    ends, reasons = {"joined": 0, "set aside": 0, "refused": 0}, []
    for _ in range(150):
        asked = lake.file(user=[f"u{n % 5}" for n in range(30)], event_timestamp=stamps(*range(30)))
        feature = lake.file(
            user=[f"u{n % 7}" for n in range(30)], event_timestamp=stamps(*range(30)), v=[f"{n}" for n in range(30)]
        )
        path = chance.choice((asked, feature))[1]
        content = bytearray(path.read_bytes())
        for _ in range(chance.choice((1, 2, 9))):
            place = chance.randrange(len(content))
            if chance.random() < 0.7:
                content[place] ^= 1 << chance.randrange(8)
            else:
                del content[place : place + chance.randrange(30)]
        path.write_bytes(content)
        try:
            (found,) = lake.join([asked], (table(), [feature]))
        except PoisonMessage as error:
            reasons.append(str(error))
            ends["refused"] += 1
        except OverflowError:
            # A time that Python has no date for; the conversion of the rows rejects it.
            ends["joined"] += 1
        else:
            ends["set aside" if isinstance(found, InvalidRecord) else "joined"] += 1
    assert min(ends.values()) > 10, ends
    assert all("s3://lake/" in reason for reason in reasons)


def test_empty_tables(lake: Lake) -> None:
    def nothing(**more: Any) -> tuple[str, Path]:
        return lake.file(user=pyarrow.array([], pyarrow.int64()), event_timestamp=stamps(), **more)

    found = lake.join([nothing(), lake.file(**_less("v"))], (table(), [nothing(v=[])]))
    assert [one["t__v"] for one in found] == [[], [None]]


def test_a_file_with_only_nulls_of_a_feature_is_joined(lake: Lake) -> None:
    """The writer of such a file cannot know the column's type."""
    files = [lake.file(**_sound(v=pyarrow.nulls(1))), lake.file(**_sound(user=[2], v=["x"]))]
    (found,) = lake.join([lake.file(user=[1, 2], event_timestamp=stamps(1, 1))], (table(), files))
    assert found["t__v"] == [None, "x"]


def test_values_of_any_type_come_through(lake: Lake) -> None:
    values = {
        "list": [[1, 2], None],
        "struct": [{"a": 1, "b": "x"}, None],
        "category": pyarrow.array(["p", "q"]).dictionary_encode(),
        "time": stamps(1, 2, unit="ns"),
        "bytes": [b"\xff", None],
        "vector": pyarrow.array([[1.5, 2.5], [3.5, 4.5]], pyarrow.list_(pyarrow.float32(), 2)),
        "a.dotted name": [1, 2],
        "a": [3, 4],
    }
    feature = lake.file(user=[1, 2], event_timestamp=stamps(1, 1), **values)
    (found,) = lake.join([lake.file(user=[2, 1, 3], event_timestamp=stamps(2, 2, 2))], (table(), [feature]))
    for name, column in values.items():
        first, second = pyarrow.array(column).to_pylist() if isinstance(column, list) else column.to_pylist()
        assert found[f"t__{name}"] == [second, first, None], name


def test_the_result_is_independent_of_the_piece_size(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)

    def rows(count: int, **more: Any) -> dict[str, Any]:
        times = [chance.choice((None, chance.randrange(50))) for _ in range(count)]
        late = [None if time is None else time + chance.choice((0, 0, 9)) for time in times]
        numbers = ([chance.choice((1, 11, 2, 12, None)) for _ in range(count)] for _ in "ab")
        keys = {name: pyarrow.array(column, pyarrow.int32()) for name, column in zip("ab", numbers, strict=True)}
        return {**keys, "event_timestamp": stamps(*times), "created": stamps(*late), **more}

    asked = [rows(count) for count in (0, 1, 40, 13)]
    one = [lake.file(**rows(count, v=[f"{count}-{n}" for n in range(count)])) for count in (30, 0, 1, 90)]
    two = [lake.file(**rows(count, v=list(range(count)))) for count in (64, 8)]
    feature_tables = (
        (table(keys=("a", "b"), created_time="created"), one),
        (table(name="u", keys=("b",), created_time="created", ttl_s=20), two),
    )
    results = []
    for size in (10**6, 40, 9):
        monkeypatch.setattr(table_join, "PIECE_ROWS", size)
        monkeypatch.setattr(tables, "BATCH_ROWS", size)
        monkeypatch.setattr(enrich, "CHUNK_ROWS_MAX", size)
        results.append(lake.join([lake.file(**columns) for columns in asked], *feature_tables))
    assert results[0] == results[1] == results[2]
    assert len({str(value) for found in results[0] for value in found["t__v"]}) > 10


def test_an_error_in_the_progress_report_ends_the_join(lake: Lake) -> None:
    class Enough(Exception):
        pass

    def progress(done: int, total: int) -> None:
        assert (done, total) == (0, 1)
        raise Enough

    loaded = load_table(table(), [lake.file(**_sound())])
    with pytest.raises(Enough):
        join_files([lake.file(**_less("v"))], [loaded], FeatureJoin(tables=(table(),)), lake.folder, progress)
