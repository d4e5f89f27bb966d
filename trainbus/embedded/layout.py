"""The parts of the embedded stack: their data folders, ports and settings.

Everything of one stack is under its data folder::

    stack.json     what runs where; exists while the stack runs
    secrets.json   the S3 keys, readable by the owner only
    ports.json     the ports, which stay the same at the next start
    logs/          one file per service
    nats/ s3/ mlflow/ gateway/ node-0/ ...
    policy.json    the policy that was given last; the one in force is in the log
    autoscaler/nodes/  a file for each node that the autoscaler wants
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from services.kit.ports import free_ports, port_is_free

if TYPE_CHECKING:
    from contracts.scheduling import Policy
    from trainbus.embedded.servers import NatsServer, S3Server

DEFAULT_DATA_DIR = Path(".trainbus")
BUCKETS = ("lake", "datasets", "models", "code")
#: Every service but the workers, of which each node has one.
SERVICES = (
    "gateway",
    "scheduler",
    "ingestion",
    "sharding",
    "checkpoint",
    "tracking",
    "evaluation",
    "serving",
    "tuning",
)
WORKER = "worker"
#: Runs only where pools scale.
AUTOSCALER = "autoscaler"
#: Ranks are forked from a warm process beside their data, so a restart takes about a second.
RESUME_COST_S = "1"
#: The folders that the ingestion service may read; a user can set it.
SOURCE_FOLDERS = "TRAINBUS_SOURCE_FOLDERS"
#: The only TRAINBUS_ settings of the user that reach the stack; the others are for other stacks.
PASSED_ON = (
    "TRAINBUS_LOG_LEVEL",
    "TRAINBUS_OTLP_ENDPOINT",
    "TRAINBUS_INJECT_DUPLICATES",
    # Of each node: a starved run's hint names them.
    "TRAINBUS_CACHE_MAX_BYTES",
    "TRAINBUS_CACHE_WARM_DIR",
    "TRAINBUS_CACHE_AHEAD_S",
    # How models are served: docs/serving.md names them.
    "TRAINBUS_SERVING_MODELS",
    "TRAINBUS_SERVING_MAX_BATCH",
    "TRAINBUS_SERVING_MAX_DELAY_S",
    "TRAINBUS_SERVING_THREADS",
    "TRAINBUS_SERVING_TIMEOUT_S",
    "TRAINBUS_SERVING_MAX_WAIT_S",
    "TRAINBUS_SERVING_GOLDEN_SAMPLES",
    "TRAINBUS_SERVING_CANARY_SHARE",
    "TRAINBUS_SERVING_SHADOW_SHARE",
    "TRAINBUS_SERVING_ROLLOUT_S",
    "TRAINBUS_SERVING_WATCH_S",
    "TRAINBUS_SERVING_PACKAGES_MAX_BYTES",
    "TRAINBUS_SERVING_PACKAGES_BUILD",
)


@dataclass(frozen=True, slots=True)
class StackOptions:
    """The size of the stack and its data folder."""

    data_dir: Path = DEFAULT_DATA_DIR
    nodes: int = 2
    slots: int = 2
    #: Names of units that are not started: the user runs them.
    without: tuple[str, ...] = ()
    #: A policy's name or file; None: the one in force, at first the default one.
    policy: str | None = None
    #: Pools whose nodes start and stop as runs need them: ``NAME=MAX``. They join the policy's pools, if it has any.
    autoscale: tuple[str, ...] = ()
    #: Seconds after which an idle node of such a pool stops; None: the policy's.
    idle_s: float | None = None
    #: Seconds that workers have to complete checkpoints when the stack stops.
    grace_s: float = 20.0
    #: What ``--stack`` knows it by; None: the name of its folder.
    name: str | None = None


class InvalidOptionsError(ValueError):
    """The options are not valid; the text says what to change."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One service process: its name in the stack, the service it runs, and its settings."""

    name: str
    service: str
    port: int
    environment: Mapping[str, str]
    log_path: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole stack, before anything of it runs."""

    options: StackOptions
    nats: NatsServer
    s3: S3Server
    units: tuple[Unit, ...]
    gateway_url: str
    mlflow_uri: str
    #: The settings of every unit.
    common: Mapping[str, str]
    #: Units that are not started with the stack: the user can run them.
    spare: tuple[Unit, ...] = ()
    #: Whether nodes start and stop as runs need them.
    scales: bool = False
    #: Where promoted models answer.
    serving_url: str = ""

    @property
    def data_dir(self) -> Path:
        return self.options.data_dir

    @property
    def nodes_folder(self) -> Path:
        """The folder in which the autoscaler describes the nodes that it wants."""
        return self.data_dir / AUTOSCALER / "nodes"

    def make_unit(self, name: str, service: str, port: int, settings: Mapping[str, str]) -> Unit:
        """Return a service process and create its folder."""
        (self.data_dir / name).mkdir(exist_ok=True)
        own = {
            "TRAINBUS_HTTP_PORT": str(port),
            "TRAINBUS_INSTANCE": name,
            "TRAINBUS_DATA_DIR": str(self.data_dir / name),
        }
        environment = {**self.common, **own, **settings}
        return Unit(name, service, port, environment, self.data_dir / "logs" / f"{name}.log")

    def find_wanted_nodes(self) -> dict[str, Path]:
        """Return the nodes that the autoscaler wants: name -> the file that describes it."""
        return {path.stem: path for path in sorted(self.nodes_folder.glob("*.json"))}

    def make_wanted_node(self, description: Path) -> Unit:
        """Return the worker node that this file describes."""
        content = json.loads(description.read_bytes())
        settings = {
            "TRAINBUS_NODE_ID": description.stem,
            "TRAINBUS_SLOTS": str(content["slots"]),
            "TRAINBUS_LABELS": json.dumps(content["labels"]),
        }
        return self.make_unit(description.stem, WORKER, free_ports(1)[0], settings)


@dataclass(slots=True)
class _Ports:
    """The ports of the stack: the same at each start, unless another program has taken one."""

    path: Path
    known: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.known = {str(name): int(port) for name, port in json.loads(self.path.read_text()).items()}

    def assign(self, *names: str, keep: bool) -> dict[str, int]:
        if keep:
            return {name: self.known[name] for name in names}
        wanted = [name for name in names if name not in self.known or not port_is_free(self.known[name])]
        fresh = free_ports(len(wanted), besides=self.known.values())
        self.known.update(zip(wanted, fresh, strict=True))
        write_json(self.path, self.known)
        return {name: self.known[name] for name in names}


def write_json(path: Path, content: object, mode: int = 0o644) -> None:
    """Replace a file atomically: a reader sees the old content or the new."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        json.dump(content, file, indent=2)
    partial.replace(path)


