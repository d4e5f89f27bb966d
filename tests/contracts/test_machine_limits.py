"""The limits of control groups, in folders that look like those of machines and of containers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from contracts import machine_limits
from contracts.machine_limits import MemoryUse, limited_memory, usable_cores, usable_cpus, usable_memory_bytes

GIB = 2**30
MEMORY = f"MemTotal:       {64 * GIB // 1024} kB\nMemFree: 1 kB\n"
V2 = "29 22 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "30 22 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "31 22 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 22 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
#: Docker on version 1: the group lies at the mount's root, while the process is told its whole path.
DOCKER_V1 = V1.replace("0:27 /", "0:27 /docker/abc").replace("0:28 /", "0:28 /docker/abc")
OWN_V1 = "5:cpu,cpuacct:{0}\n4:memory:{0}\n0::/\n"
NO_LIMIT_V1 = "9223372036854771712\n"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def machine(root: Path, mounts: str, own: str, files: Mapping[str, str]) -> Path:
    """Write what the kernel shows of control groups."""
    shown = {"proc/self/mountinfo": mounts, "proc/self/cgroup": own, "proc/meminfo": MEMORY}
    for name, content in {**shown, **{f"sys/fs/cgroup/{name}": each for name, each in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


CPU_V1 = {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("mounts", "own", "files", "cpus", "memory_gib"),
    [
        pytest.param("", "", {}, 8.0, 64, id="no control groups"),
        pytest.param(V2, "0::/\n", {"cpu.max": "150000 100000\n", "memory.max": f"{GIB}\n"}, 1.5, 1, id="v2"),
        pytest.param(V2, "0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, 8.0, 64, id="v2, no limits"),
        pytest.param(V2, "0::/\n", {"cpu.max": "rubbish\n", "memory.max": "\n"}, 8.0, 64, id="v2, not understood"),
        pytest.param(
            V2,
            "0::/pod/c\n",
            {"pod/cpu.max": "200000 100000", "pod/c/cpu.max": "max 100000", "pod/memory.max": "max",
             "pod/c/memory.max": f"{3 * GIB}"},
            2.0, 3, id="v2, the parent's processors and the own memory",
        ),
        pytest.param(
            V2, "0::/pod/c\n", {"pod/c/cpu.max": "400000 100000", "pod/cpu.max": "50000 100000"}, 0.5, 64,
            id="v2, half a processor",
        ),
        pytest.param(V2, "0::/../other\n", {"cpu.max": "200000 100000"}, 2.0, 64, id="v2, another namespace's group"),
        pytest.param(V2, "0::/a\n", {"a/cpu.max": "9900000 100000", "a/memory.max": f"{99 * GIB}"}, 8.0, 64,
                     id="v2, above the machine's"),
        pytest.param(
            V1, OWN_V1.format("/a/b"),
            {**CPU_V1, "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
             "memory/a/b/memory.limit_in_bytes": NO_LIMIT_V1, "memory/a/memory.limit_in_bytes": f"{2 * GIB}\n"},
            3.0, 2, id="v1, both of the parent",
        ),
        pytest.param(
            DOCKER_V1, OWN_V1.format("/docker/abc"),
            {"cpu,cpuacct/cpu.cfs_quota_us": "250000", "cpu,cpuacct/cpu.cfs_period_us": "100000",
             "memory/memory.limit_in_bytes": f"{GIB}"},
            2.5, 1, id="v1, container",
        ),
        pytest.param(
            V1, OWN_V1.format("/"), {"memory/memory.limit_in_bytes": NO_LIMIT_V1}, 8.0, 64, id="v1, no limits"
        ),
    ],
)  # fmt: skip
def test_limits_are_the_tightest_from_the_own_group_upwards(
    tmp_path: Path, mounts: str, own: str, files: Mapping[str, str], cpus: float, memory_gib: int
) -> None:
    root = machine(tmp_path, mounts, own, files)
    assert usable_cpus(root) == cpus
    assert usable_cores(root) == max(1, int(cpus))
    assert usable_memory_bytes(root) == memory_gib * GIB


def test_processors_that_the_affinity_excludes_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert usable_cpus(machine(tmp_path, V2, "0::/\n", {"cpu.max": "400000 100000"})) == 1.0


@pytest.mark.parametrize(
    ("mounts", "own", "files"),
    [
        pytest.param(
            V2, "0::/a\n",
            {"a/memory.max": f"{4 * GIB}", "a/memory.current": f"{3 * GIB}",
             "a/memory.stat": f"anon 5\ninactive_file {GIB}\n"},
            id="v2",
        ),
        pytest.param(
            V1, OWN_V1.format("/a"),
            {"memory/a/memory.limit_in_bytes": f"{4 * GIB}", "memory/a/memory.usage_in_bytes": f"{3 * GIB}",
             "memory/a/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n"},
            id="v1",
        ),
    ],
)  # fmt: skip
def test_use_of_limited_memory_leaves_out_what_the_kernel_can_take_back(
    tmp_path: Path, mounts: str, own: str, files: Mapping[str, str]
) -> None:
    assert limited_memory(machine(tmp_path, mounts, own, files)) == MemoryUse(2 * GIB, 4 * GIB)


def test_memory_without_a_limit_has_no_use_of_its_own(tmp_path: Path) -> None:
    assert limited_memory(machine(tmp_path, V2, "0::/\n", {"memory.max": "max", "memory.current": "5"})) is None


def test_this_machine_has_limits_that_make_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert 2**20 < usable_memory_bytes() <= machine_limits._machine_memory_bytes(Path("/"))
