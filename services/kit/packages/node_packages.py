"""The packages that a node has, as a resolver can choose them: wheels that hold nothing but their metadata."""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from services.kit.packages.requirement_lock import normalise_name

TORCH = "torch"
#: The distribution whose requirements its ranks have.
OWN = "trainbus"
#: The extra of it that a node installs.
OWN_EXTRA = "node"
#: What a rank imports for itself, besides torch.
TRAINER_PACKAGES = ("blake3", "numpy", "nvidia-ml-py", "pillow", "pydantic", "safetensors")


@dataclass(frozen=True)
class NodePackages:
    """The distributions of this interpreter: name -> version, and name -> requirements."""

    versions: Mapping[str, str]
    requirements: Mapping[str, tuple[str, ...]]
    extras: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, *, has_torch: bool = True) -> NodePackages:
        """Read the distributions anew if a folder of the path has changed.

        ``has_torch``: False leaves out torch and what needs it.
        """
        return cls._read(has_torch, tuple(_changed_at(folder) for folder in sys.path))

    @classmethod
    @lru_cache(maxsize=2)
    def _read(cls, has_torch: bool, _changes: tuple[int, ...]) -> NodePackages:
        versions: dict[str, str] = {}
        requirements: dict[str, tuple[str, ...]] = {}
        extras: dict[str, tuple[str, ...]] = {}
        for each in importlib.metadata.distributions():
            name = normalise_name(each.metadata["Name"] or "")
            needed = tuple(each.requires or ())
            try:
                Version(each.version)
            except (InvalidVersion, TypeError):
                continue
            if not name or name in versions:  # the first on the path is imported
                continue
            if not has_torch and name != OWN and (name == TORCH or TORCH in map(_name_of, needed)):
                continue
            versions[name] = each.version
            requirements[name] = tuple(text for text in needed if has_torch or _name_of(text) != TORCH)
            extras[name] = tuple(each.metadata.get_all("Provides-Extra") or ())
        return cls(versions, requirements, extras)

    @cached_property
    def fingerprint(self) -> str:
        """Every name and version, in order."""
        return "\n".join(f"{name}=={version}" for name, version in sorted(self.versions.items()))

    @property
    def own_constraints(self) -> list[str]:
        """What packages beside the Trainer must satisfy, since it runs in the same process."""
        return [
            f"{each.name}{each.specifier}"
            for each in _parse(self.requirements.get(OWN, ()))
            if each.name in TRAINER_PACKAGES and (each.marker is None or each.marker.evaluate({"extra": OWN_EXTRA}))
        ]

    def write_wheels(self, folder: Path) -> None:
        """Write each distribution as a wheel without files."""
        for name, version in self.versions.items():
            stem = f"{name.replace('-', '_')}-{version}"
            lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            lines += [f"Provides-Extra: {extra}" for extra in self.extras[name]]
            lines += [f"Requires-Dist: {text}" for text in self.requirements[name]]
            info = f"{stem}.dist-info"
            with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n\n")
                wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
                wheel.writestr(f"{info}/RECORD", "")


def find_torch_conflict(folder: Path, torch_version: str) -> str | None:
    """Return which package in ``folder`` needs another torch; None if none does."""
    for each in importlib.metadata.distributions(path=[str(folder)]):
        needed = find_conflict(each.requires or (), TORCH, torch_version)
        if needed is not None:
            return f"{each.metadata['Name']} {each.version} needs {needed}"
    return None


def find_conflict(requirements: Iterable[str], name: str, version: str) -> str | None:
    """Return the first of ``requirements`` that a version of a package does not satisfy; None if all are."""
    for each in _parse(requirements):
        applies = each.marker is None or each.marker.evaluate({"extra": ""})
        if version and applies and normalise_name(each.name) == name and not each.specifier.contains(version, True):
            return f"{each.name}{each.specifier}"
    return None


def _parse(texts: Iterable[str]) -> Iterable[Requirement]:
    for text in texts:
        try:
            yield Requirement(text)
        except InvalidRequirement:
            continue


def _changed_at(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0


def _name_of(text: str) -> str:
    return next((normalise_name(each.name) for each in _parse([text])), "")
