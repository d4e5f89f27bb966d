"""Draw docs/pictures/architecture.svg from the imports of the code: ``python -m tests.architecture``."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"
PACKAGES = ("contracts", "services", "trainbus")
WIDTH, ROW, BOX, MARGIN, GAP, COLUMNS = 980, 108, 78, 20, 28, 5
#: Width of a character of the small text, about.
CHARACTER = 6
#: x, y, width, height in pixels.
Box = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Component:
    """A part of the code: the packages that belong to it, and what a reader must know of it."""

    title: str
    text: str
    packages: tuple[str, ...]
    #: Column, row, columns, rows in the picture.
    place: tuple[int, int, int, int]
    fill: str = "#f6f8fa"


TRAINING = tuple(
    f"trainbus.{path.stem}"
    for path in sorted((ROOT / "trainbus").iterdir())
    if path.stem not in ("__init__", "__main__", "__pycache__", "client", "commands", "embedded", "operate", "py")
    and (path.suffix == ".py" or (path / "__init__.py").exists())
)
COMPONENTS = (
    Component(
        "trainbus/commands", "the command line: parse, call the client, print", ("trainbus.commands",), (0, 0, 3, 1)
    ),
    Component("trainbus/operate", "an operator's questions to the log", ("trainbus.operate",), (0, 1, 3, 1)),
    Component("trainbus/client", "what other Python code imports: Client", ("trainbus.client",), (0, 2, 3, 1)),
    Component(
        "trainbus/embedded", "the stack on one machine: supervisor, servers", ("trainbus.embedded",), (0, 3, 3, 1)
    ),
    Component("services/<name>", "ten services; none imports another", (), (0, 4, 3, 1), "#ddf4e4"),
    Component(
        "trainbus (training)", "Task, Trainer, data: the user's process, no bus", TRAINING, (3, 2, 2, 1), "#fff4d6"
    ),
    Component("services/kit", "bus, store, leases, jobs, telemetry", ("services.kit",), (0, 5, 3, 1), "#ddf4e4"),
    Component(
        "contracts", "events, subjects, topology, state: pydantic only, no I/O", ("contracts",), (0, 6, 5, 1), "#ddeaf7"
    ),
)
SERVICES, CONTRACTS = COMPONENTS[4], COMPONENTS[7]


def component_of(module: str) -> Component | None:
    """Return the component that a module belongs to; None for a package's own ``__init__`` and ``__main__``."""
    for component in COMPONENTS:
        if any(module == package or module.startswith(package + ".") for package in component.packages):
            return component
    return SERVICES if module.startswith("services.") else None


def component_imports() -> dict[Component, set[Component]]:
    """Return which components each component imports, lazily or not."""
    graph = grimp.build_graph(*PACKAGES)
    found: dict[Component, set[Component]] = {component: set() for component in COMPONENTS}
    for module in graph.modules:
        importer = component_of(module)
        for imported in graph.find_modules_directly_imported_by(module):
            target = component_of(imported)
            if importer is not None and target is not None and target is not importer:
                found[importer].add(target)
    return found


def component_levels(edges: dict[Component, set[Component]]) -> dict[Component, int]:
    """Return each component's floor: one above the highest component that it imports. Raise on a circle."""
    found: dict[Component, int] = {}

    def level(component: Component, path: tuple[Component, ...]) -> int:
        if component in path:
            raise ValueError("these import each other: " + ", ".join(each.title for each in path))
        if component not in found:
            found[component] = 1 + max((level(target, (*path, component)) for target in edges[component]), default=-1)
        return found[component]

    for component in COMPONENTS:
        level(component, ())
    return found


def reduce_transitively(edges: dict[Component, set[Component]]) -> list[tuple[Component, Component]]:
    """Return the imports that do not follow from others (the transitive reduction)."""

    def reachable(component: Component) -> set[Component]:
        return edges[component] | {far for target in edges[component] for far in reachable(target)}

    return [
        (component, target)
        for component in COMPONENTS
        for target in COMPONENTS
        if target in edges[component] and not any(target in reachable(other) for other in edges[component] - {target})
    ]


def draw() -> str:
    """Return the picture as SVG: a floor for each level of imports, an arrow for each import that says more."""
    edges = component_imports()
    floors = component_levels(edges)
    if floors[CONTRACTS]:
        raise ValueError(f"{CONTRACTS.title} imports another component")
    boxes = {component: _box(component.place) for component in COMPONENTS}
    height = max(y + box_height for _, y, _, box_height in boxes.values()) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="13" '
        'font-family="ui-sans-serif, system-ui, sans-serif">',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 10 5 0 10z" fill="#57606a"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for component, target in reduce_transitively(edges):
        parts.append(_arrow(boxes[component], boxes[target]))
    for component, (x, y, width, box_height) in boxes.items():
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{box_height}" rx="8" '
            f'fill="{component.fill}" stroke="#57606a"/>'
        )
        lines = [component.text, *textwrap.wrap(", ".join(_children(component)), width=width // CHARACTER)]
        parts.append(f'<text x="{x + 14:.0f}" y="{y + 22:.0f}" font-weight="600">{escape(component.title)}</text>')
        for number, line in enumerate(lines):
            parts.append(
                f'<text x="{x + 14:.0f}" y="{y + 40 + 15 * number:.0f}" font-size="11" fill="#57606a">'
                f"{escape(line)}</text>"
            )
    return "\n".join([*parts, "</svg>", ""])


def _box(place: tuple[int, int, int, int]) -> Box:
    """Return x, y, width and height in pixels of a place in the grid: column, row, columns, rows."""
    column, row, columns, rows = place
    pitch = (WIDTH - 2 * MARGIN + GAP) // COLUMNS
    return MARGIN + column * pitch, MARGIN + row * ROW, columns * pitch - GAP, rows * ROW - (ROW - BOX)


def _arrow(start: Box, end: Box) -> str:
    """Return a line from box to box: straight down where one is above the other, else to the side."""
    (x, y, width, height), (to_x, to_y, to_width, to_height) = start, end
    left, right = max(x, to_x), min(x + width, to_x + to_width)
    if left < right:
        line = ((left + right) // 2, y + height, (left + right) // 2, to_y)
    else:
        middle = (max(y, to_y) + min(y + height, to_y + to_height)) // 2
        line = (x + width, middle, to_x, middle)
    return '<line x1="{}" y1="{}" x2="{}" y2="{}" stroke="#57606a" stroke-width="1.6" marker-end="url(#head)"/>'.format(
        *line
    )


def _children(component: Component) -> list[str]:
    """Return the names of the packages and modules that the component is made of."""
    if len(component.packages) > 1:
        return [package.removeprefix("trainbus.") for package in component.packages]
    folder = ROOT.joinpath(*(component.packages[0] if component.packages else "services").split("."))
    names = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return sorted(name for name in names if not name.startswith("_") and name != "kit")


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(f"wrote {PICTURE.relative_to(ROOT)}")
