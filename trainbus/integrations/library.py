"""The libraries that the integrations need, imported when an integration is."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def import_library(module: str, package: str, integration: str) -> ModuleType:
    """Import a module of the package that an integration needs.

    Raises:
        ModuleNotFoundError: the package is not installed; the message says what to install.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # the package is there, and lacks one of its own requirements
        raise ModuleNotFoundError(
            f"trainbus.integrations.{integration} needs the package {package}: run `pip install {package}`, and add it"
            " to the requirements of the project",
            name=error.name,
        ) from error
