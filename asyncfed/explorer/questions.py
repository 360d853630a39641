"""What a page may ask, as paths below `api/`; whatever else is not there.

state                          every run: how it stands, how much of it was taken up
N/about  N/metrics  N/marks    JSON of run N
N/graph  N/layout  N/classes   packed columns of run N
N/edges?from=&to=              and nodes: sums over a window, the whole run without one
N/window?from=&to=&low=&high=&bins=
N/edge?sender=&receiver=&from=&to=&at=
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import parse_qsl

from asyncfed.errors import AsyncfedError
from asyncfed.explorer.index import Window
from asyncfed.explorer.runs import ExploredRun
from asyncfed.runtime.directory import plain_json

MOST_BINS = 1024


class UnknownQuestionError(AsyncfedError):
    """A path that is none of ours."""


class BadQuestionError(AsyncfedError, ValueError):
    """A question with a value that is none."""


def answer(runs: Sequence[ExploredRun], path: str, query: str) -> tuple[str, bytes]:
    """The type and the content of what a path below `api/` asks for."""
    if path == "state":
        return _json({"runs": [run.state() for run in runs]})
    number, _, what = path.partition("/")
    if not (number.isascii() and number.isdecimal() and len(number) < 4 and int(number) < len(runs)):
        raise UnknownQuestionError(f"there is no run {number[:20]!r}")
    run, asked = runs[int(number)], _Asked(query)
    if what in _AS_JSON:
        return _json(_AS_JSON[what](run))
    if what in _AS_COLUMNS:
        return "application/octet-stream", _AS_COLUMNS[what](run, asked)
    raise UnknownQuestionError(f"there is no question {what[:40]!r}")


class _Asked:
    """The values of a question."""

    def __init__(self, query: str) -> None:
        self._values = dict(parse_qsl(query, max_num_fields=12))

    def number(self, name: str, default: float) -> float:
        text = self._values.get(name, "")
        try:
            value = float(text) if text else default
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise BadQuestionError(f"{name} is {text[:40]!r}; it must be a number")
        return value

    def whole(self, name: str, least: int, most: int, default: int) -> int:
        value = self.number(name, default)
        if not (least <= value <= most and value == int(value)):
            raise BadQuestionError(f"{name} is {value:g}; it must be a whole number from {least} to {most}")
        return int(value)

    def window(self) -> Window:
        return self.number("from", -math.inf), self.number("to", math.inf)


def _window(run: ExploredRun, asked: _Asked) -> bytes:
    nodes = run.index.nodes
    low = asked.whole("low", 0, nodes - 1, 0)
    high = asked.whole("high", low + 1, nodes, nodes)
    return run.window(asked.window(), low, high, asked.whole("bins", 1, MOST_BINS, 512))


def _edge(run: ExploredRun, asked: _Asked) -> bytes:
    sender, receiver = (asked.whole(end, 0, run.index.nodes - 1, 0) for end in ("sender", "receiver"))
    window = asked.window()
    return run.edge(sender, receiver, window, asked.number("at", window[0]))


_AS_JSON: Mapping[str, Callable[[ExploredRun], object]] = {
    "about": ExploredRun.about,
    "metrics": ExploredRun.metrics,
    "marks": ExploredRun.marks,
}
_AS_COLUMNS: Mapping[str, Callable[[ExploredRun, _Asked], bytes]] = {
    "graph": lambda run, _: run.graph(),
    "layout": lambda run, _: run.spring(),
    "classes": lambda run, _: run.classes(),
    "edges": lambda run, asked: run.edges(asked.window()),
    "nodes": lambda run, asked: run.nodes(asked.window()),
    "window": _window,
    "edge": _edge,
}


def _json(content: object) -> tuple[str, bytes]:
    text = json.dumps(plain_json(content), ensure_ascii=False, allow_nan=False, default=_number)
    return "application/json; charset=utf-8", text.encode("utf-8")


def _number(value: object) -> object:
    """Numbers of numpy, in tables."""
    item: Callable[[], object] | None = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{value!r} is no number")
    return item()
