"""The reference of the services' settings and of the scheduler's policy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from pydantic import BaseModel

import services
from contracts.scheduling import Policy
from docs.site.markdown import code, field_rows, models_in, own_doc, table, type_text
from services.kit.settings import Settings

HEAD = ("type", "default", "")


def settings() -> str:
    """Return the page of every setting of every service."""
    prefix = str(Settings.model_config["env_prefix"])
    sections = [
        "# Settings\n\nEvery setting is an environment variable, or a line in the file `.env` of the folder in which a "
        "service starts. Lists and objects are JSON.\n"
    ]
    for title, model in _settings_classes():
        own = [name for name in model.model_fields if name in model.__annotations__]
        rows = field_rows(model, own, lambda annotation: code(type_text(annotation)))
        named = ((code(f"{prefix}{name.upper()}"), *rest) for name, *rest in rows)
        sections.append(f"## {title}\n\n{own_doc(model)}\n\n{table(('variable', *HEAD), named)}")
    return "\n".join(sections)


def _settings_classes() -> Iterator[tuple[str, type[Settings]]]:
    """Yield what all services share, then the settings of each service that has some of its own."""
    yield "All services", Settings
    for folder in sorted(Path(services.__path__[0]).iterdir()):
        name = f"services.{folder.name}.settings"
        if not (folder / "app.py").exists():
            continue
        module = import_module(name if importlib.util.find_spec(name) else f"services.{folder.name}.app")
        own = [item for item in vars(module).values() if isinstance(item, type) and item.__module__ == module.__name__]
        yield from ((folder.name, item) for item in own if issubclass(item, Settings))


def policy() -> str:
    """Return the page of the policy: each section with its fields."""
    introduction = (
        "# Policy\n\nWhat `trainbus policy adopt` takes: a file of these sections, each field with the default that it "
        "has when it is left out. [The scheduler](../scheduler.md) explains how they act.\n"
    )
    return "\n".join([introduction, *_sections("", Policy)])


def _sections(path: str, model: type[BaseModel]) -> Iterator[str]:
    rows = field_rows(model, model.model_fields, lambda annotation: code(type_text(annotation)))
    named = ((code(name), *rest) for name, *rest in rows)
    title = code(path) if path else "The whole"
    yield f"## {title}\n\n{own_doc(model)}\n\n{table(('field', *HEAD), named)}"
    for name, field in model.model_fields.items():
        for part in models_in(field.annotation):
            yield from _sections(f"{path}.{name}".lstrip("."), part)
