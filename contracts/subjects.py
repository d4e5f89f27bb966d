"""The only file in which a NATS subject is spelled.

Requests are two tokens (``train.requested``), facts three (``run.<run_id>.placed``), so no two
streams overlap and one wildcard follows one run.
"""

from __future__ import annotations

#: A single-token wildcard: in place of an id it makes a filter out of a subject.
WILDCARD = "*"


def request(verb: str) -> str:
    """The subject of a request, ``train.requested``."""
    return f"{verb}.requested"


def fact(aggregate: str, aggregate_id: str, name: str) -> str:
    """The subject of a fact, ``run.<run_id>.placed``."""
    return f"{aggregate}.{aggregate_id}.{name}"


def parts(subject: str) -> tuple[str, str, str]:
    """What a fact's subject is made of: (aggregate, id, fact); empty strings if it is no fact's."""
    tokens = subject.split(".")
    return (tokens[0], tokens[1], tokens[2]) if len(tokens) == 3 else ("", "", "")


def run(run_id: str) -> str:
    """Every fact of one run."""
    return f"run.{run_id}.*"


def progress(run_id: str = WILDCARD) -> str:
    """Metric points of a run."""
    return f"progress.{run_id}"


def dataset_progress(ingestion_id: str = WILDCARD) -> str:
    """How far an ingestion has got."""
    return f"progress.dataset.{ingestion_id}"


def log(run_id: str = WILDCARD, rank: int | str = WILDCARD) -> str:
    """Output lines of one rank of a run."""
    return f"log.{run_id}.{rank}"


def dead(consumer: str, subject: str) -> str:
    """Where a message goes that ``consumer`` could not handle."""
    return f"dead.{consumer}.{subject}"


def matches(pattern: str, subject: str) -> bool:
    """Whether a pattern with ``*`` tokens covers a subject (or a narrower pattern) of as many tokens."""
    wanted, found = pattern.split("."), subject.split(".")
    return len(wanted) == len(found) and all(w in (WILDCARD, f) for w, f in zip(wanted, found, strict=True))


def overlap(one: str, other: str) -> bool:
    """Whether some subject fits both patterns, whose tokens may be ``*``, and the last one ``>``."""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if WILDCARD not in (a, b) and a != b:
            return False
    return len(left) == len(right)


def unwrap(subject: str) -> str:
    """Return the subject that a dead letter or a shadow fact is about; any other subject as it is."""
    prefix, _, rest = subject.partition(".")
    return rest.partition(".")[2] if prefix in ("dead", "shadow") else subject


#: What the streams hold.
ALL_FACTS = (
    "run.*.*",
    "dataset.*.*",
    "node.*.*",
    "model.*.*",
    "study.*.*",
    "capacity.*.*",
    "policy.*.*",
    "request.*.*",
)
ALL_PROGRESS = (progress(), dataset_progress())
ALL_LOGS = (log(),)
ALL_DEAD = ("dead.>",)
ALL_SHADOW = ("shadow.>",)
#: Every verb that can be requested. They are listed rather than matched by ``*.requested``,
#: because that would overlap with ``progress.*`` and ``dead.>``, which the server refuses.
VERBS = (
    *("train", "cancel", "ingest", "restore", "tune", "stop_study", "drain", "undrain", "adopt_policy", "pin", "scrub"),
    *("promote", "rollback", "configure", "approve", "stage"),
)
ALL_REQUESTS = tuple(request(verb) for verb in VERBS)


def node(node_id: str = WILDCARD) -> str:
    """Every fact of one node."""
    return f"node.{node_id}.*"


def dataset(dataset_id: str = WILDCARD) -> str:
    """Every fact of one dataset."""
    return f"dataset.{dataset_id}.*"


def refused(request_id: str = WILDCARD) -> str:
    """Why a request was not done."""
    return f"request.{request_id}.refused"


def study(study_id: str = WILDCARD) -> str:
    """Every fact of one study."""
    return f"study.{study_id}.*"


def model(name: str = WILDCARD) -> str:
    """Every fact of one registered model."""
    return f"model.{name}.*"


def shadow(policy: str, subject: str) -> str:
    """Where a candidate policy's fact goes that the policy in force would publish on ``subject``."""
    return f"shadow.{policy}.{subject}"


def node_lease(node_id: str = "") -> str:
    """Key of a node's lease in the bucket LEASES; without an id the prefix of all of them."""
    return f"node.{node_id}"


#: Endpoint at which each instance of a service says whether it is ready.
PRESENCE = "presence"


def service(name: str, endpoint: str) -> str:
    """A question that one service answers directly (core NATS request and reply)."""
    return f"svc.{name}.{endpoint}"
