"""Where to draw the nodes of a graph that says nothing about it: those with links near one another.

Forces as of Fruchterman and Reingold: every two nodes repel, linked ones attract. They are computed between
all pairs, so a graph of many nodes takes the two slowest vibrations of its links instead (a spectral layout).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MOST_PAIRS = 1200  # nodes whose pairs are all looked at
_ROUNDS = 80


def spring(nodes: int, sender: Ints, receiver: Ints) -> Floats:
    """(nodes, 2), within [-1, 1]; the same for the same links."""
    linked = sender != receiver
    pairs = np.unique(np.sort(np.stack([sender[linked], receiver[linked]]), axis=0), axis=1)
    start = _circle(nodes) if nodes < 4 or not pairs.size else _spectral(nodes, pairs)
    where = _forced(start, pairs) if 2 < nodes <= _MOST_PAIRS else start
    where = where - (where.max(axis=0) + where.min(axis=0)) / 2
    fitted: Floats = where / max(float(np.abs(where).max()), 1e-12)
    return fitted


def _circle(nodes: int) -> Floats:
    angle = 2 * np.pi * np.arange(nodes) / nodes
    return np.stack([np.sin(angle), -np.cos(angle)], axis=1)


def _spectral(nodes: int, pairs: Ints) -> Floats:
    """The two eigenvectors of the random walk that change least along links."""
    from scipy.sparse import coo_array, diags_array
    from scipy.sparse.linalg import ArpackError, eigsh

    ends, starts = np.concatenate([pairs, pairs[::-1]], axis=1)
    links = coo_array((np.ones(len(ends)), (ends, starts)), (nodes, nodes)).tocsr()
    scale = diags_array(1 / np.sqrt(np.maximum(links.sum(axis=1), 1)))
    try:
        _, vectors = eigsh(scale @ links @ scale, k=3, which="LA", v0=np.ones(nodes), tol=1e-3, maxiter=2000)
    except ArpackError:
        return _circle(nodes)
    spread: Floats = vectors[:, :2] * np.sqrt(nodes)
    nearer: Floats = spread / (1 + np.abs(spread))  # so that who is far out leaves room for the others
    return nearer + 0.01 * _circle(nodes)


def _forced(where: Floats, pairs: Ints) -> Floats:
    nodes = len(where)
    apart = 2.0 / np.sqrt(nodes)
    where = where / max(float(np.abs(where).max()), 1e-12)
    for number in range(_ROUNDS):
        length = (where**2).sum(axis=1)
        weight = apart**2 / np.maximum(length[:, None] + length[None, :] - 2 * where @ where.T, 1e-6)
        push = where * weight.sum(axis=1)[:, None] - weight @ where
        along = where[pairs[0]] - where[pairs[1]]
        pull = along * (np.sqrt((along**2).sum(axis=1)) / apart)[:, None]
        np.add.at(push, pairs[0], -pull)
        np.add.at(push, pairs[1], pull)
        force = np.sqrt((push**2).sum(axis=1))[:, None] + 1e-9
        where = where + push / force * np.minimum(force, 0.1 * (1 - number / _ROUNDS))
    return where
