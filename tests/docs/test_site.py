"""The site of the documentation: it has every page, needs no other host, and answers a search without a server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.site import assemble as site_sources
from docs.site.assemble import assemble, listed_pages, navigation_problems, rewrite_links, site_pages
from docs.site.markdown import prose, table

ROOT = Path(__file__).parents[2]
GENERATOR = ROOT / ".venv" / "site" / "bin" / "zensical"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATHS = {"README.md": "index.md", "docs/http.md": "http.md", "docs/adr/README.md": "adr/README.md"}
#: Colours of a terminal.
ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: Tags whose address the browser loads by itself.
LOADED = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "script": "src",
    "video": "src",
}


class LoadedAddresses(HTMLParser):
    """The addresses of scripts, styles, fonts and pictures of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if name == LOADED.get(tag) and value]


def build(sources: Path) -> subprocess.CompletedProcess[str]:
    """Build the site beside its sources, as ``make site`` does."""
    assert GENERATOR.exists(), "there is no generator of the site: make site"
    command = [GENERATOR, "build", "--strict", "--clean", "-f", sources.parent / "zensical.toml"]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    assemble(folder / "site-source")
    done = build(folder / "site-source")
    assert done.returncode == 0, done.stdout
    return folder / "site"


def html_of(page: str) -> str:
    """Return the path of a page in the built site."""
    return re.sub(r"(README)?\.md$", lambda found: "index.html" if found[1] else ".html", page)


def is_elsewhere(address: str) -> bool:
    return re.match(r"([a-z]+:)?//", address) is not None


def test_navigation_names_every_page_once() -> None:
    assert navigation_problems(site_pages(), listed_pages()) == []
    assert len(listed_pages()) == len(set(listed_pages()))


def test_navigation_problems_name_the_page() -> None:
    assert navigation_problems(["index.md", "new.md"], ["index.md", "old.md"]) == [
        "new.md is not in nav of docs/site/zensical.toml",
        "nav of docs/site/zensical.toml names old.md, which is not there",
    ]


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("README.md", "[HTTP](docs/http.md#runs)", "[HTTP](http.md#runs)"),
        ("README.md", "[decisions](docs/adr)", "[decisions](adr/README.md)"),
        ("docs/adr/README.md", "[start](../../README.md)", "[start](../index.md)"),
        ("docs/http.md", "[compose.yaml](../compose.yaml)", "`compose.yaml`"),
        ("docs/http.md", "[the stack](../compose.yaml)", "the stack (`compose.yaml`)"),
        ("docs/http.md", "[elsewhere](https://example.org)", "[elsewhere](https://example.org)"),
        ("docs/http.md", "[below](#runs)", "[below](#runs)"),
        ("docs/http.md", "[gone](gone.md)", "[gone](gone.md)"),
        ("README.md", "```sh\n[HTTP](docs/http.md)\n```", "```sh\n[HTTP](docs/http.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, text: str, expected: str) -> None:
    assert rewrite_links(text, page, PATHS) == expected


def test_links_to_files_lead_to_a_repository_that_is_named() -> None:
    text = rewrite_links("[the stack](../compose.yaml)", "docs/http.md", PATHS, "https://forge.example/tree/")
    assert text == "[the stack](https://forge.example/tree/compose.yaml)"


def test_text_of_the_code_is_no_markup() -> None:
    assert prose("A *list* of ``a|b``\nand <c>.") == r"A \*list\* of `a|b` and \<c>."
    assert table(("a|b",), [("`c|d`",)]).splitlines() == [r"| a\|b |", "| --- |", "| `c|d` |"]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("commands", "## trainbus checkpoints verify\n"),
        ("requests", "## train.requested.v1\n"),
        ("facts", "## run.placed.v1\n"),
        ("parts", "## RunSpec\n"),
        ("api", "## POST /training-runs\n"),
        ("api", "| `ingestion_id` | string | required |  |\n| `files` | list of string |"),
        ("settings", "| `TRAINBUS_NATS_REPLICAS` | `int`, ≥ 1, ≤ 5 | `1` | 1 embedded, 3 in a cluster. |\n"),
        ("policy", "| `skip` | `bool` | `false` | Whether a run that fits may overtake one that does not. |\n"),
        ("metrics", "| `trainbus_jobs_finished_total` | counter | `queue`, `outcome` | Long jobs ended here. |\n"),
    ],
)
def test_reference_has_what_the_code_has(page: str, text: str) -> None:
    assert text in site_sources.GENERATED[f"reference/{page}.md"]()


@pytest.mark.needs("site")
def test_site_has_every_page_with_its_text_in_the_search_index(site: Path) -> None:
    pages = {html_of(page) for page in site_pages()}
    assert [page for page in sorted(pages) if not (site / page).exists()] == []
    items = json.loads((site / "search.json").read_text())["items"]
    found = {item["location"].partition("#")[0] for item in items if item["text"]}
    assert pages - found == set()


@pytest.mark.needs("site")
def test_site_loads_nothing_from_another_host(site: Path) -> None:
    loaded: list[str] = []
    for page in site.rglob("*.html"):
        parser = LoadedAddresses()
        parser.feed(page.read_text())
        loaded += parser.addresses
    for style in site.rglob("*.css"):
        loaded += re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", style.read_text())
    assert len(loaded) > len(site_pages())
    assert [address for address in loaded if is_elsewhere(address)] == []


@pytest.mark.needs("site")
@pytest.mark.parametrize("link", ["gone.md", "scripts.md#gone"])
def test_broken_link_fails_the_build(tmp_path: Path, link: str) -> None:
    sources = tmp_path / "site-source"
    assemble(sources)
    with (sources / "http.md").open("a") as page:
        page.write(f"\n[broken]({link})\n")
    done = build(sources)
    assert done.returncode != 0
    assert f"[broken]({link})" in ANSI.sub("", done.stdout)


@pytest.mark.needs("chromium", "site")
async def test_search_answers_without_a_server(site: Path) -> None:
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed: make browser")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    requested: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = await browser.new_page()
        page.on("request", lambda request: requested.append(request.url))
        await page.goto((site / "reference" / "commands.html").as_uri())
        await page.click(".md-search__button")
        await page.locator("input[placeholder]").press_sequentially("preemption")
        await page.get_by_text(re.compile(r"^\d+ results$")).wait_for(timeout=60_000)
        await page.locator("a[href*='h=preemption']").first.click()
        await page.wait_for_url("**h=preemption**")
        await browser.close()
    assert [url for url in requested if not url.startswith("file://")] == []
