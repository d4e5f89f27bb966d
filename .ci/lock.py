"""Write the lock files from what is installed: ``make lock``, in an environment that passed the tests.

Exactly what pyproject.toml needs, directly or not, pinned to the versions that are installed here. Local
version labels (``+cpu``) and packages that only one kind of machine needs (``nvidia-*``, which torch
brings itself where there is a GPU) stay out, and so do hosts and paths: plain pip and PyPI are enough.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

#: What builds the packages that have no wheel; pip brings none of it itself.
BUILD = ["setuptools", "wheel"]
#: torch names these for Linux with a GPU, each build its own; the lock must fit them all. What
#: pyproject.toml itself names stays (nvidia-ml-py is one file of Python).
LEFT_OUT = ("nvidia-", "cuda-", "triton")
#: The headless build is named instead: this one needs a display's libraries.
UNWANTED = ("opencv-python",)
#: pyproject.toml's ``all`` names its own extra.
SELF = "trainbus"


def closure(roots: list[str]) -> dict[str, str]:
    """Name -> version of everything that ``roots`` need here, themselves included."""
    found: dict[str, str] = {}
    todo = [Requirement(root) for root in roots]
    named = {canonicalize_name(root.name) for root in todo}
    seen: set[tuple[str, str]] = set()
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        # Each extra brings requirements of its own; "" are those without any.
        fresh = [extra for extra in ("", *sorted(wanted.extras)) if (name, extra) not in seen]
        seen.update((name, extra) for extra in fresh)
        if not fresh or name in UNWANTED or (name.startswith(LEFT_OUT) and name not in named):
            continue
        distribution = importlib.metadata.distribution(name)
        found[name] = Version(distribution.version).public
        for text in distribution.requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in fresh):
                todo.append(needed)
    return found


def write(path: Path, title: str, pins: dict[str, str]) -> None:
    """Write one lock file."""
    lines = [f"# {title}", "# Written by `make lock`; do not edit."]
    lines += [f"{name}=={version}" for name, version in sorted(pins.items())]
    path.write_text("\n".join(lines) + "\n")
    print(f"{path.name}: {len(pins)} packages")


def main() -> None:
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    run = [*project["dependencies"], *extras["node"]]
    servers = [text for text in extras["all"] if Requirement(text).name != SELF]
    main_pins = closure([*BUILD, *run, *servers, *extras["dev"]])
    write(root / "requirements.lock", "Everything that trainbus and its tests need.", main_pins)
    # The servers of the embedded stack run in containers of their own there.
    write(root / "requirements-image.lock", "What services and workers in containers need.", closure([*BUILD, *run]))
    for extra in ("deepspeed", "integrations", "browser", "vision"):
        pins = {name: pin for name, pin in closure(extras[extra]).items() if name not in main_pins}
        write(root / f"requirements-{extra}.lock", "The optional extra: on top of requirements.lock.", pins)


if __name__ == "__main__":
    sys.exit(main())
