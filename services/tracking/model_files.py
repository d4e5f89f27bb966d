"""What makes the folder of a model one that MLflow loads: MLmodel, the environment, ``data/model.pth``.

MLflow loads a Task's model as ``pytorch`` and as ``python_function``. Both need trainbus where they are loaded, since
a Task is a class of it; neither torch nor the user's code is imported here.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from services.kit.kept_model import MLMODEL
from services.kit.model_folder import CODE, DESCRIPTION

DATA, PICKLED, PICKLE_MODULE_INFO = "data", "model.pth", "pickle_module_info.txt"
PICKLE_MODULE, PYFUNC_MODULE = "trainbus.pickled_model", "trainbus.pyfunc_model"
#: The layout of ``torch.save`` before it was a zip; every torch reads it.
TORCH_MAGIC, TORCH_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
PYTHON_ENV, CONDA_ENV, REQUIREMENTS = "python_env.yaml", "conda.yaml", "requirements.txt"
#: Packages whose versions decide how a model is loaded.
LOADING_PACKAGES = ("mlflow", "numpy", "safetensors")


def write_model_files(folder: Path, model_id: str, mlflow_run_id: str | None, environment: Mapping[str, str]) -> None:
    """Make the folder of a Task's model an MLflow model.

    Args:
        environment: what the run reported of its ranks: the versions of Python and torch.
    """
    from mlflow.models import Model

    torch_version = environment.get("torch", "")
    python_version = environment.get("python") or ".".join(map(str, sys.version_info[:3]))
    files = {"conda": CONDA_ENV, "virtualenv": PYTHON_ENV}
    requirements = list_requirements(folder / CODE, torch_version)
    (folder / DATA).mkdir()
    (folder / DATA / PICKLED).write_bytes(pickle_path(".."))
    (folder / DATA / PICKLE_MODULE_INFO).write_text(PICKLE_MODULE)
    _write_environment(folder, python_version, requirements)
    description: dict[str, Any] = json.loads((folder / DESCRIPTION).read_bytes())
    names = ("run_id", "name", "step", "epoch", "task", "dataset_id", "checkpoint", "manifest_sha256", "state_digest")
    model = Model(
        run_id=mlflow_run_id,
        model_id=model_id,
        model_uuid=model_id,
        metadata={f"trainbus.{name}": description[name] for name in names if description.get(name) is not None},
        model_size_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    )
    model.add_flavor("pytorch", pytorch_version=torch_version, model_data=DATA, code=None)
    model.add_flavor("python_function", loader_module=PYFUNC_MODULE, python_version=python_version, env=files)
    model.save(str(folder / MLMODEL))


def write_external_model(folder: Path, model_id: str, mlflow_run_id: str | None, uri: str) -> None:
    """Write an MLmodel that says where the model is: its files are not in MLflow."""
    from mlflow.models import Model
    from mlflow.models.model import MLFLOW_MODEL_IS_EXTERNAL

    metadata = {MLFLOW_MODEL_IS_EXTERNAL: True, "trainbus.checkpoint": uri}
    Model(run_id=mlflow_run_id, model_id=model_id, model_uuid=model_id, metadata=metadata).save(str(folder / MLMODEL))


def pickle_path(path: str) -> bytes:
    """Return a file that ``torch.load`` reads with our pickle module; its object is a path."""
    file = io.BytesIO()
    values: tuple[object, ...] = (TORCH_MAGIC, TORCH_PROTOCOL, {"little_endian": True}, path, [])
    for value in values:
        pickle.dump(value, file, protocol=2)
    return file.getvalue()


def list_requirements(code: Path, torch_version: str) -> list[str]:
    """Return what pip must install to load the model: the run's torch, ours, and what the project itself names."""
    found = [f"{name}=={version(name)}" for name in LOADING_PACKAGES if _is_installed(name)]
    if torch_version:
        # Without the build: that of another machine is another one.
        found.append(f"torch=={torch_version.partition('+')[0]}")
    found.append(f"trainbus=={version('trainbus')}" if _is_installed("trainbus") else "trainbus")
    named = {_requirement_name(each) for each in found}
    project = code / REQUIREMENTS
    if project.is_file():
        lines = (line.strip() for line in project.read_text(errors="replace").splitlines())
        # Options of pip and paths mean nothing elsewhere.
        plain = (line for line in lines if line and line[0] not in "#-./")
        found += [line for line in plain if _requirement_name(line) not in named]
    return found


def _requirement_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _write_environment(folder: Path, python_version: str, requirements: Sequence[str]) -> None:
    from mlflow.utils.yaml_utils import write_yaml

    conda = {
        "name": "mlflow-env",
        "channels": ["conda-forge"],
        "dependencies": [f"python={python_version}", "pip", {"pip": list(requirements)}],
    }
    python = {"python": python_version, "build_dependencies": ["pip"], "dependencies": [f"-r {REQUIREMENTS}"]}
    (folder / REQUIREMENTS).write_text("".join(f"{each}\n" for each in requirements))
    for name, content in ((CONDA_ENV, conda), (PYTHON_ENV, python)):
        write_yaml(str(folder), name, content, overwrite=True, sort_keys=False)
