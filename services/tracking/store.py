"""MLflow, blocking, one call at a time. Its many errors become three: TrackingUnavailable, TrackingRefused, PageLost.

Everything here may be called again with the same arguments and then changes nothing. mlflow is imported on
first use: that takes seconds and 200 MB.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from contracts.events.model import ModelPromoted
from services.tracking import metrics
from services.tracking.core import describe
from services.tracking.core.points import Point
from services.tracking.core.registry import CHAMPION, AliasTarget

log = structlog.get_logger(__name__)

SQLITE = "sqlite:///"
#: How MLflow's client is to behave in this process. The retries are ours: its own take minutes.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
}
#: Codes of MLflow for a call that can never succeed.
FINAL = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE"}
#: Modules whose errors mean that MLflow, its database or its artifact store does not answer.
REMOTE_ERRORS = ("requests", "urllib3", "sqlalchemy", "boto3", "botocore", "s3transfer")
#: Seconds without an answer to a file: the server may pass it on to a store before it answers.
UPLOAD_TIMEOUT_S = 600
EVENT_ID = "trainbus.event_id"
#: What runs go to that name no experiment. MLflow begins with one of its own, of the same name with a capital.
DEFAULT_EXPERIMENT = "default"
#: MLflow opens an experiment of this kind at its runs, another one at the traces of language models.
KIND, TRAINING_KIND = "mlflow.experimentKind", "custom_model_development"
MODEL_VERSIONS = "mlflow.modelVersions"
CHAMPION_VERSION = "trainbus.champion_version"
#: Numbers of versions that are passed over to reach a promotion's own.
MAX_FILLED_NUMBERS = 1000
#: Tables of MLflow's database that have one row before anything is tracked.
MADE_WITH_A_ROW = {"alembic_version", "experiments", "workspaces"}


class TrackingUnavailable(Exception):
    """MLflow does not answer, or answers that it cannot now.

    ``unclear``: this call may also be one that can never succeed; MLflow's error is the same for both.
    """

    def __init__(self, text: str, *, unclear: bool = False) -> None:
        super().__init__(text)
        self.unclear = unclear


class TrackingRefused(Exception):
    """MLflow will never take this."""


class PageLost(Exception):
    """A page no longer exists: it was deleted, or the database is another one."""


@dataclass(frozen=True, slots=True)
class Page:
    """A run's page in MLflow."""

    mlflow_run_id: str
    experiment_id: str
    status: str
    deleted: bool
    tags: Mapping[str, str]
    params: Set[str]
    #: The highest step logged of each metric.
    heads: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LoggedModel:
    """A checkpoint's model in MLflow."""

    model_id: str
    location: str
    tags: Mapping[str, str]

    @property
    def has_files(self) -> bool:
        """Whether MLflow has its files, so that it can be loaded."""
        return self.tags.get(describe.MODEL_FILES) == describe.FILES_LOGGED


@dataclass(frozen=True, slots=True)
class AliasChange:
    """An alias that names one version of a model and is to name another one; None: no version."""

    alias: str
    present: str | None
    version: str | None


