"""An MLflow model in a model process, loaded by ``mlflow.pyfunc``: rows become what its signature names."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import mlflow.pyfunc
from mlflow.exceptions import MlflowException
from mlflow.types import Schema

from contracts.model_process import MLFLOW_FOLDER, ModelLaunch, Tensor
from contracts.project_paths import find_import_folders
from trainbus.model.predictor import InputError, to_tensor
from trainbus.model.pyfunc_input import to_input
from trainbus.model.pyfunc_output import name_outputs, to_array
from trainbus.task import ROW_FIELD, describe

#: How MLflow's refusal of an input begins, the cause in it, and the column that the cause is about.
SCHEMA_REFUSAL = "Failed to enforce schema"
CAUSE, COLUMN = re.compile(r"Error: (.*)", re.DOTALL), re.compile(r"column '?([^'\s]+?)'?[.,]? ")


class PyfuncPredictor:
    """A loaded MLflow model."""

    classes: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    def __init__(self, model: mlflow.pyfunc.PyFuncModel) -> None:
        self._model = model
        self._schema: Schema | None = model.metadata.get_input_schema()

    @classmethod
    def load(cls, launch: ModelLaunch) -> PyfuncPredictor:
        """Load the model of a folder. The project's modules can be imported, as where it was trained.

        Raises:
            Exception: what loading it raises.
        """
        code = launch.folder / "code"
        if code.is_dir():
            sys.path[:0] = map(str, find_import_folders(code.resolve()))
        return cls(mlflow.pyfunc.load_model(str(launch.folder / MLFLOW_FOLDER)))

    def predict(self, samples: Sequence[Mapping[str, bytes]]) -> tuple[Tensor, ...]:
        """Return the outputs for some samples, each with one row a sample. See ``Predictor.predict``."""
        rows = [json.loads(sample[ROW_FIELD]) for sample in samples]
        try:
            found = self._model.predict(to_input(rows, self._schema))
        except MlflowException as error:
            if not str(error).startswith(SCHEMA_REFUSAL):
                raise
            raise InputError([_describe_refusal(error)]) from error
        outputs = tuple(to_tensor(name, to_array(values)) for name, values in name_outputs(found, len(rows)).items())
        for each in outputs:
            if not each.shape or each.shape[0] != len(rows):
                raise ValueError(
                    f"the output {each.name!r} of the model has shape {list(each.shape)}: its first dimension must be "
                    f"the {len(rows)} rows of the batch"
                )
        return outputs


def _describe_refusal(error: MlflowException) -> dict[str, Any]:
    """Return MLflow's refusal of an input as a problem; it names no row."""
    cause = CAUSE.search(str(error))
    text = cause[1].strip() if cause is not None else describe(error)
    column = COLUMN.search(text)
    return {"row": 0, "field": column[1] if column is not None else "", "text": text}
