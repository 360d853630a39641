"""Which runs are compared, and which of them are one row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from asyncfed.checks import PathLike, fitting
from asyncfed.comparison.differences import differing, identity, settings
from asyncfed.errors import ScenarioError
from asyncfed.result import Result, load
from asyncfed.study import StudyResult, load_study

Given: TypeAlias = Result | StudyResult | PathLike

MOST_RUNS = 10_000
_LONGEST_LABEL = 48
_SEED = re.compile(r"(^|,)seed=[^,]*")  # in the name of a run of a sweep
_ASIDE = ("versions", "backend")  # no settings of a scenario


@dataclass(frozen=True)
class Row:
    """Runs that differ by their seed only, of which no two have the same."""

    label: str
    runs: tuple[Result, ...]

    @property
    def seeds(self) -> list[Any]:
        return [run.manifest.get("seed") for run in self.runs]


def found_runs(given: Iterable[Given]) -> dict[str, Result]:
    """Name → run, of directories of runs, and of studies (or sweeps), whose complete parts are meant."""
    runs: list[tuple[str, Result]] = []
    for what in given:
        each = fitting(what, Given, "a run to compare")
        if isinstance(each, Result):
            runs.append((each.path.name, each))
        elif isinstance(each, StudyResult) or (Path(each) / "study.json").exists():
            study = each if isinstance(each, StudyResult) else load_study(each)
            if not study.results:
                raise ScenarioError(f"{study.path} is a study of which no part is complete yet")
            runs += study.results.items()
        else:
            run = load(each)
            runs.append((run.path.name, run))
        if len(runs) > MOST_RUNS:
            raise ScenarioError(f"these are more than {MOST_RUNS:,} runs; compare fewer at a time")
    if len({run.path.resolve() for _, run in runs}) < len(runs):
        raise ScenarioError("a run is given twice; give each once")
    names = [name for name, _ in runs]
    return {name if names.count(name) == 1 else str(run.path): run for name, run in runs}


def in_rows(runs: Mapping[str, Result]) -> tuple[list[Row], dict[str, list[str]]]:
    """The rows in the order of their first runs, and what differs between them: setting → text of each row.

    A row is called by its settings where these are short and its own, else by the name of its first run
    (of a sweep: without the seed).
    """
    grouped: dict[tuple[str, int], list[str]] = {}
    for name, run in runs.items():
        same, seed, again = identity(run), run.manifest.get("seed"), 0
        while any(runs[other].manifest.get("seed") == seed for other in grouped.get((same, again), ())):
            again += 1  # of equal runs each is a row: there is nothing to average
        grouped.setdefault((same, again), []).append(name)
    members = list(grouped.values())
    differences = differing([settings(runs[names[0]]) for names in members])
    labels = _labels(members, differences)
    of = [tuple(runs[name] for name in names) for names in members]
    return [Row(label, each) for label, each in zip(labels, of, strict=True)], differences


def _labels(members: Sequence[Sequence[str]], differences: Mapping[str, Sequence[str]]) -> list[str]:
    own = {path: texts for path, texts in differences.items() if path.split(".")[0] not in _ASIDE}
    told = [", ".join(f"{path}={texts[row]}" for path, texts in own.items()) for row in range(len(members))]
    cut = [_SEED.sub("", names[0]).strip(",") for names in members]
    labels = []
    for names, short, without_seed in zip(members, told, cut, strict=True):
        if short and len(short) <= _LONGEST_LABEL and told.count(short) == 1:
            labels.append(short)
        else:
            labels.append(without_seed if without_seed and cut.count(without_seed) == 1 else names[0])
    return labels
