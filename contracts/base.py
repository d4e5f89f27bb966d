"""The two kinds of event, and the identifiers they are made of."""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import from_json

from contracts import subjects

#: A NATS subject token: what may stand between two dots. Long enough for a name and a hash.
TOKEN_PATTERN = r"^[A-Za-z0-9_-]{1,128}$"
Token = Annotated[str, Field(pattern=TOKEN_PATTERN)]
#: Years in which an event can be. What lies outside is a mistake, and at the ends of the calendar conversions fail.
FIRST_YEAR, LAST_YEAR = 1970, 2199


def check_time(when: datetime) -> datetime:
    """Return the time if it is one at which something can happen.

    Raises:
        ValueError: it is not; the text says which are.
    """
    if not FIRST_YEAR <= when.year <= LAST_YEAR:
        raise ValueError(f"the year {when.year} is not within {FIRST_YEAR} to {LAST_YEAR}")
    return when


#: A time of which every arithmetic is possible.
Instant = Annotated[datetime, AfterValidator(check_time)]
#: Lower-case hex SHA-256.
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
#: A location in the object store, ``s3://bucket/key``.
ObjectUri = Annotated[str, Field(pattern=r"^s3://[a-z0-9.-]{3,63}/.*$", max_length=2048)]

#: Where data is read from: the object store, or a folder of the machine that the services share (embedded stack).
DataUri = Annotated[str, Field(pattern=r"^(s3://[a-z0-9.-]{3,63}/.*|file:///.*)$", max_length=2048)]


def short_hash(*parts: str, length: int = 12) -> str:
    """Return ``length`` base32 characters (5 bits each) of the SHA-256 of ``parts``.

    The parts are joined by NUL, so that ("ab", "c") and ("a", "bc") differ.
    """
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return base64.b32encode(digest).decode().lower()[:length]


def run_id_for(source: str, event_id: str) -> str:
    """Return the run a request means: the same (source, id) is one run, however often it is sent."""
    return "r" + short_hash(source, event_id)


def study_id_for(source: str, event_id: str) -> str:
    """Return the study that a request means, as ``run_id_for`` does for a run."""
    return "s" + short_hash(source, event_id)


def ingestion_id_for(source: str, event_id: str) -> str:
    """Return the ingestion that a request means, as ``run_id_for`` does for a run."""
    return "i" + short_hash(source, event_id)


def run_ingestion_id(run_id: str, name: str | None) -> str:
    """Return the id of the ingestion for a run, or for that dataset of it."""
    return run_id if name is None else f"{run_id}-{name}"


def request_id_for(source: str, request_type: str, event_id: str) -> str:
    """Return the id under which a request is answered that is refused.

    It is that of version 1 for every version of the type: a request that comes again is one request, even if services
    were updated meanwhile.
    """
    return "q" + short_hash(source, f"{request_type.rpartition('.')[0]}.v1", event_id)


def token(name: str) -> str:
    """Make ``name`` safe as one subject token; two names that differ stay different."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:100]
    return safe if safe == name and name else f"{safe}-{short_hash(name, length=6)}"


class Event(BaseModel):
    """An event on the bus: the JSON body; its envelope travels as headers."""

    #: A metric may be NaN or infinite, which JSON numbers cannot: such values travel as "NaN", "Infinity".
    #: Each type is compiled when it is first used: all of them take longer than most commands run.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings", defer_build=True)

    #: CloudEvents type, for example ``trainbus.run.placed.v1``.
    type: ClassVar[str]

    def to_plain(self) -> dict[str, Any]:
        """Return the body as JSON has it, NaN and infinity as text, without fields that have their defaults."""
        plain: dict[str, Any] = from_json(self.model_dump_json(exclude_defaults=True))
        return plain

    @classmethod
    def subject_filter(cls) -> str:
        """The NATS subject, with ``*`` for the aggregate's id, that carries every event of this type."""
        raise TypeError(f"{cls.__name__} is abstract")

    @property
    def subject(self) -> str:
        """The NATS subject of this event."""
        raise TypeError(f"{type(self).__name__} is abstract")


class Request(Event):
    """A request from a client or a service. Unknown fields are refused, so that a typo is not ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verb: ClassVar[str]

    def __init_subclass__(cls, verb: str | None = None, version: int = 1, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if verb is not None:
            cls.verb = verb
            cls.type = f"trainbus.{verb}.requested.v{version}"

    @classmethod
    def subject_filter(cls) -> str:
        return subjects.request(cls.verb)

    @property
    def subject(self) -> str:
        return self.subject_filter()


class Fact(Event):
    """What has happened. Read leniently: a newer publisher may add optional fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    aggregate: ClassVar[str]
    fact: ClassVar[str]
    #: The field with the id of the run, dataset, node or model that this is a fact about.
    id_field: ClassVar[str]
    #: Paths of the fields that distinguish this fact from others of its type about the same aggregate.
    occurrence_fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(
        cls,
        aggregate: str | None = None,
        fact: str | None = None,
        id_field: str | None = None,
        occurrence: str | None = None,
        version: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        if aggregate is not None:
            cls.aggregate = aggregate
        if id_field is not None:
            cls.id_field = id_field
        if occurrence is not None:
            cls.occurrence_fields = tuple(occurrence.split("/"))
        if fact is not None:
            cls.fact = fact
            cls.type = f"trainbus.{cls.aggregate}.{fact}.v{version}"

    @classmethod
    def subject_filter(cls) -> str:
        return subjects.fact(cls.aggregate, subjects.WILDCARD, cls.fact)

    @property
    def aggregate_id(self) -> str:
        return str(getattr(self, self.id_field))

    @property
    def occurrence(self) -> str:
        """The values of ``occurrence_fields``; '' if the fact happens once."""
        return "/".join(str(attrgetter(path)(self)) for path in self.occurrence_fields)

    @property
    def subject(self) -> str:
        return subjects.fact(self.aggregate, token(self.aggregate_id), self.fact)

    @property
    def event_id(self) -> str:
        """Deterministic id: the same fact published twice has the same id, so it is stored once."""
        return "/".join(filter(None, (self.aggregate, self.aggregate_id, self.fact, self.occurrence)))


class FactPart(BaseModel):
    """A value inside a fact: frozen, and lenient as facts are."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings", defer_build=True)
