"""The reader: whole batches, by any of its ways, are what is in the shards."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from contracts import shard_index
from contracts.events.dataset import ShardFile
from tests.data import shards
from trainbus.data import gather
from trainbus.data.dataset import Dataset
from trainbus.data.reader import DatasetError, RaggedField, SplitReader, sample_fields

COUNT = 331


@pytest.fixture(params=[pytest.param("native", marks=pytest.mark.needs("cc")), "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both the C library and what takes its place."""
    monkeypatch.setenv(gather.NATIVE_VARIABLE, "1" if request.param == "native" else "0")
    gather.load_native_library.cache_clear()
    if request.param == "native":
        assert gather.load_native_library() is not None, "there is no C compiler: apt-get install gcc libc6-dev"
    yield request.param
    gather.load_native_library.cache_clear()


def wanted(rng: np.random.Generator, trial: int) -> np.ndarray:
    """Ids as trainers ask for them: shuffled, in a row, and rows of them at other places."""
    size = int(rng.integers(1, 200))
    match trial % 3:
        case 0:
            return rng.integers(0, COUNT, size)
        case 1:
            start = int(rng.integers(0, COUNT - size + 1))
            return np.arange(start, start + size)
        case _:
            start = int(rng.integers(0, COUNT - size + 1))
            return np.concatenate([np.arange(start, start + size), rng.integers(0, COUNT, 3)])


@pytest.mark.parametrize("kind", ["fixed", "flat", "ragged", "mixed"])
def test_batches_match_the_written_samples(tmp_path: Path, way: str, kind: str) -> None:
    samples = list(shards.ragged(COUNT) if kind == "ragged" else shards.fixed(COUNT))
    if kind == "mixed":  # one shard has another size, one another field besides
        samples[50:100] = [(key, {"bin": fields["bin"][:60]}) for key, fields in samples[50:100]]
        samples[100:150] = [(key, {**fields, "txt": b"more"}) for key, fields in samples[100:150]]
    dataset = shards.write(tmp_path, {"train": samples}, flat=kind == "flat")
    rng = np.random.default_rng(0)
    for max_open in (1, 3, 100):
        reader = SplitReader(tmp_path, dataset.split("train").shards, max_open=max_open)
        for trial in range(40):
            ids = wanted(rng, trial)
            found = reader.gather(ids)
            for place, sample_id in enumerate(ids.tolist()):
                assert sample_fields(found, place) == samples[sample_id][1]
            assert reader.keys(ids[:3]) == tuple(samples[i][0] for i in ids[:3].tolist())
            if kind in ("fixed", "flat"):
                assert isinstance(found["bin"], np.ndarray)
                assert found["bin"].shape == (len(ids), 100)


def test_single_samples_match_the_written_samples(tmp_path: Path) -> None:
    samples = shards.ragged(120)
    reader = shards.write(tmp_path, {"train": samples}).split("train")
    for number in (119, 0, 49, 50, 100):
        assert (reader[number].key, reader[number].fields) == samples[number]


def test_a_batch_is_read_into_the_given_buffer(tmp_path: Path, way: str) -> None:
    samples = shards.fixed(COUNT)
    reader = shards.write(tmp_path, {"train": samples}).split("train")
    out = np.zeros((5, 100), dtype=np.uint8)
    ids = np.array([300, 7, 7, 51, 50])
    found = reader.gather(ids, ["bin"], out={"bin": out})
    assert found["bin"] is out
    assert [row.tobytes() for row in out] == [samples[i][1]["bin"] for i in ids.tolist()]
    for unfit in (np.zeros((6, 100), np.uint8), np.zeros((5, 200), np.uint8)[:, ::2], np.zeros((5, 100), np.int8)):
        assert reader.gather(ids, ["bin"], out={"bin": unfit})["bin"] is not unfit


@pytest.mark.parametrize("ids", [[-1], [COUNT], [0, 5 * COUNT], [5, -7], list(range(COUNT - 20, COUNT + 1))])
def test_missing_samples_are_refused(tmp_path: Path, way: str, ids: list[int]) -> None:
    for samples in (shards.fixed(COUNT), shards.ragged(COUNT)):
        reader = shards.write(tmp_path, {"train": samples}).split("train")
        with pytest.raises(IndexError, match=f"of {COUNT}"):
            reader.gather(np.array(ids))


def test_a_field_that_no_sample_has_is_ragged_and_empty(tmp_path: Path) -> None:
    reader = shards.write(tmp_path, {"train": shards.fixed(60)}).split("train")
    found = reader.gather(np.arange(3), ["jpg"])["jpg"]
    assert isinstance(found, RaggedField)
    assert [found[place] for place in range(3)] == [None, None, None]
    assert reader.gather(np.arange(0)) == {}


