"""Write the generated contract documents: ``python -m tests.contracts.generate``.

It refuses to write a schema that breaks users of the committed one, or of a released one. A release keeps its schemas
in ``tests/upgrade/<version>/schemas`` (``--release <version>`` copies them there). ``--breaking`` overrides the
comparison with the committed schemas. It is refused once a release has stored its schemas.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import yaml

from tests.contracts.compatibility import breaking_changes
from tests.contracts.documents import GENERATED, asyncapi, every_document, insert_generated

CONTRACTS = Path(__file__).parents[2] / "contracts"
RELEASES = Path(__file__).parents[1] / "upgrade"


def asyncapi_text() -> str:
    return yaml.safe_dump(asyncapi(), sort_keys=False, allow_unicode=True, width=110)


def released_schemas(releases: Path = RELEASES) -> list[Path]:
    """Return the folders of the schemas of each release."""
    return sorted(releases.glob("*/schemas"))


def breaks(schemas: Path = CONTRACTS / "schemas") -> list[str]:
    """Return every breaking change between the schemas in a folder and the code."""
    found = []
    generated = every_document()
    for path in sorted(schemas.glob("*.json")):
        name = f"schemas/{path.name}"
        if name not in generated:
            found.append(f"{path.stem}: event removed")
            continue
        old, new = json.loads(path.read_text()), json.loads(generated[name])
        found += [f"{path.stem}: {change}" for change in breaking_changes(old, new)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--breaking", action="store_true", help="before the first release: break the committed schemas")
    parser.add_argument("--release", metavar="VERSION", help="keep the committed schemas as those of this release")
    arguments = parser.parse_args()
    releases = released_schemas()
    if arguments.breaking and releases:
        print(f"{len(releases)} releases are out: --breaking is over", file=sys.stderr)
        return 1
    found = [change for folder in releases for change in breaks(folder)]
    if found := found or ([] if arguments.breaking else breaks()):
        print("\n".join(found), file=sys.stderr)
        print("These changes break users: add a new version of the event instead.", file=sys.stderr)
        return 1
    if arguments.release:
        shutil.copytree(CONTRACTS / "schemas", RELEASES / arguments.release / "schemas")
        return 0
    (CONTRACTS / "schemas").mkdir(exist_ok=True)
    for stale in {p.name for p in (CONTRACTS / "schemas").glob("*.json")} - {Path(n).name for n in every_document()}:
        (CONTRACTS / "schemas" / stale).unlink()
    for name, text in every_document().items():
        (CONTRACTS / name).write_text(text)
    (CONTRACTS / "asyncapi.yaml").write_text(asyncapi_text())
    for page, parts in GENERATED.items():
        path = CONTRACTS.parent / page
        path.write_text(insert_generated(path.read_text(), parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
