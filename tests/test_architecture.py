"""The house rules that a machine can check: layers, public names, lazy imports."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import asyncfed

ROOT = Path(__file__).parent.parent


def test_each_layer_imports_only_what_stands_above_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout


def test_public_names() -> None:
    names = """
        ActorLostError Adapted AsyncfedError AtLeast AtMost Callback CallbackError Comparison DataError
        DivergenceError EvaluationReport HypergradientEstimate Lockstep MessageSummary OneByOneWarning
        PhaseStart Progress QuorumError RecoveredWarning Result RunError RunExistsError RunStart RunStopped
        Scenario ScenarioError SeriesDivergesError StorageError Study StudyProgress StudyResult Summary
        SummaryTable TopologyError Trace TraceError UnknownNameError UnsoundWarning VirtualTime adapt
        compare export hypergradient load load_study resume run run_study sweep
    """
    assert sorted(asyncfed.__all__) == names.split()
    for name in asyncfed.__all__:
        assert getattr(asyncfed, name).__name__ == name
    assert dir(asyncfed) == sorted(asyncfed.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = asyncfed.nonsense


@pytest.mark.parametrize("package", ["network", "trace", "problems", "data", "protocols"])
def test_what_a_package_lists_is_there(package: str) -> None:
    module = importlib.import_module(f"asyncfed.{package}")
    assert len(set(module.__all__)) == len(module.__all__) > 0
    for name in module.__all__:
        assert hasattr(module, name), name


def test_importing_asyncfed_loads_nothing_heavy() -> None:
    heavy = ("torch", "ray", "pandas", "pyarrow", "networkx", "numpy")
    command = f"import sys, asyncfed; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_actors_import_is_light() -> None:
    """An actor pays for every module it loads, in memory and in start-up time."""
    heavy = ("networkx", "scipy", "pandas", "pyarrow", "sklearn", "torchvision", "matplotlib", "ray")
    modules = "asyncfed.runtime.block, asyncfed.problems"
    command = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_tests_of_a_file_share_a_process(request: pytest.FixtureRequest) -> None:
    """Where pytest-xdist does not see the groups, runs and a Ray are made once in every process."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@tests/test_architecture.py")
