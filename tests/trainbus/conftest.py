"""One warm process for all tests that start ranks: importing torch for each would take minutes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainbus.support import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    warm = Warm(tmp_path_factory.mktemp("warm"))
    yield warm
    warm.process.terminate()
    assert warm.process.wait(60) == 0
