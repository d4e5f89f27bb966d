"""Write the generated contract documents: ``python -m tests.contracts.generate``.

Refuses to write a schema that breaks users of the committed one; ``--breaking`` is for before 1.0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import yaml

from contracts.compatibility import breaking_changes
from contracts.documents import asyncapi, every_document

CONTRACTS = Path(__file__).parents[2] / "contracts"


def asyncapi_text() -> str:
    return yaml.safe_dump(asyncapi(), sort_keys=False, allow_unicode=True, width=110)


def breaks(folder: Path = CONTRACTS) -> list[str]:
    """Every breaking change between the committed schemas and the code."""
    found = []
    generated = every_document()
    for path in sorted((folder / "schemas").glob("*.json")):
        name = f"schemas/{path.name}"
        if name not in generated:
            found.append(f"{path.stem}: event removed")
            continue
        old, new = json.loads(path.read_text()), json.loads(generated[name])
        found += [f"{path.stem}: {change}" for change in breaking_changes(old, new)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--breaking", action="store_true", help="write even what breaks users of the committed schemas")
    arguments = parser.parse_args()
    if (found := breaks()) and not arguments.breaking:
        print("\n".join(found), file=sys.stderr)
        print("These changes break users: add a new version of the event instead.", file=sys.stderr)
        return 1
    (CONTRACTS / "schemas").mkdir(exist_ok=True)
    for stale in {p.name for p in (CONTRACTS / "schemas").glob("*.json")} - {Path(n).name for n in every_document()}:
        (CONTRACTS / "schemas" / stale).unlink()
    for name, text in every_document().items():
        (CONTRACTS / name).write_text(text)
    (CONTRACTS / "asyncapi.yaml").write_text(asyncapi_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
