"""The processes of a generation on this node: their commands and environments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from contracts.events.run import Member, RunPlaced
from contracts.ranks import (
    DATA_DIR_VARIABLE,
    INHERITED,
    INIT_DIR_VARIABLE,
    JOURNAL_VARIABLE,
    LAUNCH_VARIABLE,
    MEMORY_FRACTION_VARIABLE,
    OUTPUT_DIR_VARIABLE,
    PACKAGES_DIR_VARIABLE,
    PARAMS_VARIABLE,
    RESUME_DIR_VARIABLE,
    RESUME_STEP_VARIABLE,
    RUN_ID_VARIABLE,
    STOP_FILE_VARIABLE,
)
from contracts.spec.run import RunSpec

#: Device memory of a process without its tensors: CUDA's context, the libraries' kernels and workspaces.
CONTEXT_BYTES = 2**30
#: The longest value of an environment variable that every system takes; longer params are in ``launch.json`` alone.
MAX_VARIABLE_CHARS = 100_000
#: What a script logs with MLflow goes there; the request may name another address in ``env``.
MLFLOW_URI_VARIABLE = "MLFLOW_TRACKING_URI"
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
    #: The interface through which the ranks meet, and whether its address is one of IPv6.
    interface: str = ""
    is_ipv6: bool = False
    #: The GPU of each slot; empty on a node without. The profile of each MIG slice; empty where there is none.
    gpus: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    slot_memory_bytes: int = 0
    #: Folder of the control daemon of CUDA MPS, '' where there is none.
    mps_pipe: str = ""
    #: The output folder, and the checkpoint that the ranks start with: its folder and step.
    output_dir: str = ""
    #: The folder with the run's data as plain files; '' where it has none, or reads shards.
    data_dir: str = ""
    resume_dir: str = ""
    resume_step: int = 0
    #: The checkpoint of another run that the ranks begin with.
    init_dir: str = ""
    #: Folder of the project's packages, which precede the node's; '' where the node has them all.
    packages_dir: str = ""
    #: MLflow's address for scripts; '' where MLflow is not there, or does not find the store of trainbus.
    mlflow_uri: str = ""
    #: Folder for what libraries keep in a home folder; '' where that can be written.
    cache_home: str = ""


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
    """Return the processes of this node: one a rank, of the Trainer or of the run's own command."""
    command = tuple(placed.spec.command) if placed.spec.command is not None else None
    return [
        ProcessSpec(rank, command, build_environment(placed, member, index, inherited, place))
        for index, rank in enumerate(member.ranks)
    ]


def build_environment(
    placed: RunPlaced, member: Member, index: int, inherited: Mapping[str, str], place: NodeEnvironment
) -> dict[str, str]:
    """Return the whole environment of one rank: inherited variables, the run's own, and the rank's place."""
    spec = placed.spec
    own = {name: inherited[name] for name in INHERITED if name in inherited}
    path = [entry for entry in own.get("PATH", "/usr/bin:/bin").split(":") if entry != place.bin_folder]
    programs = [f"{place.packages_dir}/bin"] if place.packages_dir else []
    own["PATH"] = ":".join([*programs, place.bin_folder, *path])
    own.update(spec.env)
    for name, value in cache_variables(place.cache_home).items():
        own.setdefault(name, value)
    own["PYTHONPATH"] = ":".join(entry for entry in (*place.python_path, spec.env.get("PYTHONPATH", "")) if entry)
    if place.packages_dir:
        own[PACKAGES_DIR_VARIABLE] = place.packages_dir
    own.setdefault("OMP_NUM_THREADS", str(_threads(spec, place)))
    if place.interface:
        # Without it gloo and NCCL look up the host's name, which many machines cannot resolve.
        own.setdefault("GLOO_SOCKET_IFNAME", place.interface)
        # Without the sign NCCL takes every interface whose name begins so: eth1 and eth10.
        own.setdefault("NCCL_SOCKET_IFNAME", f"={place.interface}")
    if place.is_ipv6:
        own.setdefault("NCCL_SOCKET_FAMILY", "AF_INET6")
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
    own |= _script_variables(placed, member.ranks[index], place)
    if is_command(spec) and place.mlflow_uri:
        own.setdefault(MLFLOW_URI_VARIABLE, place.mlflow_uri)
    if is_command(spec) and placed.world_size > 1:
        own |= _launcher_variables(placed, member)
    return own | share_limits(spec, len(member.slots), place)


