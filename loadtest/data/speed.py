"""Reading against raw reads of the same bytes, and against other libraries.

    python -m loadtest.data --only speed [--quick]

100,000 samples of 10 KB, out of the system's cache, collated into batches of 64: seconds of the processor (all of a
reader's threads and processes), each reading in a process of its own, all readers in turn, the best of five.

What a raw read costs depends on how the system's cache holds the files, and that on how they were written: in pieces of
64 KB, as they come from the network, or of 1 MB. Both are measured.
"""

from __future__ import annotations

import gc
import os
import resource
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadtest.data import peers, sets
from loadtest.data.sets import Written
from trainbus.data import gather
from trainbus.data.reader import SplitReader

Row = tuple[str, str, str, bool]
Ids = NDArray[np.int64]

BATCH = 64
SAMPLE_BYTES, SAMPLES, QUICK_SAMPLES = 10 * 1024, 100_000, 5_000
#: A window of 2048 tokens of two bytes, and the next one.
WINDOW_TOKENS = 2049
ROUNDS = 5
MOST_CPU_S = 600
#: Other libraries' CPU seconds must be at least so many times ours.
AT_LEAST = {"WebDataset": 25.0, "MDS": 20.0, "LitData": 2.0}
PIECES = {"64 KB": 2**16, "1 MB": 2**20}


def measure(quick: bool = False) -> list[Row]:
    """Return the table: (figure, measured, target, met)."""
    samples = QUICK_SAMPLES if quick else SAMPLES
    gather.load_native_library()  # compiled and loaded before the clock runs, as the others' libraries are imported
    with tempfile.TemporaryDirectory(prefix="trainbus-speed-") as folder:
        return [*_images(Path(folder), samples, 2 if quick else ROUNDS), *_tokens(Path(folder), samples, ROUNDS)]


# --- samples of 10 KB -----------------------------------------------------------------------------


def _images(folder: Path, samples: int, rounds: int) -> list[Row]:
    written = {name: sets.write_tar(folder / name, samples, SAMPLE_BYTES, piece_bytes=n) for name, n in PIECES.items()}
    in_a_row, shuffled = np.arange(samples), np.random.default_rng(0).permutation(samples)
    readings: dict[str, Callable[[], None]] = {}
    for name, shards in written.items():
        readings |= {
            f"raw {name}": partial(raw, shards),
            f"sequential {name}": partial(ours, shards, in_a_row),
            f"shuffled {name}": partial(ours, shards, shuffled),
            f"shuffled again {name}": partial(ours, shards, shuffled, epochs=2),
            f"python {name}": partial(ours, shards, shuffled, native=False),
        }
    missing: dict[str, str] = {}
    for peer in peers.PEERS:
        if (why := peer.missing()) is not None:
            missing[peer.name] = why
            continue
        print(f"  writing for {peer.name}", file=sys.stderr)
        try:
            peer.load()
            _in_child(partial(peer.write, folder / peer.name, samples, SAMPLE_BYTES, written["64 KB"]))
            readings[f"{peer.name} sequential"] = partial(peer.read, folder / peer.name, BATCH, None)
            if peer.shuffles:
                readings[f"{peer.name} shuffled"] = partial(peer.read, folder / peer.name, BATCH, shuffled)
        except ImportError as error:
            missing[peer.name] = f"it does not import: {error}"
        except Failed as error:
            missing[peer.name] = str(error)
    best = interleaved(readings, rounds)
    return [*_own_rows(best), *_peer_rows(best, missing)]


def _own_rows(best: dict[str, float]) -> list[Row]:
    rows: list[Row] = []
    for name in PIECES:
        base = best[f"raw {name}"]
        written = f"files written {name} at a time"
        for order, target in (("sequential", 1.3), ("shuffled", 2.0)):
            ratio = best[f"{order} {name}"] / base
            rows.append((f"{order}, {written}", f"{ratio:.2f} of raw", f"<= {target}", ratio <= target))
        again = (best[f"shuffled again {name}"] - best[f"shuffled {name}"]) / base
        rows.append((f"shuffled, every epoch after the first, {written}", f"{again:.2f} of raw", "none", True))
        alone = best[f"python {name}"] / base
        rows.append((f"shuffled, without the C library, {written}", f"{alone:.2f} of raw", "none", True))
        rows.append((f"raw readinto, {written}", f"{base:.3f} s of CPU", "none", True))
    return rows


def _peer_rows(best: dict[str, float], missing: dict[str, str]) -> list[Row]:
    rows: list[Row] = []
    for peer in peers.PEERS:
        for order in ("sequential", "shuffled"):
            figure, target = f"{peer.name} against ours, {order}", AT_LEAST.get(peer.name)
            said = "none" if target is None else f">= {target:g} times"
            if peer.name in missing:
                rows.append((figure, missing[peer.name], said, target is None))
            elif f"{peer.name} {order}" not in best:
                rows.append((figure, "it does not shuffle", said, True))
            else:
                theirs = best[f"{peer.name} {order}"]
                times = theirs / best[f"{order} 64 KB"]
                text = f"{times:.1f} times ({theirs / best['raw 64 KB']:.1f} of raw)"
                rows.append((figure, text, said, target is None or times >= target))
    return rows


