"""What the embedded stack consists of, where each part keeps its data, and what it is told.

Everything of one stack is under its data folder::

    stack.json     what runs where (made when the stack starts, taken away when it stops)
    secrets.json   the S3 keys, readable by the owner alone
    ports.json     the ports it had last time, so that they stay
    logs/          one file a service
    nats/ s3/ mlflow/ gateway/ node-0/ ...
    policy.json    what the scheduler decides by, if it was told
    autoscaler/nodes/  a file for each node that the autoscaler wants
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainbus.embedded.servers import NatsServer, S3Server, free_ports, port_is_free

DEFAULT_DATA_DIR = Path(".trainbus")
BUCKETS = ("lake", "datasets", "models", "code")
#: Every service but the workers, of which there is one a node.
SERVICES = ("gateway", "scheduler", "ingestion", "sharding", "checkpoint", "tracking", "evaluation")
WORKER = "worker"
#: Only where nodes are to come and go.
AUTOSCALER = "autoscaler"
#: The folders that the ingestion service may read; the user may say which.
SOURCE_FOLDERS = "TRAINBUS_SOURCE_FOLDERS"
#: The user's own TRAINBUS_ settings are for other stacks and must not leak into this one, but for these.
PASSED_ON = (
    "TRAINBUS_LOG_LEVEL",
    "TRAINBUS_OTLP_ENDPOINT",
    "TRAINBUS_INJECT_DUPLICATES",
    # Each node's own: what a starved run's hint says to raise.
    "TRAINBUS_CACHE_MAX_BYTES",
    "TRAINBUS_CACHE_WARM_DIR",
    "TRAINBUS_CACHE_AHEAD_S",
)


@dataclass(frozen=True, slots=True)
class StackOptions:
    """How large the stack is and where it lives."""

    data_dir: Path = DEFAULT_DATA_DIR
    nodes: int = 2
    slots: int = 2
    #: Units that somebody else runs, by their names: a service under work, a node elsewhere.
    without: tuple[str, ...] = ()
    #: A policy's name or file; None: the default one.
    policy: str | None = None
    #: Pools of nodes that come and go as runs need them: ``NAME=MAX``. Empty: those of the policy, if it has any.
    autoscale: tuple[str, ...] = ()
    #: Seconds after which an idle node of such a pool goes; None: as the policy says.
    idle_s: float | None = None
    #: Seconds that workers get to complete checkpoints when the stack stops.
    grace_s: float = 20.0


class UnknownUnit(ValueError):
    """Something is named that is no part of the stack."""


class BadOptions(ValueError):
    """The stack cannot be as it was asked for; the text says what to change."""


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
    #: What every unit is told.
    common: Mapping[str, str]
    #: Units of the stack that are not started with it: somebody may run them.
    spare: tuple[Unit, ...] = ()
    #: Whether nodes come and go.
    scales: bool = False

    @property
    def data_dir(self) -> Path:
        return self.options.data_dir

    @property
    def nodes_folder(self) -> Path:
        """Where the autoscaler says which nodes it wants."""
        return self.data_dir / AUTOSCALER / "nodes"

    def unit(self, name: str, service: str, port: int, settings: Mapping[str, str]) -> Unit:
        """One service process, with a folder of its own."""
        (self.data_dir / name).mkdir(exist_ok=True)
        own = {
            "TRAINBUS_HTTP_PORT": str(port),
            "TRAINBUS_INSTANCE": name,
            "TRAINBUS_DATA_DIR": str(self.data_dir / name),
        }
        environment = {**self.common, **own, **settings}
        return Unit(name, service, port, environment, self.data_dir / "logs" / f"{name}.log")

    def wanted_nodes(self) -> dict[str, Path]:
        """The nodes that the autoscaler wants, and where each is described."""
        return {path.stem: path for path in sorted(self.nodes_folder.glob("*.json"))}

    def wanted_node(self, description: Path) -> Unit:
        """The worker node that this file describes."""
        content = json.loads(description.read_bytes())
        settings = {
            "TRAINBUS_NODE_ID": description.stem,
            "TRAINBUS_SLOTS": str(content["slots"]),
            "TRAINBUS_LABELS": json.dumps(content["labels"]),
        }
        return self.unit(description.stem, WORKER, free_ports(1)[0], settings)


@dataclass(slots=True)
class _Ports:
    """Ports that stay what they were, as long as nobody else has taken them."""

    path: Path
    known: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.known = {str(name): int(port) for name, port in json.loads(self.path.read_text()).items()}

    def take(self, *names: str, as_they_are: bool) -> dict[str, int]:
        if as_they_are:
            return {name: self.known[name] for name in names}
        wanted = [name for name in names if name not in self.known or not port_is_free(self.known[name])]
        taken = {self.known[name] for name in names if name not in wanted}
        fresh = [port for port in free_ports(len(names) + len(wanted)) if port not in taken]
        self.known.update(zip(wanted, fresh, strict=False))
        write_json(self.path, self.known)
        return {name: self.known[name] for name in names}


def write_json(path: Path, content: object, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        json.dump(content, file, indent=2)
    partial.replace(path)


def stack_file(data_dir: Path) -> Path:
    return data_dir / "stack.json"


def secrets_file(data_dir: Path) -> Path:
    return data_dir / "secrets.json"


def mlflow_uri(data_dir: Path) -> str:
    """The tracking store of the embedded stack: SQLite, written by the tracking service itself."""
    return f"sqlite:///{data_dir.resolve() / 'mlflow' / 'mlflow.db'}"


def s3_keys(data_dir: Path) -> tuple[str, str]:
    """This stack's own S3 keys, made on first use."""
    path = secrets_file(data_dir)
    if not path.exists():
        write_json(path, {"s3_access_key": secrets.token_hex(10), "s3_secret_key": secrets.token_hex(20)}, 0o600)
    keys = json.loads(path.read_text())
    return keys["s3_access_key"], keys["s3_secret_key"]


