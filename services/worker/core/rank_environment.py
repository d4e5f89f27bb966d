"""The processes of a generation on this node: their commands and environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from contracts.events.run import Member, RunPlaced
from contracts.ranks import LAUNCH_VARIABLE, MEMORY_FRACTION_VARIABLE
from contracts.spec.run import RunSpec

#: The variables that a rank inherits of the agent's environment. No other one can leak.
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
#: Device memory of a process without its tensors: CUDA's context, the libraries' kernels and workspaces.
CONTEXT_BYTES = 2**30
#: Collectives that a flight recorder keeps.
FLIGHT_ENTRIES = 2000


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """Where ranks run: the node and the rendezvous."""

    launch_path: str
    master_address: str
    master_port: int
    python_path: tuple[str, ...]
    #: Folder of the interpreter, so that ``python`` in a command is the one with torch.
    bin_folder: str
    cores: int
    slots: int
    interface: str = ""
    #: The GPU of each slot; empty on a node without. The profile of each MIG slice; empty where there is none.
    gpus: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    slot_memory_bytes: int = 0
    #: Folder of the control daemon of CUDA MPS, '' where there is none.
    mps_pipe: str = ""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to be started for a placement."""

    rank: int
    #: None: the Trainer, which may be forked from the warm process.
    command: tuple[str, ...] | None
    environment: dict[str, str]


def build_process_specs(
    placed: RunPlaced, member: Member, inherited: Mapping[str, str], place: NodeEnvironment
) -> list[ProcessSpec]:
    """Return the processes of this node: one a rank for a task, one a node for a command under torchrun."""
    spec = placed.spec
    if spec.command is None:
        return [
            ProcessSpec(rank, None, build_environment(placed, member, index, inherited, place))
            for index, rank in enumerate(member.ranks)
        ]
    command = tuple(spec.command)
    if any(len(each.ranks) > 1 for each in placed.members):
        command = torchrun_command(placed, member, place) + command
    return [ProcessSpec(member.ranks[0], command, build_environment(placed, member, 0, inherited, place))]


def torchrun_command(placed: RunPlaced, member: Member, place: NodeEnvironment) -> tuple[str, ...]:
    """Return the prefix that starts a command once for each slot."""
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


def build_environment(
    placed: RunPlaced, member: Member, index: int, inherited: Mapping[str, str], place: NodeEnvironment
) -> dict[str, str]:
    """Return the whole environment of one rank: inherited variables, the run's own, and the rank's place."""
    spec = placed.spec
    own = {name: inherited[name] for name in INHERITED if name in inherited}
    path = [entry for entry in own.get("PATH", "/usr/bin:/bin").split(":") if entry != place.bin_folder]
    own["PATH"] = ":".join([place.bin_folder, *path])
    own.update(spec.env)
    own["PYTHONPATH"] = ":".join(entry for entry in (*place.python_path, spec.env.get("PYTHONPATH", "")) if entry)
    own.setdefault("OMP_NUM_THREADS", str(_threads(spec, place)))
    if place.interface:
        # Without it gloo and NCCL look up the host's name, which many machines cannot resolve.
        own.setdefault("GLOO_SOCKET_IFNAME", place.interface)
        own.setdefault("NCCL_SOCKET_IFNAME", place.interface)
    if place.gpus:
        # In the generation's folder; torch appends the rank. The agent requests dumps when a rank stalls.
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
            "CUDA_VISIBLE_DEVICES": ",".join(_devices(spec, member, index, place)),
        }
    )
    return own | share_limits(spec, len(member.slots), place)


def _threads(spec: RunSpec, place: NodeEnvironment) -> int:
    """Return a rank's threads for arithmetic: as its run requests, else its part of a GPU node, else one."""
    if spec.resources.cpus:
        return max(1, int(spec.resources.cpus))
    return max(1, place.cores // max(1, place.slots)) if place.gpus and spec.resources.share == 1 else 1


def _devices(spec: RunSpec, member: Member, index: int, place: NodeEnvironment) -> list[str]:
    """Return the devices that a rank sees. A process can use one MIG slice only, so each rank sees its own."""
    if not place.gpus or spec.resources.share == 0:
        return []
    if any(place.profiles):
        return [place.gpus[member.slots[index]]]
    return [place.gpus[slot] for slot in member.slots]


def share_limits(spec: RunSpec, devices: int, place: NodeEnvironment) -> dict[str, str]:
    """Return the variables that limit ranks to their share of a device; none for a whole device.

    The trainer limits the memory itself, torch's allocator does in other programs (one too old for the setting refuses
    to start), and under MPS its daemon does for any program. The share of the multiprocessors takes effect under MPS
    only: without it the driver gives the processes turns. On CPU slots a rank has one thread and no other limit.
    """
    share = spec.resources.share
    if not 0 < share < 1:
        return {}
    if not place.gpus:
        return {"OMP_NUM_THREADS": str(_threads(spec, place))}
    limits = {
        MEMORY_FRACTION_VARIABLE: f"{memory_fraction(share, place.slot_memory_bytes):.4f}",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(1, int(share * 100))),
    }
    if is_command(spec):
        limits |= _allocator_limits(spec.env, limits[MEMORY_FRACTION_VARIABLE])
    if place.mps_pipe:
        each = f"{int(share * place.slot_memory_bytes) // 2**20}M"
        limits["CUDA_MPS_PIPE_DIRECTORY"] = place.mps_pipe
        limits["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{number}={each}" for number in range(devices))
    return limits


def _allocator_limits(env: Mapping[str, str], fraction: str) -> dict[str, str]:
    """Return the setting of torch's allocator in programs other than the Trainer; the run's other settings stay."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    own = next((env[name] for name in names if env.get(name)), "")
    kept = [part for part in own.split(",") if part and not part.strip().startswith("per_process_memory_fraction")]
    return dict.fromkeys(names, ",".join([*kept, f"per_process_memory_fraction:{fraction}"]))


def memory_fraction(share: float, device_bytes: int) -> float:
    """Return the part of a device's memory for tensors, so that the whole process uses ``share``."""
    rest = CONTEXT_BYTES / device_bytes if device_bytes else 0.0
    return max(share - rest, share / 2)


def slot_problem(spec: RunSpec, member: Member, slots: int, profiles: Sequence[str] = ()) -> str | None:
    """Return why the placement does not fit a node of ``slots`` slots; None if it does."""
    if spec.resources.share == 0:
        return None if len(member.slots) == len(member.ranks) else _mismatch(member)
    wrong = [slot for slot in member.slots if not 0 <= slot < slots]
    if wrong:
        return f"slots {wrong} are not on node {member.node_id}, which has {slots}"
    if len(member.slots) != len(member.ranks) or len(set(member.slots)) != len(member.slots):
        return _mismatch(member)
    if is_command(spec) and len(member.slots) > 1 and any(profiles):
        return (
            f"a command cannot have {len(member.slots)} MIG slices of node {member.node_id}: its processes would all "
            "see the first one. Ask for one slot a node (gang.apart), or use a task"
        )
    return None


def _mismatch(member: Member) -> str:
    return f"node {member.node_id} was given {len(member.ranks)} ranks for slots {list(member.slots)}"


def is_command(spec: RunSpec) -> bool:
    return spec.command is not None