def raw(shards: Written) -> None:
    """All bytes of the shards, a batch's worth at a time into one buffer."""
    buffer = bytearray(BATCH * (sets.BLOCK + shards.size))
    for path in shards.paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def ours(shards: Written, order: Ids, *, epochs: int = 1, native: bool = True) -> None:
    """Every batch by the reader; what it holds is looked at now and then."""
    if not native:
        os.environ[gather.NATIVE_VARIABLE] = "0"
        gather.load_native_library.cache_clear()
    reader = SplitReader(shards.folder, shards.shards)
    for _ in range(epochs):
        for start in range(0, len(order), BATCH):
            ids = order[start : start + BATCH]
            batch = reader.gather(ids)["bin"]
            if start % (100 * BATCH) == 0:
                assert isinstance(batch, np.ndarray)
                sets.check(batch, ids)


# --- tokens ---------------------------------------------------------------------------------------


def _tokens(folder: Path, samples: int, rounds: int) -> list[Row]:
    size = 2 * WINDOW_TOKENS
    shards = sets.write_flat(folder / "tokens", samples, size, piece_bytes=PIECES["64 KB"])
    whole = folder / "tokens.bin"
    sets.write_pieces(whole, (sets.content(number, size) for number in range(samples)), PIECES["64 KB"])
    shuffled = np.random.default_rng(0).permutation(samples)
    best = interleaved(
        {
            "memmap": partial(memmap, whole, shuffled),
            "memmap fancy": partial(memmap_fancy, whole, shuffled),
            "ours": partial(ours, shards, shuffled),
        },
        rounds,
    )
    usual, fancy = best["ours"] / best["memmap"], best["ours"] / best["memmap fancy"]
    return [
        ("tokens, shuffled: against a memmap, window by window", f"{usual:.2f} of it", "<= 1", usual <= 1),
        ("tokens, shuffled: against a memmap, one indexing a batch", f"{fancy:.2f} of it", "<= 1", fancy <= 1),
    ]


def memmap(path: Path, order: Ids) -> None:
    """As training loops do: a slice of a memory-mapped file for each window, stacked."""
    tokens = np.memmap(path, dtype="<u2", mode="r")
    for start in range(0, len(order), BATCH):
        windows = [
            tokens[number * WINDOW_TOKENS : (number + 1) * WINDOW_TOKENS] for number in order[start : start + BATCH]
        ]
        np.stack(windows)


def memmap_fancy(path: Path, order: Ids) -> None:
    """The best that numpy does: rows of a memory-mapped matrix, a batch at a time."""
    tokens = np.memmap(path, dtype="<u2", mode="r").reshape(-1, WINDOW_TOKENS)
    for start in range(0, len(order), BATCH):
        tokens[order[start : start + BATCH]]


# --- how it is measured ---------------------------------------------------------------------------


class Failed(Exception):
    """What was to be measured raised an error."""


def interleaved(readings: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the least CPU seconds of each, over so many rounds of all of them; those that fail are left out."""
    best: dict[str, float] = {}
    failed: set[str] = set()
    gc.collect()
    gc.freeze()  # else a collection in a fork copies what it shares with this process
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}", file=sys.stderr)
        for name, reading in readings.items():
            if name in failed:
                continue
            try:
                best[name] = min(best.get(name, float("inf")), _in_child(reading))
            except Failed as error:
                print(f"  {name}: {error}", file=sys.stderr)
                failed.add(name)
                best.pop(name, None)
    return best


def _in_child(work: Callable[[], None]) -> float:
    """Do it in a fork and return its CPU seconds, those of its own children too."""
    sys.stdout.flush()
    sys.stderr.flush()
    inside, outside = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))  # a reader that never ends
            started = _cpu_s()
            work()
            os.write(outside, struct.pack("<d", _cpu_s() - started))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.waitpid(pid, 0)  # a process that a library left behind may hold the pipe for longer
    os.set_blocking(inside, False)
    try:
        (seconds,) = struct.unpack("<d", os.read(inside, 8))
    except (BlockingIOError, struct.error):
        raise Failed("it failed, see above") from None
    finally:
        os.close(inside)
        os.close(outside)
    return float(seconds)


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main(argv: list[str] | None = None) -> None:
    for figure, measured, target, met in measure("--quick" in (argv if argv is not None else sys.argv)):
        print(f"{'  ' if met else '! '}{figure:72s} {measured:32s} {target}")


if __name__ == "__main__":
    main()
