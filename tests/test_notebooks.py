"""The notebooks run from top to bottom, and are kept without what they show."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_four() -> None:
    assert [path.stem[0] for path in NOTEBOOKS] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, in a kernel of its own; what it draws is to be seen."""
    monkeypatch.setenv("ASYNCFED_RUNS", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in all tests
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code), "clear its outputs"
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = {kind for cell in code for output in cell.outputs if "data" in output for kind in output["data"]}
    assert "text/html" in shown
    drawn = [cell for cell in code if ".plot" in cell.source.splitlines()[-1]]
    assert drawn
    for cell in drawn:
        assert any("image/png" in output.get("data", {}) for output in cell.outputs), cell.source
