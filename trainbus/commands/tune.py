"""``trainbus tune``: search for hyper-parameters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack, cast

import typer

from contracts import subjects
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.client.submit_options import SubmitOptions
from trainbus.commands import render, submit_flags
from trainbus.commands.options import Json, command, flags_of

if TYPE_CHECKING:
    from contracts.state.study import Study, Trial
    from trainbus.client.client import AsyncClient


class DefaultCommandGroup(typer.core.TyperGroup):
    """A group whose first argument may be left out: ``trainbus tune FILE`` is ``trainbus tune run FILE``."""

    default = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="tune",
    cls=DefaultCommandGroup,
    no_args_is_help=True,
    help="Search for hyper-parameters: `trainbus tune PROJECT TASK --space ...`, or `trainbus tune FILE`.",
)
#: The study's id has an older flag beside that of ``submit``.
TUNE_FLAGS = {"event_id": (str, "--id --event-id")}
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="Id of a study, its beginning, or the study's name.")]


@command(
    app,
    options=flags_of(SubmitOptions, {**submit_flags.SUBMIT_FLAGS, **TUNE_FLAGS}),
    announce=submit_flags.print_check,
    context_settings={"allow_extra_args": True},
)
async def run(
    client: AsyncClient,
    context: typer.Context,
    code: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PROJECT | FILE]",
            help="The folder with the code; or the body of a tune.requested (JSON), which flags override.",
        ),
    ] = None,
    task: Annotated[str | None, typer.Argument(help="What a trial trains, module:Class. Or give --command.")] = None,
    project: Annotated[Path | None, typer.Option("--project", help="The folder with the code, beside FILE.")] = None,
    task_flag: Annotated[str | None, typer.Option("--task", help="The same as TASK.")] = None,
    space: Annotated[
        list[str] | None,
        typer.Option("--space", "-s", help="lr=1e-5..1e-2:log, batch=32,64,128 or warmup=100..2000; repeatable."),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="What is optimised: validation/loss:min; repeatable.")
    ] = None,
    trials: Annotated[int | None, typer.Option("--trials", min=1, help="How many trials; default: 20.")] = None,
    parallel: Annotated[int | None, typer.Option("--parallel", min=1, help="Trials at a time; default: 2.")] = None,
    epochs_param: Annotated[
        str | None, typer.Option("--epochs-param", help="The parameter of a script that is its number of epochs.")
    ] = None,
    sampler: Annotated[str | None, typer.Option("--sampler", help="tpe, gp, cmaes, random or grid.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the sampler.")] = None,
    pruning: Annotated[
        str | None, typer.Option("--pruning", help="none, median, asha, hyperband or extrapolation.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print what happens until the study ends.")] = False,
    as_json: Json = False,
    **options: Unpack[SubmitOptions],
) -> int | None:
    """Begin a study: `trainbus tune ./project task:MyTask --space lr=1e-5..1e-2:log`, or `trainbus tune study.json`.

    Every option of `trainbus submit` is an option of the trials.
    """
    from trainbus.client import studies
    from trainbus.client.capacity import PATIENCE_S, find_shortage
    from trainbus.client.runs import find_rejection

    submit_flags.parse_options(options, context.args)
    file, project = _split_code(code, project)
    if task is not None and task_flag is not None:
        raise UsageError("give the task once: by its place, or with --task")
    body = studies.read_study_file(file) if file is not None else {}
    if (request := options.pop("request", None)) is not None:
        body["run"] = {**studies.read_study_file(cast(Path, request)), **(body.get("run") or {})}
    if space:
        body["space"] = {**(body.get("space") or {}), **dict(map(studies.parse_parameter, space))}
    if not body.get("space"):
        raise UsageError("say what to search: a file with a 'space', or --space lr=1e-5..1e-2:log")
    if metric:
        body["objectives"] = [studies.parse_objective(text) for text in metric]
    given = {"name": options.pop("name", None), "trials": trials, "parallel": parallel, "epochs_param": epochs_param}
    body |= {field: value for field, value in given.items() if value is not None}
    for part, field, value in (("sampler", "name", sampler), ("sampler", "seed", seed), ("pruning", "name", pruning)):
        if value is not None:
            body[part] = {**(body.get(part) or {}), field: value}
    is_script = options.get("command") is not None or (body.get("run") or {}).get("command")
    # A script's epochs are the study's: they end a trial, and reach the script by epochs_param.
    if is_script and (epochs := options.pop("epochs", None)) is not None:
        body["epochs"] = epochs
    submitted = await studies.submit_study(client, body, project, task or task_flag, **options)
    submit_flags.print_findings(submitted.notes, submitted.unchecked)
    if as_json:
        print(render.as_json({"study_id": submitted.study_id, "name": submitted.name, "event_id": submitted.event_id}))
    else:
        packed = submit_flags.describe_package(submitted.package)
        print(f"{submitted.study_id}  {submitted.name}{packed}", flush=True)
    subject = subjects.study(submitted.study_id)
    if not follow and (rejection := await find_rejection(client.connection, subject, PATIENCE_S)):
        raise TrainbusError(f"study {submitted.study_id} was {rejection}")
    wanted = submitted.request.run
    if wanted is not None and (shortage := await find_shortage(client.connection, wanted)):
        print(f"each trial: {shortage}", file=sys.stderr)
    return await _follow_study(client, submitted.study_id, stderr=as_json) if follow else None


def _split_code(code: Path | None, project: Path | None) -> tuple[Path | None, Path | None]:
    """Return the study's file and the project's folder, of which the first argument is one.

    Raises:
        UsageError: both name a folder.
    """
    if code is None or not code.is_dir():
        return code, project
    if project is not None:
        raise UsageError("give the project once: by its place, or with --project")
    return None, code


async def _follow_study(client: AsyncClient, study_id: str, *, stderr: bool) -> int:
    """Print what happens to a study until it ends; return 1 if it found nothing."""
    from contracts import streams, subjects
    from contracts.events.study import StudyCompleted, StudyFact, StudyRejected, StudyStopped, TrialReported
    from contracts.texts import describe

    out = sys.stderr if stderr else sys.stdout
    async for batch in client.connection.follow(streams.FACTS, subjects.study(study_id)):
        for stored in batch:
            event = stored.event
            if not isinstance(event, StudyFact) or isinstance(event, TrialReported):
                continue
            print(render.visible(f"{stored.time.astimezone():%H:%M:%S}  {describe(event)}"), file=out, flush=True)
            if isinstance(event, StudyRejected | StudyStopped):
                return 1
            if isinstance(event, StudyCompleted):
                return 0 if event.best else 1
    return 1


@command(app)
async def ls(client: AsyncClient, as_json: Json = False) -> None:
    """List studies, oldest first."""
    from trainbus.client import studies

    found = list((await studies.read_studies(client.connection)).studies.values())
    if as_json:
        print(render.as_json([to_plain(study) for study in found]))
        return
    if not found:
        print("no studies yet: `trainbus tune FILE`, or publish tune.requested")
        return
    table = render.table("study", "name", "state", "trials", "best", right=("trials",))
    for study in found:
        over = sum(trial.state not in ("running", "paused") for trial in study.search_trials)
        best = ", ".join(describe_trial(study, study.trials[number]) for number in to_plain(study)["best"][:1])
        counted = f"{over}/{study.spec.trials}"
        table.add_row(study.study_id, render.escape(study.spec.name), study.state, counted, render.escape(best))
    render.console().print(table)


@command(app)
async def show(client: AsyncClient, study: StudyName, as_json: Json = False) -> None:
    """Show a study and its trials."""
    from trainbus.client import studies

    found = await studies.read_study(client.connection, study)
    plain = to_plain(found)
    if as_json:
        print(render.as_json(plain))
        return
    spec = found.spec
    objectives = ", ".join(f"{each.metric} ({each.mode})" for each in spec.objectives)
    render.print_fields(
        {
            "study": found.study_id,
            "name": spec.name,
            "state": found.state + (f": {found.reason}" if found.reason else ""),
            "optimises": objectives,
            "method": f"{spec.sampler.name}, pruning {spec.pruning.name}",
            "epochs": str(plain["epochs"]),
        }
    )
    table = render.table("trial", "state", "epoch", "value", "parameters", "run", right=("trial", "epoch", "value"))
    for trial in found.trials:
        mark = "*" if trial.number in plain["best"] else ""
        values = ", ".join(f"{value:.4g}" for value in trial.values or trial.reports.get(trial.last_step, ()))
        params = ", ".join(f"{key}={_short(value)}" for key, value in trial.params.items())
        state = trial.state if trial.purpose == "search" else f"{trial.state} (seed {trial.seed})"
        row = (f"{mark}{trial.number}", state, str(trial.last_step or ""), values, params, trial.run_id)
        table.add_row(*map(render.escape, row))
    render.console().print(table)


@command(app)
async def stop(
    client: AsyncClient,
    study: StudyName,
    reason: Annotated[str, typer.Option("--reason", help="Why, for the record.")] = "stopped by request",
) -> None:
    """End a study: no further trials, and its runs are cancelled. What it has found stays."""
    from trainbus.client import studies

    found = await studies.read_study(client.connection, study)
    if found.state != "running":
        raise TrainbusError(f"study {found.study_id} is already {found.state}: there is nothing to stop")
    await studies.stop_study(client.connection, found.study_id, reason)
    print(f"{found.study_id} is being stopped")


@command(app)
async def best(
    client: AsyncClient,
    study: StudyName,
    trial: Annotated[int | None, typer.Option("--trial", min=0, help="This trial instead of the best one.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Request a run with these parameters.")] = False,
    request: Annotated[bool, typer.Option("--request", help="Print the request of such a run as JSON.")] = False,
    as_json: Json = False,
) -> None:
    """Show the best parameters of a study, or submit a run with them."""
    from services.tuning.core.decide import best_request
    from trainbus.client import studies

    found = await studies.read_study(client.connection, study)
    chosen = studies.best_trial(found, trial)
    if request:
        print(best_request(found, chosen).model_dump_json(exclude_unset=True, indent=2))
        return
    run_id = ""
    if submit:
        run_id, wanted = await studies.submit_best(client.connection, found, chosen)
        if not as_json:
            print(f"{run_id}  {wanted.name}")
            return
    if as_json:
        print(render.as_json({**trial_to_plain(chosen), "submitted_run_id": run_id or None}))
        return
    render.print_fields({"trial": f"{chosen.number} ({chosen.run_id})", "value": describe_trial(found, chosen)})
    render.print_fields({key: str(value) for key, value in chosen.params.items()})


@command(app)
async def report(
    client: AsyncClient,
    study: StudyName,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File; default: STUDY.html.")] = None,
) -> None:
    """Write a page about a study, with Optuna's plots: one self-contained HTML file."""
    from trainbus.client import studies
    from trainbus.client.study_report import render_report

    found = await studies.read_study(client.connection, study)
    path = output or Path(f"{found.study_id}.html")
    path.write_text(render_report(found))
    print(path)


def describe_trial(study: Study, trial: Trial) -> str:
    """Return a trial's values with their metrics."""
    pairs = zip(study.spec.objectives, trial.values, strict=False)
    return ", ".join(f"{objective.metric} {value:.4g}" for objective, value in pairs)


def to_plain(study: Study) -> dict[str, Any]:
    """Return a study for machines."""
    from services.tuning.core.curves import used_epochs

    return {
        "study_id": study.study_id,
        "name": study.spec.name,
        "state": study.state,
        "reason": study.reason,
        "objectives": [each.model_dump() for each in study.spec.objectives],
        "best": list(study.best),
        "epochs": used_epochs(study),
        "trials": [trial_to_plain(trial) for trial in study.trials],
    }


def trial_to_plain(trial: Trial) -> dict[str, Any]:
    """Return a trial for machines."""
    return {
        "trial": trial.number,
        "run_id": trial.run_id,
        "run_ids": list(trial.run_ids),
        "state": trial.state,
        "purpose": trial.purpose,
        "seed": trial.seed,
        "params": trial.params,
        "values": list(trial.values),
        "reports": {str(step): list(values) for step, values in trial.reports.items()},
        "metrics": trial.metrics,
        "violations": list(trial.violations),
        "reason": trial.reason,
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
