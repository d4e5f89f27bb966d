"""The flags of a submission, which ``submit`` and ``tune`` share, and what both print of its check."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbus.client.errors import UsageError
from trainbus.client.submit_options import SubmitOptions
from trainbus.commands import render
from trainbus.commands.options import parse_data, parse_pair, parse_param

if TYPE_CHECKING:
    from trainbus.client.package import CodePackage

#: Options of a submission with another type or flag than their field: ``flags_of`` makes the others.
SUBMIT_FLAGS = {
    "request": (Path, "--request"),
    "slots": (str, "--slots"),
    "data": (list[str], "--data"),
    "data_format": (str, "--format"),
    "init_exclude": (list[str], "--init-exclude"),
    "params": (list[str], "--param"),
    "env": (list[str], "--env"),
    "metric_patterns": (list[str], "--metric-pattern"),
    "check": (bool, "--check/--no-check"),
    "event_id": (str, "--id"),
}


def parse_options(options: SubmitOptions, surplus: Sequence[str]) -> None:
    """Replace the texts of repeated flags by what they mean.

    Args:
        options: what the command line has.
        surplus: arguments after the last one that the command takes.

    Raises:
        UsageError: a text is not of its form, or there are surplus arguments.
    """
    if surplus:
        raise UsageError(f"unexpected {' '.join(surplus)!r}: quote the whole command, --command 'python train.py'")
    options["params"] = dict(map(parse_param, options.get("params") or ()))
    options["env"] = dict(parse_pair("--env", text) for text in options.get("env") or ())
    options["data"] = parse_data(list(options.get("data") or ()))
    patterns = options.get("metric_patterns") or ()
    options["metric_patterns"] = dict(parse_pair("--metric-pattern", text) for text in patterns)


def print_check(
    *,
    task: str | None = None,
    task_flag: str | None = None,
    command: str | None = None,
    check: bool | None = None,
    **_: Any,
) -> None:
    """Say what takes a few seconds, by what is given on the command line."""
    if check is False or command is not None or (task := task or task_flag) is None:
        return
    print(f"checking {task} before the upload: imports torch, tries one step (--no-check skips it)", file=sys.stderr)


def print_findings(notes: Sequence[str], unchecked: str) -> None:
    """Print what a check found that prevents nothing, and what it could not check."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if unchecked:
        print(f"not all was checked before the upload: {unchecked}", file=sys.stderr)


def describe_package(package: CodePackage | None) -> str:
    """Return how many files were packed and of which commit, in parentheses; '' without a package."""
    from contracts.formats import plural

    if package is None:
        return ""
    commit = f", commit {package.git_commit[:10]}" if package.git_commit else ""
    dirty = " with uncommitted changes" if package.git_dirty else ""
    return f" ({plural(len(package.files), 'file')}, {render.size(len(package.body))} packed{commit}{dirty})"
