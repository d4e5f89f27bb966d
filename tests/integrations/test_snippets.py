"""The lines for Lightning and Accelerate in the docs run as they stand there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.conftest import ScriptRun

pytestmark = pytest.mark.shell
pytest.importorskip("lightning", reason="the extra trainbus[integrations] is not installed")

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PAGE = Path(__file__).parents[2] / "docs" / "scripts.md"
X = torch.randn(8, 4)


def snippet(library: str) -> str:
    """The block of the page that imports from this module of trainbus.integrations."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [found] = [block for block in blocks if f"trainbus.integrations.{library} " in block]
    return str(found)


def lightning_names(folder: Path) -> dict[str, Any]:
    from functools import partial

    from lightning.pytorch import Trainer

    from tests.integrations.test_lightning import Regression

    data = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), batch_size=2)
    quiet = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "default_root_dir": folder}
    return {"Trainer": partial(Trainer, **quiet, limit_val_batches=0), "model": Regression(), "data": data}


def accelerate_names(folder: Path) -> dict[str, Any]:
    from accelerate import Accelerator

    model = nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(X), batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"Accelerator": Accelerator, "model": model, "optimizer": optimizer, "loader": loader}
    return {**names, "steps": 100, "loss": torch.tensor(0.5)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "names"), [("lightning", lightning_names), ("accelerate", accelerate_names)])
def test_the_lines_of_the_page_keep_a_checkpoint(run: ScriptRun, tmp_path: Path, library: str, names: Any) -> None:
    run.start()
    (tmp_path / "lines.py").write_text(snippet(library))
    runpy.run_path(str(tmp_path / "lines.py"), names(tmp_path))
    assert run.keeps()
    assert run.reports()