def stack_file(data_dir: Path) -> Path:
    return data_dir / "stack.json"


def secrets_file(data_dir: Path) -> Path:
    return data_dir / "secrets.json"


def mlflow_uri(data_dir: Path) -> str:
    """Return the address of the embedded tracking store: SQLite, written by the tracking service."""
    return f"sqlite:///{data_dir.resolve() / 'mlflow' / 'mlflow.db'}"


def s3_keys(data_dir: Path) -> tuple[str, str]:
    """Return the stack's S3 keys; the first call makes them."""
    path = secrets_file(data_dir)
    if not path.exists():
        write_json(path, {"s3_access_key": secrets.token_hex(10), "s3_secret_key": secrets.token_hex(20)}, 0o600)
    keys = json.loads(path.read_text())
    return keys["s3_access_key"], keys["s3_secret_key"]


def plan_stack(options: StackOptions, inherited: Mapping[str, str], *, running: bool = False) -> Layout:
    """Return the stack's layout. ``inherited`` is the environment that services start from.

    With ``running`` the stack is up and keeps its ports.

    Raises:
        InvalidOptionsError: a name in ``options.without``, the policy or a pool is not valid.
    """
    from trainbus.embedded.servers import NatsServer, S3Server

    data = options.data_dir.resolve()
    for folder in ("logs", "mlflow"):
        (data / folder).mkdir(parents=True, exist_ok=True)
    nodes = [f"node-{number}" for number in range(options.nodes)]
    inner = [f"s3-{number}" for number in range(S3Server.INNER_PORTS)]
    wanted = ("nats", "s3", "gateway-http", "serving-http", *inner, *SERVICES, AUTOSCALER, *nodes)
    ports = _Ports(data / "ports.json").assign(*wanted, keep=running)
    access_key, secret_key = s3_keys(data)
    nats = NatsServer(data / "nats", ports["nats"])
    s3 = S3Server(data / "s3", ports["s3"], access_key, secret_key, [ports[name] for name in inner])
    common = {
        **{k: v for k, v in inherited.items() if not k.startswith("TRAINBUS_") or k in PASSED_ON},
        "PYTHONUNBUFFERED": "1",
        "TRAINBUS_NATS_URL": nats.url,
        "TRAINBUS_LEASE_TTL_S": "3",
        "TRAINBUS_S3_ENDPOINT": s3.endpoint,
        "TRAINBUS_S3_ACCESS_KEY": access_key,
        "TRAINBUS_S3_SECRET_KEY": secret_key,
        **{f"TRAINBUS_BUCKET_{name.upper()}": name for name in BUCKETS},
    }
    scheduler_settings, scales = ({}, False) if running else write_policy(options)
    gateway_url, serving_url = (f"http://127.0.0.1:{ports[each]}" for each in ("gateway-http", "serving-http"))
    extra = {
        "tracking": {
            "TRAINBUS_MLFLOW_TRACKING_URI": mlflow_uri(data),
            "TRAINBUS_MLFLOW_ARTIFACT_LOCATION": (data / "mlflow" / "artifacts").as_uri(),
        },
        "gateway": {"TRAINBUS_GATEWAY_PORT": str(ports["gateway-http"])},
        "serving": {"TRAINBUS_SERVING_PORT": str(ports["serving-http"])},
        "scheduler": scheduler_settings or {"TRAINBUS_RESUME_COST_S": RESUME_COST_S},
        # Data in the folder where the stack was started can be a source: file:///...
        "ingestion": {SOURCE_FOLDERS: inherited.get(SOURCE_FOLDERS) or json.dumps([str(Path.cwd())])},
    }
    layout = Layout(options, nats, s3, (), gateway_url, mlflow_uri(data), common, serving_url=serving_url)
    units = [layout.make_unit(name, name, ports[name], extra.get(name, {})) for name in (*SERVICES, AUTOSCALER)]
    # They share a machine with all else: ranks train on while it is busy, or the server away, for half of the lease.
    own = {"TRAINBUS_SLOTS": str(options.slots), "TRAINBUS_LEASE_TTL_S": "20"}
    units += [layout.make_unit(node, WORKER, ports[node], {"TRAINBUS_NODE_ID": node, **own}) for node in nodes]
    if unknown := set(options.without) - {each.name for each in units}:
        names = ", ".join(each.name for each in units)
        raise InvalidOptionsError(f"--without: the stack has no {', '.join(sorted(unknown))}; it has {names}")
    left_out = {*options.without, *(() if scales else (AUTOSCALER,))}
    kept = tuple(each for each in units if each.name not in left_out)
    return replace(layout, units=kept, spare=tuple(each for each in units if each.name in left_out), scales=scales)


