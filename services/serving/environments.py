"""The packages that a model was trained with, for its processes: its run's, or what MLflow wrote down beside it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from contracts.ranks import PACKAGES_DIR_VARIABLE
from contracts.spec.run import Packages
from services.kit.model_folder import CODE
from services.kit.packages.package_environment import PackageEnvironments, find_requirements
from services.serving.model_source import FetchedModel


@dataclass(frozen=True, slots=True)
class ModelEnvironments:
    """Installs the packages of models; equal ones once."""

    packages: PackageEnvironments

    async def prepare(self, fetched: FetchedModel) -> dict[str, str]:
        """Return the environment variables of a model's processes, once their packages are installed.

        Raises:
            PackagesError: the packages cannot be had.
            TransientError: the object store does not answer.
            OSError: the disk is full.
        """
        folder, spec = fetched.folder, fetched.spec
        code, asked = folder / CODE, spec.packages
        if fetched.mlflow_folder is not None and not await asyncio.to_thread(_asks_for_packages, fetched):
            # The run had the packages of its node, and MLflow has written down which ones the model needs.
            code, asked = fetched.mlflow_folder, Packages(torch=asked.torch)
        installed = await self.packages.prepare(code, folder, asked, is_task=spec.task is not None)
        return dict(spec.env) if installed is None else {**spec.env, PACKAGES_DIR_VARIABLE: str(installed)}


def _asks_for_packages(fetched: FetchedModel) -> bool:
    return fetched.spec.packages.source == "project" and find_requirements(fetched.folder / CODE) is not None
