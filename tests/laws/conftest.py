"""The runs that several laws look at, made once in a process."""

from __future__ import annotations

import pytest

from tests.laws.runs import Runs


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("laws"))
