"""Without its library an integration says what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainbus.integrations.library import import_library
from trainbus.integrations.numbers import select_numbers


@pytest.mark.parametrize(
    ("integration", "package"),
    [("lightning", "lightning"), ("huggingface", "transformers"), ("accelerate", "accelerate")],
)
def test_a_missing_library_is_named(integration: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] in (package, "pytorch_lightning") or name == f"trainbus.integrations.{integration}":
            monkeypatch.delitem(sys.modules, name)

    class Absent:
        """Nothing of this package can be found."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name.split(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=f"needs the package {package}: run `pip install {package}`"):
        __import__(f"trainbus.integrations.{integration}")


def test_what_the_library_itself_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_there_at_all'"):
        import_library("half_installed", "half-installed", "example")


def test_only_numbers_are_reported() -> None:
    class Scalar:
        """A tensor with one element, to the code under test."""

        def __float__(self) -> float:
            return 0.5

    assert select_numbers({"a": 1, "b": "2", "c": None, "d": [1, 2], "e": Scalar()}) == {"a": 1.0, "e": 0.5}
