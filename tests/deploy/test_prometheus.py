"""Every query of alerts and dashboards names metrics that exist, with labels that they have."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Counter, Gauge, Histogram

from services.kit import metrics as kit_metrics

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARDS = ROOT / "deploy/grafana/dashboards"
#: Labels that Prometheus and its configuration add to everything.
TARGET_LABELS = {"job", "instance", "service"}
#: What Prometheus itself says about its targets.
BUILT_IN = {"up": set()}

NAME = re.compile(r"\b(up|ALERTS|trainbus_[a-z0-9_]+)\b(\{[^}]*\})?")
LABEL = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)")
GROUPED = re.compile(r"\bby \(([^)]*)\)")


def known_metrics() -> dict[str, set[str]]:
    """Series name -> its labels, for every metric of the kit and of each service."""
    modules = [kit_metrics] + [
        importlib.import_module(f"services.{path.parent.name}.metrics")
        for path in sorted((ROOT / "services").glob("*/metrics.py"))
        if path.parent.name != "kit"
    ]
    found: dict[str, set[str]] = dict(BUILT_IN)
    for module in modules:
        for metric in vars(module).values():
            if not isinstance(metric, (Counter, Gauge, Histogram)):
                continue
            labels = set(metric._labelnames)
            if isinstance(metric, Counter):
                found[f"{metric._name}_total"] = labels
            elif isinstance(metric, Histogram):
                found[f"{metric._name}_bucket"] = labels | {"le"}
                found[f"{metric._name}_sum"] = found[f"{metric._name}_count"] = labels
            else:
                found[metric._name] = labels
    return found


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Where, and what is asked of Prometheus."""
    for rule in alert_rules():
        yield f"alert {rule['alert']}", rule["expr"]
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                if "expr" in target:
                    yield f"{path.stem}: {panel['title']}", target["expr"]


def test_every_query_names_what_exists() -> None:
    known, wrong, asked = known_metrics(), [], 0
    for where, expression in queries():
        labels: set[str] = set()
        for name, selector in NAME.findall(expression):
            asked += 1
            if name not in known:
                wrong.append(f"{where}: no service exports {name}")
                continue
            labels |= known[name]
            for label in LABEL.findall(selector):
                if label not in known[name] | TARGET_LABELS:
                    wrong.append(f"{where}: {name} has no label {label}")
        for group in GROUPED.findall(expression):
            for label in (part.strip() for part in group.split(",")):
                if label not in labels | TARGET_LABELS:
                    wrong.append(f"{where}: nothing here has a label {label} to group by")
    assert not wrong, "\n".join(wrong)
    assert asked > 40


def test_legends_use_labels_that_are_left() -> None:
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                groups = GROUPED.findall(target.get("expr", ""))
                kept = {label.strip() for group in groups for label in group.split(",")} if groups else None
                for label in re.findall(r"{{(\w+)}}", target.get("legendFormat", "")):
                    assert kept is None or label in kept, f"{path.stem}: {panel['title']}: {label}"


def test_no_metric_is_labelled_by_what_grows() -> None:
    growing = {"run", "run_id", "subject", "node", "node_id", "path", "event_id", "dataset_id", "url"}
    found = {name: labels & growing for name, labels in known_metrics().items() if labels & growing}
    assert not found


def test_every_alert_says_what_to_do() -> None:
    for rule in alert_rules():
        assert rule["annotations"]["summary"], rule["alert"]
        assert rule["annotations"]["action"], rule["alert"]
        page, _, section = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^## (\w+)$", (ROOT / page).read_text(), re.MULTILINE)
        assert section in [heading.lower() for heading in headings], rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_every_alert_is_tested() -> None:
    tests = "".join(path.read_text() for path in PROMETHEUS.glob("alerts*_test.yml"))
    assert [rule["alert"] for rule in alert_rules() if rule["alert"] not in tests] == []


def test_scraped_are_the_services_of_the_compose_file() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    targets = [
        target for job in config["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    ]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    ours = {name for name, service in compose.items() if "service" in (service.get("command") or [])[:1]}
    assert {target.rsplit(":", 1)[0] for target in targets} == ours
    assert {target.rsplit(":", 1)[1] for target in targets} == {"9100"}


@pytest.mark.needs("promtool")
@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml", "alerts_of_days_test.yml"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_promtool(command: list[str]) -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is not installed: apt-get install prometheus"
    done = subprocess.run([promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
