"""What nodes are called, and which numbers they have.

Inside there are only numbers: clients are 0 to n−1 in the order of the graph, a server comes last. A node's
name is what its graph calls it. A graph whose nodes are 0 to N−1, as those of `topologies` are, has no names:
there clients are counted off in that order, the server apart. Wherever a person names a client or reads of
one, it is by that name: `factors={1: 10}` is of the client that the trace, the metrics and the pictures call
1.

A client may also be given by its number, unless all names look like numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asyncfed.errors import ScenarioError, TopologyError

if TYPE_CHECKING:
    import pandas as pd

_MOST_LISTED = 10


class Names:
    """The names of the nodes 0, 1, …, made of the labels that a graph has for them."""

    def __init__(self, labels: Sequence[Hashable]) -> None:
        everybody = range(len(labels))
        counted = labels == everybody or {one for one in labels if is_whole(one)} == set(everybody)
        self._names = None if counted else tuple(map(str, labels))
        self._count = len(labels)

    @property
    def given(self) -> bool:
        """Whether nodes are called by more than their numbers."""
        return self._names is not None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> str:
        return str(int(number)) if self._names is None else self._names[number]

    def first(self, count: int) -> Names:
        """The names of the first nodes, which are the clients: all, or all but the server."""
        return Names(range(count) if self._names is None else self._names[:count])

    def number(self, node: Any, where: str, what: str = "client") -> int:
        """Of a node given by its name or number; `where` says where, for messages."""
        place = self._numbers.get(str(node)) if self.given and not isinstance(node, bool) else None
        if place is None and not self._look_like_numbers and is_whole(node) and 0 <= node < len(self):
            place = int(node)
        if place is None:
            raise ScenarioError(f"{where} names {what} {node!r}; {self._known(str(node), what)}")
        return place

    def column(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any] | pd.Categorical[Any]:
        """Nodes for a table that people read: as they are, or by names, which sort as numbers do."""
        if self._names is None:
            return numbers
        import pandas as pd

        return pd.Categorical.from_codes(numbers.astype(np.int64), pd.Index(self._names))

    def _known(self, name: str, what: str) -> str:
        if not self.given:
            return f"the {what}s are 0 to {len(self) - 1}"
        names = [*self._numbers]
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        listing = ", ".join(names[:_MOST_LISTED]) + (", …" if len(names) > _MOST_LISTED else "")
        numbers = "" if self._look_like_numbers else f" (or 0 to {len(self) - 1})"
        begin = f"did you mean {nearest[0]!r}? The" if nearest else "the"
        return f"{begin} {what}s are {listing}{numbers}"

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self._names or ())}

    @cached_property
    def _look_like_numbers(self) -> bool:
        return self.given and all(name.isdecimal() for name in self._numbers)


def in_order(nodes: Iterable[Hashable], server: Hashable | None) -> tuple[Hashable, ...]:
    """The nodes by their numbers, the server last; refuses two that are called the same."""
    labels: list[Any] = list(nodes)
    if not Names(labels).given:
        labels.sort()
    if server is not None:
        labels = [*(label for label in labels if label != server), server]
    seen: set[str] = set()
    for label in labels:
        if (name := str(label)) in seen:
            raise TopologyError(f"two nodes are called {name}, as numbers or as text; give each its own name")
        seen.add(name)
    return tuple(labels)


def stored_names(topology: Any, nodes: int) -> Names:
    """The names in a topology as scenario.json has it; numbers where it has none for so many nodes."""
    match topology:
        case {"nodes": [*labels], "about": {**about}} if all(isinstance(one, (str, int)) for one in labels):
            server = about.get("server")
            if len(labels) == nodes == len(set(map(str, labels))) and (server is None or server in labels):
                return Names(in_order(labels, server))
    return Names(range(nodes))


def plain_name(client: Any) -> Any:
    """A client as a scenario keeps it: a number, also where a file has it as text, or a name."""
    if is_whole(client):
        return int(client)
    if isinstance(client, str):
        return int(client) if client.isdecimal() and str(int(client)) == client else client
    return str(client) if isinstance(client, tuple) else client


def is_whole(value: object) -> bool:
    """Of numbers and nothing else: a whole one."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
