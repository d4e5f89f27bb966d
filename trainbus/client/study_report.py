"""A study as one self-contained HTML page, with Optuna's plots in it."""

from __future__ import annotations

import base64
import html
import io
import warnings
from collections.abc import Callable
from typing import Any

from contracts.state.study import Study
from services.tuning.core.curves import used_epochs
from services.tuning.core.optuna_study import build_study

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1c2430 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
td, th { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #d9dee5 }
tr.best { background: #eaf6ec; font-weight: 600 }
img { max-width: 100% } figure { margin: 2rem 0 } figcaption { color: #5a6675 }
"""


def render_report(study: Study) -> str:
    """Return the page."""
    spec = study.spec
    objectives = ", ".join(f"{each.metric} ({each.mode})" for each in spec.objectives)
    facts = {
        "study": study.study_id,
        "state": study.state + (f": {study.reason}" if study.reason else ""),
        "optimises": objectives,
        "method": f"{spec.sampler.name} (seed {spec.sampler.seed}), pruning {spec.pruning.name}",
        "epochs trained": str(used_epochs(study)),
    }
    head = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in facts.items())
    plots = "".join(
        f'<figure><img alt="{title}" src="data:image/png;base64,{image}"><figcaption>{title}</figcaption></figure>'
        for title, image in draw_plots(study)
    )
    title = html.escape(f"Study {spec.name}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title><style>{STYLE}</style></head>"
        f"<body><h1>{title}</h1><table>{head}</table><h2>Trials</h2>{_trial_table(study)}{plots}</body></html>\n"
    )


def _trial_table(study: Study) -> str:
    names = list(study.spec.space)
    columns = ["trial", "state", "epoch", *(each.metric for each in study.spec.objectives), *names, "run"]
    rows = []
    for trial in study.trials:
        values = trial.values or trial.reports.get(trial.last_step, ())
        shown = [f"{value:.5g}" for value in values] + [""] * (len(study.spec.objectives) - len(values))
        params = [_show(trial.params.get(name)) for name in names]
        cells = [str(trial.number), trial.state, str(trial.last_step or ""), *shown, *params, trial.run_id]
        kind = ' class="best"' if trial.number in study.best else ""
        rows.append(f"<tr{kind}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _show(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw_plots(study: Study) -> list[tuple[str, str]]:
    """Return title and PNG (base64) of each of Optuna's plots that this study has enough trials for."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from optuna.visualization import matplotlib as plots

    built = build_study(study)
    completed = sum(trial.state == "completed" for trial in study.search_trials)
    if completed < 2:
        return []
    wanted: list[tuple[str, Callable[[Any], Any]]]
    if len(study.spec.objectives) == 1:
        wanted = [
            ("Best value by trial", plots.plot_optimization_history),
            ("Learning curves", plots.plot_intermediate_values),
            ("Importance of the parameters", plots.plot_param_importances),
            ("Value by parameter", plots.plot_slice),
            ("Parameters together", plots.plot_parallel_coordinate),
        ]
    else:
        wanted = [("Pareto front", plots.plot_pareto_front)] if len(study.spec.objectives) < 4 else []
    found = []
    for title, draw in wanted:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                draw(built)
            except (ValueError, RuntimeError):
                continue  # Optuna has too little to draw it from
            buffer = io.BytesIO()
            pyplot.gcf().savefig(buffer, format="png", dpi=110, bbox_inches="tight")
            pyplot.close("all")
        found.append((title, base64.b64encode(buffer.getvalue()).decode()))
    return found
