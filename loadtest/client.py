"""What a client costs a machine that only submits and asks: megabytes on disk, and seconds until it is imported.

    python -m loadtest.client [--before REVISION]

The wheel of this commit, that of an earlier one, and the clients of other platforms are each installed by pip into an
environment of their own, with what they need. A network with a package index is needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from loadtest.common import report
from loadtest.process_cost import measure_process

ROOT = Path(__file__).parent.parent
#: The last commit whose client read the bus itself.
BEFORE = "fa33fb2"
OURS = "import trainbus; trainbus.Client"
#: What a program of each platform installs and imports to submit work and to ask about it.
PEERS = {
    "ray[client]": "from ray.job_submission import JobSubmissionClient",
    "dstack": "from dstack.api import Client",
    "prefect-client": "from prefect.client.orchestration import get_client",
    "skypilot": "import sky.client.sdk",
}


@dataclass(frozen=True, slots=True)
class Client:
    """An installed client: its size without compiled bytecode, and what the import costs a fresh process."""

    installed_mb: float
    distributions: int
    import_s: float
    import_memory_mb: float


def build_wheel(revision: str, folder: Path) -> Path:
    """Build the wheel of a commit of this repository."""
    source = folder / "source"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", folder, source], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def measure_client(requirement: str, statement: str, folder: Path) -> Client:
    """Install a client into a new environment in ``folder`` and import it there several times."""
    venv.create(folder)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--target", packages, requirement], check=True, capture_output=True)
    files = [path for path in packages.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    cost = measure_process([str(folder / "bin" / "python"), "-c", statement], {})
    return Client(
        sum(path.stat().st_size for path in files) / 1e6,
        len(list(distributions(path=[str(packages)]))),
        cost.median_s,
        cost.memory_mb,
    )


def show(found: dict[str, Client], wheels_mb: dict[str, float]) -> None:
    now = found["trainbus"]
    rows = [
        (
            name,
            f"{each.installed_mb:.0f} MB in {each.distributions} packages, imported in {each.import_s:.2f} s, "
            f"{each.import_memory_mb:.0f} MB of memory",
            f"{each.installed_mb / now.installed_mb:.1f} times the size, {each.import_s / now.import_s:.1f} the time",
        )
        for name, each in found.items()
    ]
    rows += [(f"wheel of {name}", f"{size:.1f} MB", "") for name, size in wheels_mb.items()]
    figures: dict[str, Any] = {"wheels_mb": wheels_mb, "clients": {name: asdict(each) for name, each in found.items()}}
    report("client", rows, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="REVISION", default=BEFORE)
    arguments = parser.parse_args()
    found, wheels_mb = {}, {}
    with tempfile.TemporaryDirectory(prefix="trainbus-client-") as folder:
        for name, revision in (("trainbus", "HEAD"), (f"trainbus of {arguments.before}", arguments.before)):
            wheel = build_wheel(revision, Path(folder) / f"wheel-{revision}")
            wheels_mb[name] = wheel.stat().st_size / 1e6
            found[name] = measure_client(str(wheel), OURS, Path(folder) / f"venv-{revision}")
        for requirement, statement in PEERS.items():
            found[requirement] = measure_client(requirement, statement, Path(folder) / f"venv-{requirement}")
    show(found, wheels_mb)


if __name__ == "__main__":
    main()
