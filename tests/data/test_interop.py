"""Other libraries read the shards, and the reader finds what they find."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.data import shards
from trainbus.data.reader import sample_fields

KINDS = [pytest.param(shards.fixed(120), id="fixed"), pytest.param(shards.ragged(120), id="ragged")]


@pytest.mark.parametrize("samples", KINDS)
def test_tarfile_reads_the_same_bytes(tmp_path: Path, samples: shards.Samples) -> None:
    dataset = shards.write(tmp_path, {"train": samples})
    reader = dataset.split("train")
    found: dict[str, dict[str, bytes]] = {}
    for shard in reader.shards:
        with tarfile.open(tmp_path / shard.path) as tar:
            for member in tar:
                key, _, extension = member.name.partition(".")
                content = tar.extractfile(member)
                assert content is not None
                found.setdefault(key, {})[extension] = content.read()
    ours = reader.gather(np.arange(len(reader)))
    keys = reader.keys(range(len(reader)))
    assert list(found) == list(keys)
    assert [found[key] for key in keys] == [sample_fields(ours, place) for place in range(len(reader))]


@pytest.mark.parametrize("samples", KINDS)
def test_webdataset_reads_the_same_samples_in_the_same_order(tmp_path: Path, samples: shards.Samples) -> None:
    webdataset = pytest.importorskip("webdataset")
    dataset = shards.write(tmp_path, {"train": samples})
    reader = dataset.split("train")
    urls = [str(tmp_path / shard.path) for shard in reader.shards]
    theirs = list(webdataset.WebDataset(urls, shardshuffle=False))
    ours = reader.gather(np.arange(len(reader)))
    assert [sample["__key__"] for sample in theirs] == list(reader.keys(range(len(reader))))
    for place, sample in enumerate(theirs):
        fields = {name: content for name, content in sample.items() if not name.startswith("__")}
        assert fields == sample_fields(ours, place)


def test_gnu_tar_unpacks_a_shard(tmp_path: Path) -> None:
    samples = shards.ragged(30)
    shards.write(tmp_path, {"train": samples})
    into = tmp_path / "unpacked"
    into.mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "train/shard-00000.tar", "-C", into], check=True)
    assert sum(1 for _ in into.iterdir()) == sum(len(fields) for _, fields in samples)
    assert (into / f"{samples[7][0]}.png").read_bytes() == samples[7][1]["png"]


def test_flat_shards_are_plain_arrays(tmp_path: Path) -> None:
    samples = shards.fixed(120)
    dataset = shards.write(tmp_path, {"train": samples}, flat=True)
    reader = dataset.split("train")
    parts = [np.memmap(tmp_path / shard.path, dtype="<u2", mode="r").reshape(-1, 50) for shard in reader.shards]
    tokens = np.concatenate(parts)
    ids = np.array([119, 3, 50, 49])
    found = reader.gather(ids)["bin"]
    assert isinstance(found, np.ndarray)
    assert (found.view("<u2") == tokens[ids]).all()