def policy_file(data_dir: Path) -> Path:
    return data_dir / "policy.json"


def write_policy(options: StackOptions) -> tuple[dict[str, str], bool]:
    """Return the scheduler's settings, and whether nodes start and stop with demand.

    They make the first policy of a new log; ``up`` adopts another one by request. The file says what was given last:
    whether an autoscaler is needed, and what ``--autoscale`` adds its pools to.

    Raises:
        InvalidOptionsError: there is no such policy, or the policy or a pool is not valid.
    """
    path = policy_file(options.data_dir.resolve())
    if not _gives_policy(options) and not path.exists():
        return {}, False
    # Imported here: the scheduler's modules take a moment to load.
    from services.scheduler import policies

    if options.policy == policies.DEFAULT and not options.autoscale:
        path.unlink(missing_ok=True)
        return {"TRAINBUS_POLICY": policies.DEFAULT, "TRAINBUS_RESUME_COST_S": RESUME_COST_S}, False
    try:
        base = policies.load(options.policy or (str(path) if path.exists() else policies.DEFAULT))
    except policies.PolicyError as error:
        raise InvalidOptionsError(str(error)) from error
    policy = _add_pools(base, options)
    write_json(path, policy.model_dump(mode="json"))
    settings = {"TRAINBUS_POLICY": str(path)} if _gives_policy(options) else {}
    return settings, any(pool.max_nodes for pool in policy.pools.pools)


def given_policy(options: StackOptions, in_force: Policy) -> Policy | None:
    """Return the policy that the options ask for in place of the one in force; None: they ask for none.

    Raises:
        InvalidOptionsError: there is no such policy, or the policy or a pool is not valid.
    """
    if not _gives_policy(options):
        return None
    from services.scheduler import policies

    try:
        if options.policy == policies.DEFAULT and not options.autoscale:
            return policies.with_settings(policies.DEFAULT, [f"preemption.resume_cost_s={RESUME_COST_S}"])
        base = policies.load(options.policy) if options.policy is not None else in_force
    except policies.PolicyError as error:
        raise InvalidOptionsError(str(error)) from error
    return _add_pools(base, options)


def _gives_policy(options: StackOptions) -> bool:
    return options.policy is not None or bool(options.autoscale) or options.idle_s is not None


def _add_pools(base: Policy, options: StackOptions) -> Policy:
    """Return the policy with the pools of ``--autoscale`` in place of those of an earlier start."""
    from contracts.scheduling import Policy

    policy = base.model_dump(mode="json")
    pools, given = policy["pools"], [_parse_pool(text, options.slots) for text in options.autoscale]
    names = {pool["name"] for pool in given} if options.policy is None else set()
    pools["pools"] = [*(pool for pool in pools["pools"] if pool["name"] not in names), *given]
    if options.idle_s is not None:
        pools["idle_s"] = options.idle_s
    try:
        checked = Policy.model_validate(policy)
    except ValueError as error:
        raise InvalidOptionsError(str(error)) from error
    if any(pool.name == "node" for pool in checked.pools.pools):
        raise InvalidOptionsError("a pool must not be called node: its nodes would have the names of the stack's own")
    return checked


def _parse_pool(text: str, slots: int) -> dict[str, object]:
    """Return a pool of CPU nodes like the stack's own from ``NAME=MAX``."""
    name, _, most = text.partition("=")
    if not name or not most.isdigit():
        raise InvalidOptionsError(f"{text!r} is no pool of nodes: say NAME=MAX, for example burst=2")
    return {"name": name, "max_nodes": int(most), "slots_per_node": slots}
