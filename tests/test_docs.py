"""What the pages in docs/ show must run, and what they name must be there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LONGEST = 119  # characters in a line
OLD = {"0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008"}  # records with longer lines
_NAMED = re.compile(r"`((?:asyncfed|topologies|scenarios|tests|benchmarks)/[\w/]*(?:\.py)?)(?:::([\w.]+))?`")


def blocks_in_place(page: Path) -> str:
    """The Python blocks of a page, each on its own lines, so that a traceback names the line of the page."""
    found, inside = [], False
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            found.append("")
        else:
            found.append(line if inside else "")
    return "\n".join(found) + "\n"


def defined(path: Path) -> set[str]:
    """The classes, functions and methods of a file, as `function` and `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(
    ("page", "runs"), [("write-a-method", 8), ("bring-your-own", 1), ("personalized-methods", 4)]
)
def test_every_block_of_a_page_runs(page: str, runs: int, tmp_path: Path) -> None:
    """In one namespace and a process of its own, for it registers methods."""
    script = tmp_path / "page.py"
    script.write_text(blocks_in_place(ROOT / "docs" / f"{page}.md"), "utf-8")
    places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": places, "ASYNCFED_RUNS": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs").iterdir())) >= runs  # it was not empty: that many were made


def test_a_block_that_fails_is_noticed_by_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "A page.\n\n```python\nx = 1\n```\n\nand\n\n```\nno python\n```\n\n```python\nassert x == 2\n```\n"
    )
    with pytest.raises(AssertionError) as caught:
        exec(compile(blocks_in_place(page), "page", "exec"), {})
    assert caught.traceback[-1].lineno + 1 == 14


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    """Folders, files, and functions in them: `asyncfed/network/wire.py::Wire.send`."""
    for file, name in _NAMED.findall(page.read_text("utf-8")):
        assert (ROOT / file).exists(), f"{page.name} names {file}"
        assert not name or name in defined(ROOT / file), f"{page.name} names {name} of {file}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem[:4] not in OLD], ids=lambda page: page.stem
)
def test_lines_are_short(page: Path) -> None:
    long = [n for n, line in enumerate(page.read_text("utf-8").splitlines(), 1) if len(line) > LONGEST]
    assert long == []
