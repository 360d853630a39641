"""`asyncfed new my_scenario.py`: a file to start from."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from asyncfed.errors import ScenarioError


def write_starting_file(path: Path) -> None:
    """Write a commented scenario that runs; never over a file that is there."""
    spec = importlib.util.find_spec("scenarios._starting")
    if spec is None or spec.origin is None:
        raise ScenarioError("the starting file is missing in this installation; install asyncfed again")
    text = Path(spec.origin).read_text(encoding="utf-8").replace("FILE", str(path))
    if path.suffix != ".py":
        raise ScenarioError(
            f"{path} ends in {path.suffix!r}; a scenario is a Python file: call it {path.stem}.py"
        )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ScenarioError(f"{path} is there already; give another name, or remove it first") from None
    except OSError as error:
        raise ScenarioError(f"cannot write {path}: {error.strerror}; give a place of your own") from error
