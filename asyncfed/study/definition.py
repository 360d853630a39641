"""What a study is: named scenarios, and what to make of their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from asyncfed.checks import checked
from asyncfed.errors import ScenarioError
from asyncfed.scenario import Scenario
from asyncfed.study.summary import Summary, check_name

if TYPE_CHECKING:
    from asyncfed.result import Result

RESERVED = (
    "run.json",
    "scenario.json",
    "trace",
    "study.json",
    "sweep.json",
    "summary.json",
    "summary.txt",
    "tables",
    "pictures",
    "report.html",
)


@checked
@dataclass(frozen=True, eq=False)
class Study:
    """Several scenarios and what to make of their results.

    Parameters
    ----------
    name
        What its directory under `runs/` is called.
    parts
        Name → scenario, or a function without arguments that makes it, so that many problems need not stand
        in memory together. A name is a directory, too, and may hold slashes: "StoD/PDBO-DA".
    summarise
        Called with the results of the parts that are complete, by name, in the order of `parts`: one that
        diverged (but see `with_diverged`), or was not asked for, is not among them.
    note
        A line about the study, shown with its summary.
    save_final
        Keep the final variables of every part on disk, for a `summarise` that asks for `Result.final`.
    with_diverged
        Give `summarise` the parts that diverged as well, with what they had recorded: their
        `Result.complete` is false.
    """

    name: str
    parts: Mapping[str, Scenario | Callable[[], Scenario]]
    summarise: Callable[[Mapping[str, Result]], Summary]
    note: str = ""
    save_final: bool = False
    with_diverged: bool = False

    def __post_init__(self) -> None:
        if not self.parts:
            raise ScenarioError(f"the study {self.name!r} has no parts; give it at least one scenario")
        taken: dict[str, str] = {}
        for name in self.parts:
            check_name("part", name, slashes=True)
            if name.split("/")[0].lower() in RESERVED:
                raise ScenarioError(
                    f"a part cannot be called {name!r}: a study's own files are {', '.join(RESERVED)}"
                )
            other = taken.setdefault(name.lower(), name)
            if other != name:
                raise ScenarioError(f"the parts {other!r} and {name!r} differ in capitals only; rename one")
        for name in self.parts:
            for folder in map(str, PurePosixPath(name.lower()).parents):
                if folder in taken:
                    raise ScenarioError(
                        f"the part {name!r} would lie inside the part {taken[folder]!r}; rename one"
                    )
        object.__setattr__(self, "parts", dict(self.parts))

    def scenario(self, part: str) -> Scenario:
        """The scenario of a part, built now."""
        made: object = self.parts[part]
        if callable(made):
            made = made()
        if not isinstance(made, Scenario):
            raise ScenarioError(
                f"the part {part!r} of the study {self.name!r} is {made!r}; "
                "it must be a Scenario, or a function without arguments that returns one"
            )
        return made if made.name != "scenario" else dataclasses.replace(made, name=part)
