"""Requirement files and their locks: which packages a project asks for, and which of them a node has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

#: Options of a requirement file that name other files, and those that say where packages are.
INCLUDES = re.compile(r"^(?:-r|--requirement|-c|--constraint)[ =]*(\S+)")
INDEX_OPTION = re.compile(
    r"^(?:-i|--index-url|--extra-index-url|-f|--find-links|--no-index|--trusted-host|--no-binary|--only-binary)\b"
)
NAME = re.compile(r"^[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?===?([^\s;\\]+)")
#: A project's folder, which cannot be locked by a hash: the run has it as its code.
LOCAL_FOLDER = re.compile(r"^(?:-e\s|\.{1,2}(?:[/\s]|$)|/|file:|[A-Za-z0-9._\[\],-]+ @ file:)")
GIT_COMMIT = re.compile(r" @ git\+[^ ]*@[0-9a-f]{40}")
#: Credentials in an address.
USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
NO_SOLUTION = "No solution found"
#: Fragments of the resolver's errors that another attempt can be without.
TRANSIENT_SIGNS = (
    "Request failed after",
    "Failed to fetch",
    "error sending request",
    "tcp connect error",
    "dns error",
    "timed out",
    "Connection reset",
)
#: What the installer says when the disk is full.
FULL_DISK_SIGN = "No space left on device"


@dataclass(frozen=True, slots=True)
class LockEntry:
    """One package of a lock. ``version`` is '' where an address stands for it."""

    name: str
    version: str
    text: str

    @property
    def has_hash(self) -> bool:
        """Whether the entry says what its files hash to."""
        return "--hash=" in self.text


def normalise_name(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def redact(text: str) -> str:
    """Return a text without the credentials of addresses in it."""
    return USER_INFO.sub("****@", text)


def included_files(text: str) -> Iterator[str]:
    """Yield the files that a requirement file includes, as it names them."""
    for line in text.splitlines():
        if (match := INCLUDES.match(line.strip())) is not None:
            yield match[1]


def asks_for_packages(text: str) -> bool:
    """Return whether a requirement file has a line that is no comment and does more than include another file."""
    lines = (line.strip() for line in text.splitlines())
    return any(line and not line.startswith("#") and not INCLUDES.match(line) for line in lines)


def index_options(text: str) -> list[str]:
    """Return the lines of a requirement file that say where packages are."""
    return [line.strip() for line in text.splitlines() if INDEX_OPTION.match(line.strip())]


def parse_lock(text: str) -> list[LockEntry]:
    """Return the entries of a lock, without the folders of the project itself."""
    entries = []
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        line = " ".join(line.split())
        if not line or line.startswith(("#", "--")):
            continue
        if (pin := PIN.match(line)) is not None:
            entries.append(LockEntry(normalise_name(pin[1]), pin[2], line))
        elif "--hash=" in line or not LOCAL_FOLDER.match(line):
            name = NAME.match(line)
            entries.append(LockEntry(normalise_name(name[0]) if name else "", "", line))
    return sorted(entries, key=lambda each: each.text)


def select_missing(entries: Iterable[LockEntry], installed: Mapping[str, str]) -> list[LockEntry]:
    """Return the entries that a node does not have in their version. ``installed``: name -> version."""
    return [entry for entry in entries if not entry.version or installed.get(entry.name) != entry.version]


def find_unlocked(entries: Iterable[LockEntry]) -> LockEntry | None:
    """Return the first entry whose content nothing fixes, neither a hash nor a commit."""
    return next((each for each in entries if not each.has_hash and not GIT_COMMIT.search(each.text)), None)


def explain_error(stderr: str, files: Mapping[str, str]) -> str:
    """Return why packages cannot be resolved or installed, with the line that asks for them.

    Args:
        files: name -> text of the requirement files.
    """
    stderr = redact(stderr)
    causes = [line.strip().removeprefix("cause:").strip() for line in stderr.splitlines() if line.strip()]
    lines = [line.removeprefix("error:").strip() for line in causes if not line.startswith("warning:")]
    reasons = [line for line in lines if line.startswith("Because ")] or lines
    reason = " ".join(reasons) if reasons else "the installer ended without a message"
    reason = re.sub(r",? we can conclude that your requirements are unsatisfiable\.?", "", reason)
    reason = re.sub(r"^Because ", "", reason).rstrip(".")
    place = find_line(reason, files)
    return (f"{place}: " if place else "") + reason


def find_line(reason: str, files: Mapping[str, str]) -> str:
    """Return ``file, line n`` of the first requirement that a reason names; '' if there is none."""
    words = {normalise_name(match) for match in re.findall(r"[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]", reason)}
    for file, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            requirement = line.strip().strip("\"',")
            name = NAME.match(requirement)
            if name is not None and normalise_name(name[0]) in words and not requirement.startswith("-"):
                return f"{PurePosixPath(file)}, line {number} ({redact(requirement)})"
    return ""


def is_transient(stderr: str) -> bool:
    """Whether another attempt may succeed: the index was not reached."""
    return NO_SOLUTION not in stderr and any(sign in stderr for sign in TRANSIENT_SIGNS)


def format_lock(entries: Sequence[LockEntry]) -> str:
    """Return entries as a requirement file."""
    return "".join(f"{entry.text}\n" for entry in entries)
