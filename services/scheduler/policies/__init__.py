"""Policies by name: the ones that come with trainbus, and a team's own file (TOML or JSON).

A file holds what differs from the default; ``contracts/scheduling.py`` says what there is.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from contracts.problems import describe_problems, join_problems
from contracts.scheduling import Policy, rename_setting

DEFAULT = "default"
_SUFFIX = ".toml"


class PolicyError(ValueError):
    """There is no such policy, or it is not valid; the text says what to change."""


def names() -> tuple[str, ...]:
    """The policies that come with trainbus."""
    return tuple(sorted(f.name.removesuffix(_SUFFIX) for f in files(__name__).iterdir() if f.name.endswith(_SUFFIX)))


def load(name_or_path: str) -> Policy:
    """The policy of this name, or in this file.

    Raises:
        PolicyError: there is none, or it is not valid.
    """
    return with_settings(name_or_path, ())


def with_settings(name_or_path: str, settings: Iterable[str]) -> Policy:
    """The policy of this name or in this file, with some fields set: ``order.skip=true``.

    Raises:
        PolicyError: there is no such policy, or it, or a setting, is not valid.
    """
    text, where = _text(name_or_path)
    policy = _validated({"name": Path(name_or_path).stem, **_parsed(text, where)}, where)
    return _changed(policy, settings, where)


def change(policy: Policy, settings: Iterable[str]) -> Policy:
    """The policy with some fields set.

    Raises:
        PolicyError: a setting is not valid.
    """
    return _changed(policy, settings, f"policy {policy.name}")


def parse(text: str, where: str) -> Policy:
    """The policy in a text, TOML or JSON; ``where`` is what errors call it.

    Raises:
        PolicyError: it is not valid.
    """
    return _validated(_parsed(text, where), where)


def _text(name_or_path: str) -> tuple[str, str]:
    if name_or_path in names():
        preset = files(__name__).joinpath(name_or_path + _SUFFIX)
        return preset.read_text(encoding="utf-8"), f"policy {name_or_path}"
    path = Path(name_or_path)
    if not path.is_file():
        raise PolicyError(f"there is no policy {name_or_path!r} and no such file; there are {', '.join(names())}")
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path} cannot be read: {error}") from error


def _parsed(text: str, where: str) -> dict[str, Any]:
    """TOML, or JSON where the text is an object."""
    try:
        return dict(json.loads(text)) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise PolicyError(f"{where} is neither TOML nor JSON: {error}") from error


def _changed(policy: Policy, settings: Iterable[str], where: str) -> Policy:
    content = policy.model_dump(mode="json")
    for setting in settings:
        _set(content, setting)
    return _validated(content, where)


def _set(content: dict[str, Any], setting: str) -> None:
    """Put ``a.b=value`` into the content; a value that is no JSON is a text."""
    path, equals, text = rename_setting(setting).partition("=")
    *parents, field = path.strip().split(".")
    if not equals or not field:
        raise PolicyError(f"{setting!r} sets nothing: write it like order.skip=true")
    part: Any = content
    for parent in parents:
        part = part.setdefault(parent, {})
        if not isinstance(part, dict):
            raise PolicyError(f"{setting!r}: {parent} is no part of a policy")
    try:
        part[field] = json.loads(text)
    except json.JSONDecodeError:
        part[field] = text.strip()


def _validated(content: dict[str, Any], where: str) -> Policy:
    try:
        return Policy.model_validate(content)
    except ValidationError as error:
        problems = join_problems(describe_problems(error, content, Policy))
        raise PolicyError(f"{where} is not valid: {problems}") from error