def plan(options: StackOptions, inherited: Mapping[str, str], *, running: bool = False) -> Layout:
    """Lay the stack out. ``inherited`` is the environment that services start from.

    With ``running`` the stack is up and its ports are what they are.

    Raises:
        UnknownUnit: ``options.without`` names something that is no part of the stack.
        BadOptions: the policy or its pools are not valid.
    """
    data = options.data_dir.resolve()
    for folder in ("logs", "mlflow"):
        (data / folder).mkdir(parents=True, exist_ok=True)
    nodes = [f"node-{number}" for number in range(options.nodes)]
    inner = [f"s3-{number}" for number in range(S3Server.INNER_PORTS)]
    wanted = ("nats", "s3", "gateway-http", *inner, *SERVICES, AUTOSCALER, *nodes)
    ports = _Ports(data / "ports.json").take(*wanted, as_they_are=running)
    access_key, secret_key = s3_keys(data)
    nats = NatsServer(data / "nats", ports["nats"])
    s3 = S3Server(data / "s3", ports["s3"], access_key, secret_key, [ports[name] for name in inner])
    common = {
        # The user's own TRAINBUS_ settings for other stacks must not leak into this one, log level apart.
        **{k: v for k, v in inherited.items() if not k.startswith("TRAINBUS_") or k in PASSED_ON},
        "PYTHONUNBUFFERED": "1",
        "TRAINBUS_NATS_URL": nats.url,
        "TRAINBUS_S3_ENDPOINT": s3.endpoint,
        "TRAINBUS_S3_ACCESS_KEY": access_key,
        "TRAINBUS_S3_SECRET_KEY": secret_key,
        **{f"TRAINBUS_BUCKET_{name.upper()}": name for name in BUCKETS},
    }
    told, scales = (_policy_in_force(data), False) if running else write_policy(options)
    gateway_url = f"http://127.0.0.1:{ports['gateway-http']}"
    extra = {
        "tracking": {
            "TRAINBUS_MLFLOW_TRACKING_URI": mlflow_uri(data),
            "TRAINBUS_MLFLOW_ARTIFACT_LOCATION": (data / "mlflow" / "artifacts").as_uri(),
        },
        "gateway": {"TRAINBUS_GATEWAY_PORT": str(ports["gateway-http"])},
        "scheduler": told,
        # What lies where the stack was started may be trained on as it is, as file:///...
        "ingestion": {SOURCE_FOLDERS: inherited.get(SOURCE_FOLDERS) or json.dumps([str(Path.cwd())])},
    }
    layout = Layout(options, nats, s3, (), gateway_url, mlflow_uri(data), common)
    units = [layout.unit(name, name, ports[name], extra.get(name, {})) for name in (*SERVICES, AUTOSCALER)]
    units += [
        layout.unit(node, WORKER, ports[node], {"TRAINBUS_NODE_ID": node, "TRAINBUS_SLOTS": str(options.slots)})
        for node in nodes
    ]
    if unknown := set(options.without) - {each.name for each in units}:
        names = ", ".join(each.name for each in units)
        raise UnknownUnit(f"the stack has no {', '.join(sorted(unknown))}; it has {names}")
    left_out = {*options.without, *(() if scales else (AUTOSCALER,))}
    kept = tuple(each for each in units if each.name not in left_out)
    return replace(layout, units=kept, spare=tuple(each for each in units if each.name in left_out), scales=scales)


def policy_file(data_dir: Path) -> Path:
    return data_dir / "policy.json"


def _policy_in_force(data: Path) -> dict[str, str]:
    path = policy_file(data)
    return {"TRAINBUS_POLICY": str(path)} if path.exists() else {}


def write_policy(options: StackOptions) -> tuple[dict[str, str], bool]:
    """Write down what the scheduler is to decide by; return its settings, and whether nodes come and go.

    Raises:
        BadOptions: there is no such policy, or it, or a pool, is not valid.
    """
    path = policy_file(options.data_dir.resolve())
    if options.policy is None and not options.autoscale:
        path.unlink(missing_ok=True)
        return {}, False
    # Only here: the scheduler's part of the code takes a moment to load.
    from contracts.scheduling import Policy
    from services.scheduler import policies

    try:
        policy = policies.load(options.policy or policies.DEFAULT).model_dump(mode="json")
        pools = policy["pools"]
        pools["pools"] = [*pools["pools"], *(_pool(text, options.slots) for text in options.autoscale)]
        if options.idle_s is not None:
            pools["idle_s"] = options.idle_s
        checked = Policy.model_validate(policy)
    except (policies.PolicyError, ValueError) as error:
        raise BadOptions(str(error)) from error
    if any(pool.name == "node" for pool in checked.pools.pools):
        raise BadOptions("a pool must not be called node: its nodes would have the names of the stack's own")
    write_json(path, checked.model_dump(mode="json"))
    return _policy_in_force(path.parent), any(pool.max_nodes for pool in checked.pools.pools)


def _pool(text: str, slots: int) -> dict[str, object]:
    """A pool of CPU nodes like the stack's own out of ``NAME=MAX``."""
    name, _, most = text.partition("=")
    if not name or not most.isdigit():
        raise BadOptions(f"{text!r} is no pool of nodes: say NAME=MAX, for example burst=2")
    return {"name": name, "max_nodes": int(most), "slots_per_node": slots}