def test_shards_arrive_before_they_are_opened_and_survive_their_removal(tmp_path: Path) -> None:
    samples = shards.fixed(200)
    dataset = shards.write(tmp_path, {"train": samples})
    away = tmp_path / "away"
    (tmp_path / "train").rename(away)
    (tmp_path / "train").mkdir()
    requested: list[str] = []

    def arrive(shard: ShardFile) -> None:
        requested.append(shard.path)
        for name in (shard.path, shard.index_path):
            os.link(away / Path(name).name, tmp_path / name)

    reader = Dataset(tmp_path, dataset.dataset_id, arrive).split("train")
    assert requested == []
    reader.gather(np.array([60, 3]))
    assert requested == ["train/shard-00001.tar", "train/shard-00000.tar"]

    for number in (0, 1):  # evicted while they are open
        for suffix in ("tar", "idx"):
            (tmp_path / f"train/shard-{number:05d}.{suffix}").unlink()
    found = reader.gather(np.arange(40, 70))  # in a row: would read the file, were it there
    assert [sample_fields(found, i)["bin"] for i in range(30)] == [fields["bin"] for _, fields in samples[40:70]]
    assert len(requested) == 2

    reader.gather(np.array([150]))  # opening another shard closes the evicted one and frees its disk space
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "train/shard-00000.tar") not in maps
    assert str(tmp_path / "train/shard-00003.tar") in maps
    assert reader[0].fields == samples[0][1]  # it comes again
    assert requested[2:] == ["train/shard-00003.tar", "train/shard-00000.tar"]


def test_the_number_of_open_shards_is_bounded(tmp_path: Path, way: str) -> None:
    dataset = shards.write(tmp_path, {"train": shards.fixed(1000)}, per_shard=10)
    reader = SplitReader(tmp_path, dataset.split("train").shards, max_open=4)
    for start in range(0, 1000, 25):
        reader.gather(np.array([0, start]))  # shard 0 is always in use, so it is never the one that goes
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{tmp_path}/train" in line]
    assert sum(line.endswith(".tar") for line in mapped) == 4
    assert any("shard-00000.tar" in line for line in mapped)
    reader.close()
    assert f"{tmp_path}/train" not in Path("/proc/self/maps").read_text()


def test_threads_share_a_reader(tmp_path: Path) -> None:
    samples = shards.ragged(COUNT)
    dataset = shards.write(tmp_path, {"train": samples}, per_shard=20)
    reader = SplitReader(tmp_path, dataset.split("train").shards, max_open=2)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for trial in range(60):
            ids = wanted(rng, trial)
            found = reader.gather(ids)
            wrong.extend(i for place, i in enumerate(ids.tolist()) if sample_fields(found, place) != samples[i][1])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forged_index_is_refused_and_never_followed(tmp_path: Path) -> None:
    """The agent checks the hash in the manifest. The reader still refuses an index that points outside its file."""
    for samples in (shards.fixed(50), shards.ragged(50)):
        dataset = shards.write(tmp_path, {"train": samples})
        path = tmp_path / "train/shard-00000.idx"
        sound = path.read_bytes()
        rng = np.random.default_rng(3)
        refused = 0
        for trial in range(300):
            forged = bytearray(sound)
            if trial % 2:
                at = int(rng.integers(0, len(forged)))
                forged[at] ^= 1 << int(rng.integers(0, 8))
            else:  # a large number somewhere among the arrays
                at = int(rng.integers(0, len(forged) // 8)) * 8
                forged[at : at + 8] = struct.pack("<q", int(rng.choice([-(2**63), -1, 2**31, 2**62, 2**63 - 1])))
            path.write_bytes(forged[: len(sound)])
            reader = dataset.split("train")
            try:
                reader.gather(np.arange(50))
                reader.keys(range(50))
            except (DatasetError, UnicodeDecodeError):
                refused += 1
        assert refused > 30
        path.write_bytes(sound)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        pytest.param(
            lambda tar, idx: tar.write_bytes(tar.read_bytes()[:-10]), "bytes, the manifest has", id="cut short"
        ),
        pytest.param(lambda tar, idx: tar.write_bytes(b""), "bytes, the manifest has", id="empty"),
        pytest.param(lambda tar, idx: tar.unlink(), "No such file", id="gone"),
        pytest.param(
            lambda tar, idx: idx.write_bytes(idx.read_bytes()[:-1]), "bytes, the manifest has", id="index cut"
        ),
        pytest.param(lambda tar, idx: idx.write_bytes(bytes(idx.stat().st_size)), "no shard index", id="zeros"),
    ],
)
def test_a_broken_shard_is_named(tmp_path: Path, break_it: object, message: str) -> None:
    reader = shards.write(tmp_path, {"train": shards.fixed(60)}).split("train")
    break_it(tmp_path / "train/shard-00001.tar", tmp_path / "train/shard-00001.idx")  # type: ignore[operator]
    reader.gather(np.arange(50))
    with pytest.raises(DatasetError, match=rf"train/shard-00001\.tar cannot be read: .*{message}"):
        reader.gather(np.array([3, 55]))
    assert len(reader.gather(np.arange(50))["bin"]) == 50  # the others go on


def test_an_index_of_fewer_samples_is_refused(tmp_path: Path) -> None:
    dataset = shards.write(tmp_path, {"train": shards.fixed(60)})
    shard = dataset.split("train").shards[0].model_copy(update={"index_bytes": 0})
    index = shard_index.encode([f"s{i}" for i in range(49)], {"bin": ([512] * 49, [100] * 49)})
    (tmp_path / shard.index_path).write_bytes(index)
    with pytest.raises(DatasetError, match="49 samples, not as many as the manifest"):
        SplitReader(tmp_path, [shard])[0]
