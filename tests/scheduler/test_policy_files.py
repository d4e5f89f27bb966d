"""Policies by name and in files: their digests, and the names that earlier versions gave to their sections."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.scheduling import Policy, Preemption
from services.scheduler import policies


def test_digests_outlive_the_name_of_a_section() -> None:
    """They are as logs have them from when ``preemption`` was ``reclaim``; a new field of a policy changes them."""
    assert policies.load("default").digest == "0c03f2874a88b306"
    assert policies.load("never-idle").digest == "59b18cd6d6f42c8e"
    for setting in ("reclaim.resume_cost_s=1.0", "preemption.resume_cost_s=1.0"):
        assert policies.with_settings(policies.DEFAULT, [setting]).digest == "cc7673f5207c32cc"


@pytest.mark.parametrize("section", ["preemption", "reclaim"])
def test_a_file_may_name_preemption_as_earlier_versions_did(tmp_path: Path, section: str) -> None:
    toml, as_json = tmp_path / "team.toml", tmp_path / "team.json"
    toml.write_text(f'[{section}]\nmin_run_s = 600\nby = ["fair-share"]\n')
    as_json.write_text(f'{{"name": "team", "{section}": {{"min_run_s": 600, "by": ["fair-share"]}}}}')
    expected = Policy(name="team", preemption=Preemption(min_run_s=600, by=("fair-share",)))
    assert policies.load(str(toml)) == policies.load(str(as_json)) == expected
    for setting in ("preemption.min_run_s=1", "reclaim.min_run_s=1", " reclaim.min_run_s = 1"):
        changed = policies.with_settings(str(toml), [setting])
        assert changed == policies.change(expected, [setting])
        assert changed.preemption == Preemption(min_run_s=1, by=("fair-share",))
    whole = policies.with_settings(str(toml), ['reclaim={"min_run_s": 1}'])
    assert whole.preemption == Preemption(min_run_s=1)


def test_what_is_written_has_the_name_of_today() -> None:
    content = Policy.model_validate({"reclaim": {"min_run_s": 600}}).model_dump(mode="json", exclude_defaults=True)
    assert content == {"preemption": {"min_run_s": 600.0}}


def test_both_names_at_once_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "team.toml"
    file.write_text("[preemption]\nmin_run_s = 600\n[reclaim]\nmin_run_s = 60\n")
    with pytest.raises(policies.PolicyError, match="reclaim is the earlier name of preemption: give only preemption"):
        policies.load(str(file))


@pytest.mark.parametrize(
    ("text", "settings", "problem"),
    [
        ("[reclaim]\nmin_run_s = -1\n", [], "reclaim.min_run_s: must be at least 0.0"),
        ("", ["reclaim.min_run_s=-1"], "preemption.min_run_s: must be at least 0.0"),
        ("", ["reclaimed.min_run_s=1"], "reclaimed: unknown field"),
    ],
)
def test_problems_name_the_place(tmp_path: Path, text: str, settings: list[str], problem: str) -> None:
    file = tmp_path / "team.toml"
    file.write_text(text)
    with pytest.raises(policies.PolicyError) as raised:
        policies.with_settings(str(file), settings)
    assert f"{file} is not valid: {problem}" in str(raised.value)
