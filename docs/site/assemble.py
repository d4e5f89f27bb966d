"""Write the sources of the site into a folder: ``python -m docs.site.assemble FOLDER``; ``make site`` builds it.

The pages stay as they are read on a forge. Here their links to other pages lead to the pages of the site, and those to
files of the repository become the file's path, or lead to it below ``--repository URL``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from docs.site.api import api
from docs.site.commands import commands
from docs.site.events import facts, parts, requests
from docs.site.metrics import metrics
from docs.site.settings import policy, settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = Path(__file__).with_name("zensical.toml")
ASSETS = [CONFIG.with_name("iframe-worker.js"), CONFIG.with_name("site.css")]
PAGES_OUTSIDE_DOCS = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
GENERATED = {
    "reference/api.md": api,
    "reference/commands.md": commands,
    "reference/facts.md": facts,
    "reference/metrics.md": metrics,
    "reference/parts.md": parts,
    "reference/policy.md": policy,
    "reference/requests.md": requests,
    "reference/settings.md": settings,
}
#: A block of code, in which nothing is a link, or a link, or a picture.
BLOCK_OR_LINK = re.compile(r"^```.*?^```$|(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", re.M | re.S)
HAS_SCHEME = re.compile(r"[a-z]+:|#")


def listed_pages() -> list[str]:
    """Return the pages that the navigation names, in its order."""
    return list(_pages_in(tomllib.loads(CONFIG.read_text())["project"]["nav"]))


def _pages_in(entries: Iterable[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            yield from (page for section in entry.values() for page in _pages_in(section))


def navigation_problems(pages: Iterable[str], listed: Iterable[str]) -> list[str]:
    """Return what is wrong with a navigation: pages that it lacks, and entries that are no pages."""
    there, named = set(pages), set(listed)
    missing = [f"{page} is not in nav of {CONFIG.relative_to(ROOT)}" for page in sorted(there - named)]
    return missing + [
        f"nav of {CONFIG.relative_to(ROOT)} names {page}, which is not there" for page in sorted(named - there)
    ]


def site_paths() -> dict[str, str]:
    """Return the path in the site of each file of the repository that is in it."""
    files = (path for path in DOCS.rglob("*") if path.is_file() and not path.is_relative_to(CONFIG.parent))
    inside = {path.relative_to(ROOT).as_posix(): path.relative_to(DOCS).as_posix() for path in files}
    return PAGES_OUTSIDE_DOCS | inside


def site_pages() -> list[str]:
    """Return every page of the site, written or generated."""
    return [path for path in (*site_paths().values(), *GENERATED) if path.endswith(".md")]


def rewrite_links(text: str, page: str, paths: dict[str, str], repository: str = "") -> str:
    """Return a page of the repository with the links that it has in the site.

    A link to what does not exist stays: the build refuses it.
    """

    def rewrite(found: re.Match[str]) -> str:
        label, target = found["text"], found["target"]
        if target is None or HAS_SCHEME.match(target):
            return found[0]
        path, hash_sign, anchor = target.partition("#")
        file = os.path.normpath(PurePosixPath(page).parent / path)
        site_path = paths.get(file) or paths.get(f"{file}/README.md")
        if site_path is not None:
            there = os.path.relpath(site_path, PurePosixPath(paths[page]).parent)
            return f"{found['picture']}[{label}]({there}{hash_sign}{anchor})"
        if not (ROOT / file).exists():
            return found[0]
        if repository:
            return f"[{label}]({repository.rstrip('/')}/{file})"
        return f"`{file}`" if label in file else f"{label} (`{file}`)"

    return BLOCK_OR_LINK.sub(rewrite, text)


def assemble(folder: Path, repository: str = "") -> None:
    """Write every page and picture into a folder, which is made anew, and the site's configuration beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    paths = site_paths()
    for name, site_path in paths.items():
        target = folder / site_path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".md":
            target.write_text(rewrite_links((ROOT / name).read_text(), name, paths, repository))
        else:
            shutil.copyfile(ROOT / name, target)
    for site_path, page in GENERATED.items():
        target = folder / site_path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page())
    (folder / "assets").mkdir()
    for asset in ASSETS:
        shutil.copy(asset, folder / "assets")
    shutil.copy(CONFIG, folder.parent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repository", default="", metavar="URL", help="where files of the repository are shown")
    arguments = parser.parse_args()
    if problems := navigation_problems(site_pages(), listed_pages()):
        print("\n".join(problems), file=sys.stderr)
        return 1
    assemble(arguments.folder, arguments.repository)
    return 0


if __name__ == "__main__":
    sys.exit(main())