def cache_variables(cache_home: str) -> dict[str, str]:
    """Return what moves the caches of libraries out of the home folder: of those that follow XDG, and of others."""
    if not cache_home:
        return {}
    return {
        "XDG_CACHE_HOME": f"{cache_home}/.cache",
        "MPLCONFIGDIR": f"{cache_home}/.config/matplotlib",
        "TRITON_HOME": cache_home,
        "CUDA_CACHE_PATH": f"{cache_home}/.nv/ComputeCache",
    }


def _script_variables(placed: RunPlaced, rank: int, place: NodeEnvironment) -> dict[str, str]:
    """Return what a script of any language needs to keep files, to resume and to report."""
    folder = PurePosixPath(place.launch_path).parent
    variables = {
        RUN_ID_VARIABLE: placed.run_id,
        JOURNAL_VARIABLE: str(folder / f"rank_{rank}.jsonl"),
        STOP_FILE_VARIABLE: str(folder / "stop.json"),
        OUTPUT_DIR_VARIABLE: place.output_dir,
    }
    params = json.dumps(placed.spec.params)
    if len(params) <= MAX_VARIABLE_CHARS:
        variables[PARAMS_VARIABLE] = params
    if place.data_dir:
        variables[DATA_DIR_VARIABLE] = place.data_dir
    if place.init_dir:
        variables[INIT_DIR_VARIABLE] = place.init_dir
    if place.resume_dir:
        variables |= {RESUME_DIR_VARIABLE: place.resume_dir, RESUME_STEP_VARIABLE: str(place.resume_step)}
    return variables


def _launcher_variables(placed: RunPlaced, member: Member) -> dict[str, str]:
    """Return what torchrun sets besides: libraries recognise by it that the processes are there already."""
    node_rank = node_rank_of(placed, member)
    return {
        "NODE_RANK": str(node_rank),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(sum(1 for each in placed.members if each.ranks)),
        "TORCHELASTIC_RUN_ID": placed.run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def node_rank_of(placed: RunPlaced, member: Member) -> int:
    """Return the place of a node among those of its generation; that of rank 0 is 0."""
    nodes = sorted((each for each in placed.members if each.ranks), key=lambda each: each.ranks[0])
    return next(number for number, each in enumerate(nodes) if each.node_id == member.node_id)


def choose_data_dir(spec: RunSpec, folder: PurePosixPath, working_folder: PurePosixPath) -> PurePosixPath:
    """Return where a script finds its data: the run's choice of a folder of its project, else one of trainbus's own.

    Raises:
        ValueError: the run's choice is outside its project.
    """
    chosen = PurePosixPath(spec.env.get(DATA_DIR_VARIABLE, ""))
    if chosen.is_absolute() or ".." in chosen.parts:
        raise ValueError(
            f"{DATA_DIR_VARIABLE} is {str(chosen)!r}: name a folder below the project (data), or leave it out and read "
            "the variable"
        )
    return working_folder / chosen if chosen.parts else folder / "data"


def choose_output_dir(spec: RunSpec, folder: PurePosixPath, working_folder: PurePosixPath) -> PurePosixPath:
    """Return the output folder: the run's choice of a folder below its working folder, else one of trainbus's own."""
    chosen = PurePosixPath(spec.env.get(OUTPUT_DIR_VARIABLE, ""))
    if not chosen.parts or chosen.is_absolute() or ".." in chosen.parts:
        return folder / "outputs"
    return working_folder / chosen


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


def slot_problem(spec: RunSpec, member: Member, slots: int) -> str | None:
    """Return why the placement does not fit a node of ``slots`` slots; None if it does."""
    if spec.resources.share == 0:
        return None if len(member.slots) == len(member.ranks) else _mismatch(member)
    wrong = [slot for slot in member.slots if not 0 <= slot < slots]
    if wrong:
        return f"slots {wrong} are not on {member.node_id}, which has {slots}"
    if len(member.slots) != len(member.ranks) or len(set(member.slots)) != len(member.slots):
        return _mismatch(member)
    return None


def _mismatch(member: Member) -> str:
    return f"node {member.node_id} was given {len(member.ranks)} ranks for slots {list(member.slots)}"


def is_command(spec: RunSpec) -> bool:
    return spec.command is not None
