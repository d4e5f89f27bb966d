"""MLflow in a run: what an unmodified script logs goes through the run's journal and output folder onto its own page.

MLflow finds this by its entry points (``mlflow.tracking_store``, ``mlflow.artifact_repository``) for the address
``trainbus:``, which a command is started with. There is no server, no credential and nothing to wait for: MLflow's own
file store in the generation's folder remembers what was logged, and each value is a line of the journal besides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.tracking.file_store import FileStore

from trainbus import script

SCHEME = "trainbus"
#: Below the output folder: the artifacts of the script's runs, and its models.
ARTIFACTS = "mlflow"
_LAUNCH = "TRAINBUS_LAUNCH"
_PARENT_TAG, _NAME_TAG = "mlflow.parentRunId", "mlflow.runName"
#: The tags of MLflow that people write; the others describe the process.
_NOTE_TAG = "mlflow.note.content"


class TrainbusStore(FileStore):  # type: ignore[misc]
    """Remembers what a script logs, and reports it to the node's agent.

    The first run that the script begins is the run's page. The values of further ones, also of nested ones, are on that
    page with the name of their run before their own: ``trial-1/loss``.
    """

    def __init__(self, store_uri: str | None = None, artifact_uri: str | None = None) -> None:
        launch = os.environ.get(_LAUNCH)
        if not launch:
            raise MlflowException(
                f"the address {SCHEME}: works in a run of trainbus alone: set MLFLOW_TRACKING_URI to your MLflow, or "
                'start this script with `trainbus submit . --command "python ..."`'
            )
        # MLflow asks for it because it adds no features to this store; nothing but the script reads it.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        rank = os.environ.get("RANK", "0")
        self._reports = rank == "0"
        self._folder = Path(launch).parent / f"mlflow-{rank}"
        artifacts = script.output_dir().resolve() / ARTIFACTS if self._reports else self._folder / "artifacts"
        super().__init__(str(self._folder), f"{SCHEME}:{artifacts}")

    # -- what a script logs -------------------------------------------------

    def create_run(
        self, experiment_id: str, user_id: str, start_time: int, tags: list[RunTag], run_name: str | None
    ) -> Any:
        run = super().create_run(experiment_id, user_id, start_time, tags, run_name)
        self._report_tags(run.info.run_id, tags)
        return run

    def log_metric(self, run_id: str, metric: Metric) -> None:
        super().log_metric(run_id, metric)
        self._report_metrics(run_id, (metric,))

    def log_param(self, run_id: str, param: Param) -> None:
        super().log_param(run_id, param)
        self._report_params(run_id, (param,))

    def log_batch(self, run_id: str, metrics: list[Metric], params: list[Param], tags: list[RunTag]) -> None:
        super().log_batch(run_id, metrics, params, tags)
        self._report_params(run_id, params)
        self._report_tags(run_id, tags)
        self._report_metrics(run_id, metrics)

    def set_tag(self, run_id: str, tag: RunTag) -> None:
        super().set_tag(run_id, tag)
        self._report_tags(run_id, (tag,))

    # -- the journal --------------------------------------------------------

    def _report_metrics(self, run_id: str, metrics: Iterable[Metric]) -> None:
        prefix = self._prefix(run_id)
        groups: dict[tuple[int, int], dict[str, float]] = {}
        for metric in metrics:
            if not self._is_repeated(run_id, metric):
                values = groups.setdefault((metric.step, metric.timestamp), {})
                values[prefix + metric.key] = float(metric.value)
        for (step, timestamp_ms), values in groups.items():
            self._report(values, kind="metrics", step=step, time=timestamp_ms / 1000)

    def _is_repeated(self, run_id: str, metric: Metric) -> bool:
        """Return whether a metric was logged before: MLflow logs a run's metrics again, to link them to its model."""
        if metric.model_id is None:
            return False
        # As text, since NaN is not equal to itself.
        point = (metric.step, metric.timestamp, str(metric.value))
        known = self.get_metric_history(run_id, metric.key)
        return sum((each.step, each.timestamp, str(each.value)) == point for each in known) > 1

    def _report_params(self, run_id: str, params: Iterable[Param]) -> None:
        prefix = self._prefix(run_id)
        self._report({prefix + each.key: str(each.value) for each in params}, kind="params")

    def _report_tags(self, run_id: str, tags: Iterable[RunTag]) -> None:
        shown = {each.key: str(each.value) for each in tags or () if _is_shown(each.key)}
        if shown and not self._prefix(run_id):
            self._report(shown, kind="tags")

    def _report(self, values: dict[str, Any], **line: Any) -> None:
        if values and self._reports:
            script.append_line({**line, "values": values})

    # -- the script's runs --------------------------------------------------

    def _prefix(self, run_id: str) -> str:
        """Return what stands before the names of a run's values; nothing for the run that is the page."""
        path = self._folder / "page"
        try:
            with path.open("x") as file:
                file.write(run_id)
        except FileExistsError:
            if path.read_text() != run_id:
                tags = self.get_all_tags(run_id)
                name = next((tag.value for tag in tags if tag.key == _NAME_TAG), run_id)
                return f"{_clean(name)}/"
        return ""

    def _get_artifact_dir(self, experiment_id: str, run_uuid: str) -> str:
        """Return where a run's artifacts lie: those of the page at the top."""
        if (self._folder / "page").exists() and (self._folder / "page").read_text() != run_uuid:
            return f"{self.artifact_root_uri}/{run_uuid}"
        return str(self.artifact_root_uri)


def _is_shown(key: str) -> bool:
    return key == _NOTE_TAG or not key.startswith(("mlflow.", "trainbus."))


def _clean(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


class OutputArtifactRepository(LocalArtifactRepository):  # type: ignore[misc]
    """Artifacts of a script's runs in the run's output folder, each one an artifact of the run."""

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        super().__init__(artifact_uri.removeprefix(f"{SCHEME}:"), tracking_uri, registry_uri)

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        super().log_artifact(local_file, artifact_path)
        self._report(Path(self._artifact_dir, artifact_path or "", os.path.basename(local_file)))

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        super().log_artifacts(local_dir, artifact_path)
        for root, _, names in os.walk(local_dir):
            folder = Path(self._artifact_dir, artifact_path or "", os.path.relpath(root, local_dir))
            for name in names:
                self._report(folder / name)

    def _report(self, path: Path) -> None:
        """Make a file an artifact of the run. The files of a model are kept with the run as a whole."""
        outputs = script.output_dir().resolve()
        name = Path(os.path.normpath(path))
        if name.is_relative_to(outputs) and "models" not in name.relative_to(outputs).parts[:3]:
            script.append_line({"kind": "artifact", "path": name.relative_to(outputs).as_posix()})


__all__ = ["OutputArtifactRepository", "TrainbusStore"]
