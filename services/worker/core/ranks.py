"""How ranks are started, and what their ends mean."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from contracts.events.run import Member, RunPlaced
from contracts.events.train import TrainRequested
from contracts.ranks import EXIT_DONE, EXIT_STOPPED, LAUNCH_VARIABLE

#: All that a rank gets to see of the agent's environment. Nothing else can leak.
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
TAIL_LINES = 30
#: Lines that are looked through for the cause: torchrun writes some forty of its own below it.
SEARCHED_LINES = 200
#: Collectives that a flight recorder keeps.
FLIGHT_ENTRIES = 2000
#: A rank that heard nothing of an agent for too long ends with this.
EXIT_ORPHANED = 76

_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use|errno: ?98\b", re.IGNORECASE)
#: What torch says when the other nodes' ranks never came to the meeting point.
_PEERS_MISSING = re.compile(r"DistStoreError|DistNetworkError: The client socket has timed out|wait timeout after \d+")

#: How torchrun's own report of a failed child begins, and where it names the first one that failed.
_TRACEBACK = "Traceback (most recent call last):"
_CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
_ROOT_CAUSE = re.compile(r"Root Cause.*?^ *rank +: (\d+).*?^ *exitcode +: (-?\d+)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Place:
    """Where ranks run: what the environment says of the node and the meeting point."""

    launch_path: str
    master_address: str
    master_port: int
    python_path: tuple[str, ...]
    #: Folder of the interpreter, so that ``python`` in a command is the one with torch.
    bin_folder: str
    cores: int
    slots: int
    interface: str = ""
    #: GPU of each slot; empty on a node without.
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """One process to be started for a placement."""

    rank: int
    #: None: the Trainer, which may be forked from the warm process.
    command: tuple[str, ...] | None
    environment: dict[str, str]


def starts(placed: RunPlaced, member: Member, inherited: Mapping[str, str], place: Place) -> list[Start]:
    """The processes of this node's part: one a rank for a task, one a node for a command under torchrun."""
    spec = placed.spec
    if spec.command is None:
        return [
            Start(rank, None, environment(placed, member, index, inherited, place))
            for index, rank in enumerate(member.ranks)
        ]
    command = tuple(spec.command)
    if any(len(each.ranks) > 1 for each in placed.members):
        command = torchrun(placed, member, place) + command
    return [Start(member.ranks[0], command, environment(placed, member, 0, inherited, place))]


def torchrun(placed: RunPlaced, member: Member, place: Place) -> tuple[str, ...]:
    """The prefix that starts a command once for each slot."""
    members = sorted((each for each in placed.members if each.ranks), key=lambda each: each.ranks[0])
    node_rank = next(number for number, each in enumerate(members) if each.node_id == member.node_id)
    return (
        "python",
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(members)}",
        f"--node_rank={node_rank}",
        f"--nproc_per_node={len(member.ranks)}",
        f"--master_addr={place.master_address}",
        f"--master_port={place.master_port}",
        "--no_python",
    )


def environment(
    placed: RunPlaced, member: Member, index: int, inherited: Mapping[str, str], place: Place
) -> dict[str, str]:
    """The whole environment of one rank: a few inherited names, the run's own, and the rank's place."""
    spec = placed.spec
    own = {name: inherited[name] for name in INHERITED if name in inherited}
    path = [entry for entry in own.get("PATH", "/usr/bin:/bin").split(":") if entry != place.bin_folder]
    own["PATH"] = ":".join([place.bin_folder, *path])
    own.update(spec.env)
    own["PYTHONPATH"] = ":".join(entry for entry in (*place.python_path, spec.env.get("PYTHONPATH", "")) if entry)
    own.setdefault("OMP_NUM_THREADS", str(max(1, place.cores // max(1, place.slots)) if place.gpus else 1))
    if place.interface:
        # gloo and NCCL otherwise look the host's name up, which many machines cannot resolve.
        own.setdefault("GLOO_SOCKET_IFNAME", place.interface)
        own.setdefault("NCCL_SOCKET_IFNAME", place.interface)
    if place.gpus:
        # In the generation's folder; the rank follows. The agent asks for it when a rank stalls (``flight.py``).
        stem = str(PurePosixPath(place.launch_path).with_name(f"flight_g{placed.generation}_"))
        own.setdefault("TORCH_FR_BUFFER_SIZE", str(FLIGHT_ENTRIES))
        own |= {"TORCH_FR_DUMP_TEMP_FILE": stem, "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem}
    own.update(
        {
            LAUNCH_VARIABLE: place.launch_path,
            "PYTHONUNBUFFERED": "1",
            "RANK": str(member.ranks[index]),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(placed.world_size),
            "LOCAL_WORLD_SIZE": str(len(member.ranks)),
            "MASTER_ADDR": place.master_address,
            "MASTER_PORT": str(place.master_port),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(place.gpus[slot] for slot in member.slots) if place.gpus else "",
        }
    )
    return own


def slot_problem(member: Member, slots: int) -> str | None:
    """Why the placement cannot be run on a node of so many slots."""
    wrong = [slot for slot in member.slots if not 0 <= slot < slots]
    if wrong:
        return f"slots {wrong} are not on node {member.node_id}, which has {slots}"
    if len(member.slots) != len(member.ranks) or len(set(member.slots)) != len(member.slots):
        return f"node {member.node_id} was given {len(member.ranks)} ranks for slots {list(member.slots)}"
    return None


@dataclass(frozen=True, slots=True)
class Exit:
    """How one process ended. ``at`` orders the ends: the first failure is the cause of the others."""

    rank: int
    code: int
    at: float


def exit_text(code: int) -> str:
    """An exit code in words. Shells give 128 + n for a signal, subprocess -n."""
    number = -code if code < 0 else code - 128
    if code < 0 or 128 < code < 160:
        try:
            return f"was killed by {signal.Signals(number).name}"
        except ValueError:
            return f"was killed by signal {number}"
    return f"ended with exit code {code}"


def cause(failure: Exit, lines: Sequence[str]) -> tuple[Exit, tuple[str, ...]]:
    """The rank that failed, and its last words: torchrun's own report, if there is one, is read and left out."""
    reported = next((number for number, line in enumerate(lines) if line.startswith(_CHILD_FAILED)), None)
    if reported is None:
        return failure, tuple(lines[-TAIL_LINES:])
    begins = max((number for number in range(reported) if lines[number] == _TRACEBACK), default=reported)
    if found := _ROOT_CAUSE.search("\n".join(lines[reported:])):
        failure = Exit(int(found[1]), int(found[2]), failure.at)
    return failure, tuple(lines[:begins][-TAIL_LINES:])


def first_failure(exits: Sequence[Exit]) -> Exit | None:
    """The first process that did not end in good order."""
    failures = [each for each in exits if each.code not in (EXIT_DONE, EXIT_STOPPED)]
    return min(failures, key=lambda each: each.at) if failures else None


def ended_well(exits: Sequence[Exit]) -> bool:
    """Whether every process is done with its work."""
    return all(each.code == EXIT_DONE for each in exits)


def is_blameless(code: int, started: bool, text: str) -> bool:
    """Whether the ranks failed for a port that somebody took in the meantime, or for want of an agent or of peers.

    Peers that fail say so themselves, and the generation is then stopped long before a rank gives up waiting.
    """
    if started:
        return code == EXIT_ORPHANED
    return code == EXIT_ORPHANED or bool(_PORT_TAKEN.search(text) or _PEERS_MISSING.search(text))


def is_command(spec: TrainRequested) -> bool:
    return spec.command is not None
