"""A backend's state as another packing would have it, so that a run goes on elsewhere than it began.

What clients have stands in rows, in the order of clients: the rows of all blocks are put together and cut
where the new blocks begin. A payload knows whose it is and goes to the block of that client; those that
nobody absorbs any more stay behind. They are not put into Ray's store anew: whoever wants one asks its owner.
Only what the server sent becomes an object each, for that is how clients take it.

Sums are then added up in another order, so numbers agree to rounding, and the schedule and the trace exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.errors import TraceError
from asyncfed.protocols.part import Tensors
from asyncfed.runtime.state import State, joined, of_arrays

IntArray = npt.NDArray[np.int64]
Ranges = tuple[tuple[int, int], ...]

_BY_CLIENT = ("store/", "residue/", "memory/")


@dataclass(frozen=True, eq=False)
class _Payloads:
    """What somebody may still absorb, in the order in which it was sent."""

    serials: IntArray
    nodes: IntArray
    rows: Tensors


def repacked(state: State, ranges: Ranges | None, *, clients: int, server: bool) -> State:
    """The state of a backend, for one with these blocks of clients (None for the local one); the same where
    they are those that it was written by.
    """
    names = _blocks_of_clients(state, server)
    sizes = [len(state.tensors[f"{name}/store/inner"]) for name in names]
    if sum(sizes) != clients:
        raise TraceError(
            f"the checkpoint is of {sum(sizes)} clients, and the run has {clients}; it was damaged or changed"
        )
    if (None if names == ["clients"] else _ranges(sizes)) == ranges:
        return state
    parts = _apart(state)
    wanted = parts["exchange"].array("serials") if "exchange" in parts else None
    old = [parts[name] for name in names]
    rows, payloads = _together(old, sizes), _under_way(old, wanted)
    new = {"clients": (0, clients)} if ranges is None else {f"block {k}": own for k, own in enumerate(ranges)}
    found = {name: _cut(rows, payloads, *own) for name, own in new.items()}
    boards: dict[int, Tensors] = {}
    if server:
        last = parts["server"] if names == ["clients"] else parts[f"block {len(names)}"]
        last = _without_old_boards(last, wanted)
        boards = _boards(last)
        found["server" if ranges is None else f"block {len(ranges)}"] = last
    if ranges is not None:
        found["exchange"] = _exchange(payloads, [*boards], ranges)
        found["objects"] = State(
            {f"{k}/{name}": value for k, own in enumerate(boards.values()) for name, value in own.items()}
        )
    return joined(found | {name: parts.get(name, State()) for name in ("reports", "standing")})


def _blocks_of_clients(state: State, server: bool) -> list[str]:
    """What the blocks of clients are called in it, in order."""
    if "clients" in state.facts:
        return ["clients"]
    count = sum(name.startswith("block ") for name in state.facts) - int(server)
    return [f"block {place}" for place in range(count)]


def _ranges(sizes: Sequence[int]) -> Ranges:
    stops = np.cumsum(sizes).tolist()
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def _apart(state: State) -> dict[str, State]:
    """All that was joined, by its prefix."""
    tensors: dict[str, Tensors] = {}
    for name, value in state.tensors.items():
        prefix, _, rest = name.partition("/")
        tensors.setdefault(prefix, {})[rest] = value
    return {
        name: State(tensors.get(name, {}), state.facts.get(name, {})) for name in {**tensors, **state.facts}
    }


# --- putting together ------------------------------------------------------------------------------------


def _together(blocks: Sequence[State], sizes: Sequence[int]) -> State:
    """The rows of all clients. What a block lacks its clients never had: that is zero."""
    mine = [{name: value for name, value in block.tensors.items() if name.startswith(_BY_CLIENT)}
            for block in blocks]  # fmt: skip
    facts = [block.facts for block in blocks]
    return State(
        _stacked(mine, sizes),
        {
            "first_step": facts[0]["first_step"],
            "chunk": max(own["chunk"] for own in facts),  # those that were never asked have none yet
            "exchanged": list(dict.fromkeys(name for own in facts for name in own["exchanged"])),
            "kept": sorted({name for own in facts for name in own["kept"]}),
        },
    )


def _under_way(blocks: Sequence[State], wanted: IntArray | None) -> _Payloads:
    """The payloads of all blocks: those that are wanted, or all."""
    serials, nodes, rows = [], [], []
    for block in blocks:
        pool = block.under("pool")
        own = pool.array("serials")
        here = np.arange(len(own)) if wanted is None else np.flatnonzero(np.isin(own, wanted))
        if not len(here) and len(blocks) > 1:
            continue  # what its rows held before plays no part
        slots = torch.from_numpy(pool.array("slots")[here])
        serials.append(own[here])
        nodes.append(pool.array("nodes")[here])
        rows.append({name: value[slots] for name, value in pool.under("rows").tensors.items()})
    if not serials:
        nothing = np.zeros(0, dtype=np.int64)
        return _Payloads(nothing, nothing, {})
    sent = np.concatenate(serials)
    order = np.argsort(sent)
    stacked = _stacked(rows, [len(own) for own in serials])
    ordered = {name: value[torch.from_numpy(order)] for name, value in stacked.items()}
    return _Payloads(sent[order], np.concatenate(nodes)[order], ordered)


def _stacked(parts: Sequence[Tensors], sizes: Sequence[int]) -> Tensors:
    """Variables of which each part has so many rows; zeros where it has not got one."""

    def whole(name: str) -> Tensor:
        like = next(part[name] for part in parts if name in part)
        pieces = [
            part[name] if name in part else like.new_zeros(size, *like.shape[1:])
            for part, size in zip(parts, sizes, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    return {name: whole(name) for name in dict.fromkeys(name for part in parts for name in part)}


# --- cutting ---------------------------------------------------------------------------------------------


def _cut(rows: State, payloads: _Payloads, start: int, stop: int) -> State:
    """The block of clients start..stop−1."""
    here = np.flatnonzero((payloads.nodes >= start) & (payloads.nodes < stop))
    at = torch.from_numpy(here)
    numbers = {
        "serials": payloads.serials[here],
        "nodes": payloads.nodes[here],
        "slots": np.arange(len(here)),
        "free": np.zeros(0, dtype=np.int64),
    }
    pool = State(
        {f"rows/{name}": value[at] for name, value in payloads.rows.items()} | of_arrays(numbers),
        {"size": len(here)},
    )
    own = {name: value[start:stop] for name, value in rows.tensors.items()}
    whole = joined({"pool": pool}, rows.facts)
    return State(own | whole.tensors, whole.facts)


def _exchange(payloads: _Payloads, boards: Sequence[int], ranges: Ranges) -> State:
    """Where every payload is: with its owner, and of the server's boards each an object of its own."""
    sent, shown = len(payloads.serials), len(boards)
    stops = np.array([stop for _, stop in ranges])
    numbers = {
        "serials": np.concatenate([payloads.serials, np.array(boards, dtype=np.int64)]),
        "object": np.concatenate([np.full(sent, -1), np.arange(shown)]),
        "row": np.zeros(sent + shown, dtype=np.int64),
        "owner": np.concatenate(
            [np.searchsorted(stops, payloads.nodes, side="right"), np.full(shown, len(ranges))]
        ),
    }
    order = np.argsort(numbers["serials"])
    ordered = {name: column[order] for name, column in numbers.items()}
    living = np.stack([np.arange(shown), np.ones(shown, dtype=np.int64)], axis=1)
    return State(of_arrays(ordered | {"living": living}), {"next_object": shown})


# --- the server ------------------------------------------------------------------------------------------


def _without_old_boards(block: State, wanted: IntArray | None) -> State:
    """A server's block without what it sent that nobody takes any more."""
    if wanted is None:
        return block
    living = set(wanted.tolist())
    kept = {name: value for name, value in block.tensors.items()
            if not name.startswith("boards/") or int(name.split("/")[1]) in living}  # fmt: skip
    return State(kept, block.facts)


def _boards(block: State) -> dict[int, Tensors]:
    """What a server sent, by serial."""
    found: dict[int, Tensors] = {}
    for key, value in block.under("boards").tensors.items():
        serial, _, name = key.partition("/")
        found.setdefault(int(serial), {})[name] = value
    return found