def import_mlflow() -> None:
    """Import mlflow with the settings and the quiet it needs here."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    import mlflow
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


class Store:
    """One MLflow: a server by URL, or a database that this process writes itself."""

    def __init__(self, uri: str, artifact_location: str | None) -> None:
        self.uri, self._artifact_location = uri, artifact_location
        self._client: Any = None
        self._experiments: dict[str, str] = {}

    # -- life ---------------------------------------------------------------

    def open(self) -> None:
        """Import mlflow and reach the store, making its database if there is none."""
        if self._client is not None:
            return
        with self._translate_errors("open"):
            import_mlflow()
            from mlflow import MlflowClient

            if self.uri.startswith(SQLITE):
                _make_database(Path(self.uri.removeprefix(SQLITE)), self._artifact_location)
            client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
            client.search_experiments(max_results=1)
            self._client = client

    @property
    def _mlflow(self) -> Any:
        self.open()
        return self._client

    def answers(self) -> bool:
        """Whether MLflow can do the simplest thing."""
        try:
            with self._translate_errors("probe"):
                self._mlflow.search_experiments(max_results=1)
        except (TrackingUnavailable, TrackingRefused, PageLost):
            return False
        return True

    def forget(self) -> None:
        """Drop what is remembered of MLflow's content."""
        self._experiments.clear()

    @contextmanager
    def _translate_errors(self, operation: str) -> Iterator[None]:
        with metrics.CALL_SECONDS.labels(operation).time():
            try:
                yield
            except (OSError, sqlite3.Error) as error:
                raise TrackingUnavailable(f"{operation}: {error!r}") from error
            except Exception as error:
                code = getattr(error, "error_code", None)
                if code is None and not type(error).__module__.startswith(REMOTE_ERRORS):
                    raise
                text = f"{operation}: MLflow says {code}: {error}"
                if code == "RESOURCE_DOES_NOT_EXIST":
                    raise PageLost(text) from error
                if code in FINAL:
                    raise TrackingRefused(text) from error
                raise TrackingUnavailable(text, unclear=code == "INTERNAL_ERROR") from error

    # -- runs ---------------------------------------------------------------

    def find(self, experiment: str, run_id: str, attempt: int) -> Page | None:
        """The page of one attempt of a run, deleted ones included: they are not made again."""
        with self._translate_errors("find_run"):
            from mlflow.entities import ViewType

            experiment_id = self._experiment(experiment)
            wanted = f"tags.`{describe.RUN_ID}` = '{run_id}' and tags.`{describe.ATTEMPT}` = '{attempt}'"
            # The oldest: should two have been made, every caller takes the same one. A call of an instance that was
            # cut off may arrive after its successor's.
            order = ["attributes.start_time ASC", "attributes.run_id ASC"]
            found = self._mlflow.search_runs([experiment_id], wanted, ViewType.ALL, max_results=10, order_by=order)
            for second in found[1:]:
                if second.info.lifecycle_stage != "deleted":
                    self._mlflow.set_tag(second.info.run_id, describe.DUPLICATE_OF, found[0].info.run_id)
                    self._mlflow.delete_run(second.info.run_id)
            return _page(found[0]) if found else None

    def create(self, experiment: str, name: str, start_ms: int, tags: Mapping[str, str]) -> Page:
        """Create a page with its tags in one step, so that they find it again after a crash."""
        with self._translate_errors("create_run"):
            experiment_id = self._experiment(experiment)
            first = dict(list(tags.items())[: describe.MAX_PARAMS_PER_CALL])
            return _page(self._mlflow.create_run(experiment_id, start_ms, first, name))

    def live(self) -> list[str]:
        """Return the run ids of the commands whose pages are running."""
        with self._translate_errors("find_live"):
            experiments = [each.experiment_id for each in self._pages(self._mlflow.search_experiments)]
            wanted = f"tags.`{describe.LIVE}` = 'true' and attributes.status = 'RUNNING'"
            found: list[Any] = []
            for start in range(0, len(experiments), 100):
                found += self._pages(self._mlflow.search_runs, experiments[start : start + 100], wanted)
            return [run.data.tags[describe.RUN_ID] for run in found]

    def log_params(self, mlflow_run_id: str, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        self._log_texts(mlflow_run_id, "params", Param, params)

    def log_tags(self, mlflow_run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._log_texts(mlflow_run_id, "tags", RunTag, tags)

    def _log_texts(self, mlflow_run_id: str, kind: str, entity: Callable[..., Any], texts: Mapping[str, str]) -> None:
        sized = ((describe.json_bytes(*text), entity(*text)) for text in texts.items())
        for chunk in describe.chunks(sized, describe.MAX_PARAMS_PER_CALL):
            with self._translate_errors(f"log_{kind}"):
                self._mlflow.log_batch(mlflow_run_id, **{kind: chunk})

    def log_points(self, mlflow_run_id: str, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        sized = (
            (describe.json_bytes(point.key), Metric(point.key, point.value, point.timestamp_ms, point.step))
            for point in points
        )
        for chunk in describe.chunks(sized, describe.MAX_METRICS_PER_CALL):
            with self._translate_errors("log_metrics"):
                self._mlflow.log_batch(mlflow_run_id, metrics=chunk)
            metrics.POINTS.inc(len(chunk))

    def log_dataset(self, mlflow_run_id: str, name: str, dataset_id: str, manifest_uri: str, profile: str) -> None:
        """Note the dataset as the run's input."""
        with self._translate_errors("log_dataset"):
            from mlflow.entities import Dataset, DatasetInput, InputTag

            dataset = Dataset(name=name, digest=dataset_id[:36], source_type="s3", source=manifest_uri, profile=profile)
            entry = DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
            self._mlflow.log_inputs(mlflow_run_id, datasets=[entry])

    def log_file(self, mlflow_run_id: str, path: Path, folder: str) -> None:
        with self._translate_errors("log_file"):
            self._mlflow.log_artifact(mlflow_run_id, str(path), folder or None)

    def end(self, mlflow_run_id: str, status: str, end_ms: int) -> None:
        with self._translate_errors("end_run"):
            self._mlflow.set_terminated(mlflow_run_id, status, end_ms)

    def _experiment(self, name: str) -> str:
        if name not in self._experiments:
            found = self._find_experiment(name)
            if found is None:
                location = f"{self._artifact_location}/{name}" if self._artifact_location else None
                try:
                    self._experiments[name] = self._mlflow.create_experiment(name, location, {KIND: TRAINING_KIND})
                    return self._experiments[name]
                except Exception as error:
                    if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                        raise
                    found = self._mlflow.get_experiment_by_name(name)
            if found.lifecycle_stage == "deleted":
                # A run asks for it by name, and MLflow keeps a deleted experiment's name taken.
                self._mlflow.restore_experiment(found.experiment_id)
            if KIND not in found.tags:
                self._mlflow.set_experiment_tag(found.experiment_id, KIND, TRAINING_KIND)
            self._experiments[name] = found.experiment_id
        return self._experiments[name]

    def _find_experiment(self, name: str) -> Any:
        """Return an experiment or None. The default one is MLflow's own, so that no second one is made beside it."""
        found = self._mlflow.get_experiment_by_name(name)
        if found is None and name == DEFAULT_EXPERIMENT:
            found = self._mlflow.get_experiment_by_name(DEFAULT_EXPERIMENT.capitalize())
        return found

    def _pages(self, search: Any, *args: Any) -> list[Any]:
        found, token = [], None
        while True:
            page = search(*args, page_token=token)
            found += page
            token = page.token
            if not token:
                return found

    # -- models -------------------------------------------------------------

    def open_model(
        self,
        experiment: str,
        name: str,
        mlflow_run_id: str | None,
        tags: Mapping[str, str],
        params: Mapping[str, str],
    ) -> LoggedModel:
        """Return the logged model of the checkpoint that ``tags`` name, making one if there is none."""
        with self._translate_errors("open_model"):
            experiment_id = self._experiment(experiment)
            wanted = f"tags.`{describe.CHECKPOINT_URI}` = '{tags[describe.CHECKPOINT_URI]}'"
            oldest = [{"field_name": "creation_timestamp", "ascending": True}]
            found = self._mlflow.search_logged_models([experiment_id], wanted, max_results=1, order_by=oldest)
            if found:
                return _logged_model(found[0])
            made = self._mlflow.create_logged_model(experiment_id, name, mlflow_run_id, dict(tags), dict(params))
            return _logged_model(made)

    def log_model_files(self, model: LoggedModel, folder: Path) -> None:
        """Put the files of a folder into the logged model, then mark it as whole. Files that are there are replaced."""
        with self._translate_errors("log_model_files"):
            with _request_timeout(UPLOAD_TIMEOUT_S):
                self._mlflow.log_model_artifacts(model.model_id, str(folder))
            self._mlflow.set_logged_model_tags(model.model_id, {describe.MODEL_FILES: describe.FILES_LOGGED})
            self._mlflow.finalize_logged_model(model.model_id, "READY")

    # -- registry -----------------------------------------------------------

    def promote(
        self,
        promotion: ModelPromoted,
        mlflow_run_id: str | None,
        tags: Mapping[str, str],
        files: LoggedModel | None,
    ) -> None:
        """Make the registry show this champion, unless it already shows a later one."""
        with self._translate_errors("promote"):
            model = self._model(promotion.model)
            version = str(self._version(promotion, mlflow_run_id, tags, files))
            if promotion.version < int(model.tags.get(CHAMPION_VERSION, 0)):
                return
            # The alias first: a crash in between sets it again to the same, and never goes back.
            self._mlflow.set_registered_model_alias(promotion.model, CHAMPION, version)
            self._mlflow.set_registered_model_tag(promotion.model, CHAMPION_VERSION, str(promotion.version))

    def find_highest_version(self, name: str) -> int:
        """Return the highest number of a version that was ever promoted here, or is there; 0: none."""
        with self._translate_errors("find_highest_version"):
            model = self._model(name)
            # Somebody may have deleted the last one, whose number MLflow does not give again.
            promoted = int(model.tags.get(CHAMPION_VERSION, 0))
            return max([promoted, *(int(each.version) for each in self._versions(name))])

    def compare_aliases(self, name: str, wanted: Mapping[str, AliasTarget], removed: Set[str]) -> list[AliasChange]:
        """Return which aliases of a model must change to be as wanted. Aliases that nobody requested here stay."""
        with self._translate_errors("compare_aliases"):
            try:
                found = dict(self._mlflow.get_registered_model(name).aliases)
            except Exception as error:
                if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return []
            known = self._versions(name)
            changes = [AliasChange(alias, str(found[alias]), None) for alias in sorted(removed & found.keys())]
            for alias, target in sorted(wanted.items()):
                version = _find_version(known, target)
                present = str(found[alias]) if alias in found else None
                if version is not None and present != version:
                    changes.append(AliasChange(alias, present, version))
            return changes

    def change_aliases(self, name: str, changes: Sequence[AliasChange]) -> None:
        """Make aliases of a model name other versions."""
        with self._translate_errors("change_aliases"):
            for change in changes:
                if change.version is None:
                    self._mlflow.delete_registered_model_alias(name, change.alias)
                else:
                    self._mlflow.set_registered_model_alias(name, change.alias, change.version)

    def _model(self, name: str) -> Any:
        try:
            return self._mlflow.get_registered_model(name)
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
        try:
            return self._mlflow.create_registered_model(name)
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                raise
            return self._mlflow.get_registered_model(name)

    def _versions(self, name: str) -> list[Any]:
        return self._pages(self._mlflow.search_model_versions, f"name = '{name}'")

    def _version(
        self,
        promotion: ModelPromoted,
        mlflow_run_id: str | None,
        tags: Mapping[str, str],
        files: LoggedModel | None,
    ) -> int:
        """Return the number of this promotion's version in MLflow: the promotion's own, unless that is taken."""
        known = self._versions(promotion.model)
        own = [int(each.version) for each in known if each.tags.get(EVENT_ID) == promotion.event_id]
        highest = max((int(each.version) for each in known), default=0)
        if promotion.version - highest > MAX_FILLED_NUMBERS:
            raise TrackingRefused(
                f"MLflow's highest version of {promotion.model!r} is {highest}, too far below {promotion.version}: "
                "`trainbus replay tracking` fills an empty MLflow"
            )
        # MLflow counts up by one, and over deleted versions. Those that fill a gap go once the last is there, since a
        # store that does not count them would give their numbers again.
        while not own or max(own) < promotion.version:
            own.append(self._create_version(promotion, mlflow_run_id, tags, files))
        number = max(own)
        for filler in sorted(set(own) - {number}):
            self._mlflow.delete_model_version(promotion.model, str(filler))
        if files is not None and self.uri.startswith(SQLITE):
            self._link_version(files, promotion.model, number)
        if number != promotion.version:
            self._note_other_number(promotion, number)
        return number

    def _create_version(
        self,
        promotion: ModelPromoted,
        mlflow_run_id: str | None,
        tags: Mapping[str, str],
        files: LoggedModel | None,
    ) -> int:
        made = self._mlflow.create_model_version(
            promotion.model,
            files.location if files else promotion.checkpoint_uri,
            mlflow_run_id,
            tags={**tags, EVENT_ID: promotion.event_id},
            await_creation_for=0,
            # A server checks by it that the files may be named; a database takes the run alone.
            model_id=files.model_id if files and not self.uri.startswith(SQLITE) else None,
        )
        return int(made.version)

    def _link_version(self, files: LoggedModel, name: str, number: int) -> None:
        """Link the logged model's page to a version, as a server does by itself."""
        linked = json.loads(files.tags.get(MODEL_VERSIONS, "[]"))
        link = {"name": name, "version": number}
        if link not in linked:
            self._mlflow.set_logged_model_tags(files.model_id, {MODEL_VERSIONS: json.dumps([*linked, link])})

    def _note_other_number(self, promotion: ModelPromoted, number: int) -> None:
        """Say on the version and in the log, once, that MLflow's number of it is not trainbus's."""
        description = (
            f"This is version {promotion.version} of {promotion.model!r} in trainbus. MLflow's number is {number}, "
            f"since it had given {promotion.version} away: versions are made by promotions, and not by register_model."
        )
        if self._mlflow.get_model_version(promotion.model, str(number)).description == description:
            return
        log.warning(
            "MLflow has another number for a version: load it by the alias, or by MLflow's number",
            model=promotion.model,
            version=promotion.version,
            mlflow_version=number,
        )
        self._mlflow.update_model_version(promotion.model, str(number), description)


def _page(run: Any) -> Page:
    return Page(
        run.info.run_id,
        run.info.experiment_id,
        run.info.status,
        run.info.lifecycle_stage == "deleted",
        dict(run.data.tags),
        set(run.data.params),
        {metric.key: metric.step for metric in run.data._metric_objs},
    )


def _find_version(known: Sequence[Any], target: AliasTarget) -> str | None:
    """Return MLflow's number of a version; of one that an earlier trainbus brought back, that of its first time."""
    uri = target.checkpoint_uri
    same = [each for each in known if uri in (each.source, each.tags.get(describe.CHECKPOINT_URI))]
    exact = [each for each in same if each.tags.get(describe.VERSION) == str(target.version)]
    found = max(exact or same, key=lambda each: int(each.version), default=None)
    return None if found is None else str(found.version)


def _logged_model(model: Any) -> LoggedModel:
    return LoggedModel(model.model_id, model.artifact_location, dict(model.tags))


@contextmanager
def _request_timeout(seconds: int) -> Iterator[None]:
    """Wait this long for MLflow's answers inside the block."""
    name = "MLFLOW_HTTP_REQUEST_TIMEOUT"
    before = os.environ.get(name)
    os.environ[name] = str(seconds)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _make_database(path: Path, artifact_location: str | None) -> None:
    """Make a new database beside ``path`` and move it there whole.

    MLflow's migrations take seconds and are no transaction: killed in between, they leave a database that
    opens never again. Whoever opens the address early, a notebook or ``mlflow ui``, begins one of its own there.

    Raises:
        sqlite3.OperationalError: somebody is writing there now.
    """
    if path.exists():
        with closing(sqlite3.connect(path)) as present:
            if _is_made(present):
                return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(parents=True, exist_ok=True)
    for left_over in path.parent.glob(f".{path.name}.new-*"):
        left_over.unlink()
    new = path.with_name(f".{path.name}.new-{os.getpid()}")
    store = SqlAlchemyStore(f"{SQLITE}{new}", artifact_location or str(path.parent / "mlflow-artifacts"))
    store._dispose_engine()
    # Readers (`trainbus ui`) then do not hold up the writer.
    with closing(sqlite3.connect(new)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    # The lock keeps everybody's journal away from the file that comes here, SQLite its journals of earlier ones.
    # Who has the file open that goes is told so by SQLite at the next write.
    with closing(sqlite3.connect(path, isolation_level=None)) as present:
        present.execute("BEGIN EXCLUSIVE")
        if _is_made(present):
            new.unlink()
        else:
            new.replace(path)


def _is_made(database: sqlite3.Connection) -> bool:
    """Whether this is a whole database, or one with something in it: one that is not to be replaced."""
    if database.execute("PRAGMA journal_mode").fetchone() == ("wal",):
        return True  # Made here.
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    rows = {name: database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables}  # noqa: S608
    if any(count > (name in MADE_WITH_A_ROW) for name, count in rows.items()):
        return True
    if not rows.get("alembic_version"):
        return False
    # Reads MLflow's migrations, which takes longer than anybody is to meet an empty file under its lock.
    from mlflow.store.db.utils import _get_latest_schema_revision

    return database.execute("SELECT * FROM alembic_version").fetchall() == [(_get_latest_schema_revision(),)]
