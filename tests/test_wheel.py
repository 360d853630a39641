"""What is installed from a wheel works outside the checkout, with nothing of it at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent


def ran(*command: object, within: Path) -> str:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ASYNCFED"))
    }
    done = subprocess.run(
        list(map(str, command)), cwd=within, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_brings_all_it_needs_and_the_starting_file_runs(tmp_path: Path) -> None:
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    elsewhere.mkdir()
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    for name in ("asyncfed", "topologies", "scenarios"):
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    ran(
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        tmp_path,
        source,
        within=tmp_path,
    )
    (wheel,) = tmp_path.glob("asyncfed-*.whl")
    held = zipfile.ZipFile(wheel).namelist()
    assert {"asyncfed/py.typed", "topologies/py.typed", "scenarios/quickstart.py"} <= set(held)
    assert any(name.endswith("LICENSE") for name in held)
    assert not any(name.startswith(("tests", "benchmarks")) for name in held)

    fresh = tmp_path / "fresh"
    ran(sys.executable, "-m", "venv", "--without-pip", fresh, within=tmp_path)
    python = fresh / "bin" / "python"
    ran(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, within=tmp_path)
    home = Path(
        ran(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", within=elsewhere).strip()
    )
    (home / "dependencies.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # torch and the others, by path

    where = ran(python, "-c", "import asyncfed, topologies; print(asyncfed.__file__)", within=elsewhere)
    assert Path(where.strip()).is_relative_to(fresh)
    asyncfed = fresh / "bin" / "asyncfed"
    assert "quickstart" in ran(asyncfed, "list", within=elsewhere)
    ran(asyncfed, "new", "mine.py", within=elsewhere)
    shown = ran(asyncfed, "run", "mine.py", "--set", "clients=3", "--set", "steps=20", within=elsewhere)
    assert "accuracy" in shown
    assert (elsewhere / "runs" / "mine-0001" / "run.json").exists()
