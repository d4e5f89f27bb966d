"""Write the generated contract documents: ``python -m tests.contracts.generate``.

It refuses to write a schema, or an OpenAPI document of the gateway, that breaks users of the committed one, or of a
released one. A release keeps them in ``tests/upgrade/<version>`` (``--release <version>`` copies them there).
``--breaking`` and ``--breaking-http`` override the comparison with the committed ones. They are refused once a release
has stored its schemas, or its OpenAPI document.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import yaml

from services.gateway.api import build_api
from services.gateway.app import Gateway
from services.gateway.files import RunFiles
from services.gateway.projection import Projection
from services.gateway.settings import GatewaySettings
from services.gateway.store import Store
from tests.contracts.compatibility import breaking_changes
from tests.contracts.documents import GENERATED, asyncapi, every_document, insert_generated
from tests.contracts.http_compatibility import breaking_http_changes

CONTRACTS = Path(__file__).parents[2] / "contracts"
RELEASES = Path(__file__).parents[1] / "upgrade"


def asyncapi_text() -> str:
    return yaml.safe_dump(asyncapi(), sort_keys=False, allow_unicode=True, width=110)


def openapi_text() -> str:
    """Return the OpenAPI document of the gateway; nothing is connected for it."""
    settings = GatewaySettings()
    service = Gateway("gateway", settings)
    projection = Projection(service.bus, Store(settings.database_url))
    document = build_api(service, projection, RunFiles(settings), settings).openapi()
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def http_breaks(path: Path = CONTRACTS / "openapi.json") -> list[str]:
    """Return every breaking change between a stored OpenAPI document and the gateway."""
    if not path.exists():
        return []
    return breaking_http_changes(json.loads(path.read_text()), json.loads(openapi_text()))


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
    parser.add_argument("--breaking-http", action="store_true", help="the same, of the committed OpenAPI document")
    parser.add_argument("--release", metavar="VERSION", help="keep the committed schemas as those of this release")
    arguments = parser.parse_args()
    releases = released_schemas()
    documents = [document for each in releases if (document := each.parent / "openapi.json").exists()]
    for name, is_given, stored in (
        ("--breaking", arguments.breaking, releases),
        ("--breaking-http", arguments.breaking_http, documents),
    ):
        if is_given and stored:
            print(f"{len(stored)} releases are out: {name} is over", file=sys.stderr)
            return 1
    found = [change for folder in releases for change in breaks(folder)]
    found += [change for document in documents for change in http_breaks(document)]
    found += [] if found or arguments.breaking else breaks()
    found += [] if found or arguments.breaking_http else http_breaks()
    if found:
        print("\n".join(found), file=sys.stderr)
        print("These changes break users: add a new version of the event, or a new route, instead.", file=sys.stderr)
        return 1
    if arguments.release:
        shutil.copytree(CONTRACTS / "schemas", RELEASES / arguments.release / "schemas")
        shutil.copy(CONTRACTS / "openapi.json", RELEASES / arguments.release)
        return 0
    (CONTRACTS / "schemas").mkdir(exist_ok=True)
    for stale in {p.name for p in (CONTRACTS / "schemas").glob("*.json")} - {Path(n).name for n in every_document()}:
        (CONTRACTS / "schemas" / stale).unlink()
    for name, text in every_document().items():
        (CONTRACTS / name).write_text(text)
    (CONTRACTS / "asyncapi.yaml").write_text(asyncapi_text())
    (CONTRACTS / "openapi.json").write_text(openapi_text())
    for page, parts in GENERATED.items():
        path = CONTRACTS.parent / page
        path.write_text(insert_generated(path.read_text(), parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
