"""Over all of each client's samples: metrics, and derivatives as means, in pieces of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncfed.data import ClientShards
from asyncfed.problems.derivatives import Derivatives
from asyncfed.problems.layout import Layout
from asyncfed.problems.problem import Batch

# At most this many bytes at a time, counting a sample as 32 times its own size, which leaves room for the
# activations of the networks here (33 times for the EMNIST network).
_BUDGET = 64 * 2**20
_BYTES_PER_INPUT_BYTE = 32
_WHOLE_SAMPLES = 2048  # at a time, in derivatives over all data: their activations stay alive


def evaluate(
    derivatives: Derivatives, x: Tensor, lam: Tensor, shards: ClientShards
) -> dict[str, tuple[Tensor, Tensor]]:
    """For every metric, its sum over all of each client's samples (k,) and how many they are (k,).

    `shards` holds the same k clients as x and lam. Clients of similar size are padded to the largest
    among them (with their own last sample) and the padding is masked out, in pieces of bounded memory.
    """
    counts = torch.from_numpy(shards.sizes).to(x.device)
    sums = {name: x.new_zeros(len(x)) for name in derivatives.problem.metrics}
    most_clients = max(1, _BUDGET // max(1, x[:1].nbytes))
    for clients, start, stop in _pieces(counts, samples_at_once(shards), most_clients):
        sizes = counts[clients].unsqueeze(1)
        index = torch.arange(start, stop, device=x.device)
        batch = shards.gather(clients, torch.minimum(index, sizes - 1))
        values = [x.new_empty(len(clients), stop - start) for _ in sums]
        row = Layout(None, ((stop - start,),))
        outputs = tuple((row, value, None) for value in values)
        derivatives.kernels.run("metrics", (x[clients], lam[clients], batch), outputs)
        for total, value in zip(sums.values(), values, strict=True):
            total.index_add_(0, clients, torch.where(index < sizes, value, 0.0).sum(1))
    return {name: (total, counts) for name, total in sums.items()}


def evaluate_common(
    derivatives: Derivatives, x: Tensor, lam: Tensor, shards: ClientShards
) -> dict[str, Tensor]:
    """`evaluate` for variables x (d,) and lam (d_outer,) that all clients share: one pass over all
    samples, and the sums of each client (k,).
    """
    sums = {name: x.new_zeros(shards.clients) for name in derivatives.problem.metrics}
    owner = torch.from_numpy(np.repeat(np.arange(shards.clients), shards.sizes)).to(x.device)
    inner, outer = derivatives.inner.views_one(x), derivatives.outer.views_one(lam)
    most = samples_at_once(shards)
    with torch.no_grad():
        for start in range(0, shards.total, most):
            batch = tuple(t[start : start + most] for t in shards.tensors)
            batch += tuple(row[0] for row in shards.beside)  # the same for all
            for name, values in derivatives.problem.measured(inner, outer, batch).items():
                sums[name].index_add_(0, owner[start : start + most], values)
    return sums


def whole_outer_gradients(
    derivatives: Derivatives, x: Tensor, lam: Tensor, shards: ClientShards
) -> tuple[Tensor, Tensor, Tensor]:
    """`outer_gradients` over all of each client's samples: a mean over pieces, weighed by their sizes.

    A client's samples are cut into pieces of 128, and the rest into halves of that, so that clients of
    any sizes can be computed together piece by piece.
    """
    by_x, by_lam, value = torch.zeros_like(x), torch.zeros_like(lam), x.new_zeros(len(x))
    for rows, batch, share in _whole(shards, x):
        found = derivatives.outer_gradients(x[rows], lam[rows], batch)
        by_x.index_add_(0, rows, found[0].mul_(share[:, None]))
        by_lam.index_add_(0, rows, found[1].mul_(share[:, None]))
        value.index_add_(0, rows, found[2] * share)
    return by_x, by_lam, value


def whole_inner_jacobians(
    derivatives: Derivatives, x: Tensor, lam: Tensor, shards: ClientShards
) -> tuple[Tensor, Tensor]:
    """∇²_x f (k, d, d) and ∂_λ ∇_x f (k, d_outer, d) over all of each client's samples; for small d."""
    hessian = x.new_zeros(len(x), derivatives.inner.d, derivatives.inner.d)
    cross = x.new_zeros(len(x), derivatives.outer.d, derivatives.inner.d)
    units = torch.eye(derivatives.inner.d, dtype=x.dtype, device=x.device)
    for rows, batch, share in _whole(shards, x):
        directions = tuple(unit.expand(len(rows), -1) for unit in units)
        products, crossed = derivatives.inner_second_vectors(x[rows], lam[rows], batch, directions)
        hessian.index_add_(0, rows, torch.stack(products, 2) * share[:, None, None])
        cross.index_add_(0, rows, torch.stack(crossed, 2) * share[:, None, None])
    return hessian, cross


def samples_at_once(shards: ClientShards) -> int:
    """How many samples a network may look at together, without derivatives, in bounded memory."""
    sample_bytes = sum(tensor[:1].nbytes for tensor in shards.tensors)
    return max(1, _BUDGET // max(1, sample_bytes * _BYTES_PER_INPUT_BYTE))


def _whole(shards: ClientShards, x: Tensor) -> Iterator[tuple[Tensor, Batch, Tensor]]:
    """(clients, as many samples of each, which share of all its samples that is), all of everybody's."""
    most = max(1, _BUDGET // 4 // max(1, x[:1].nbytes))
    for clients, start, length in _whole_pieces(shards.sizes, most, _WHOLE_SAMPLES):
        rows = torch.from_numpy(clients).to(x.device)
        index = torch.from_numpy(start[:, None] + np.arange(length)).to(x.device)
        share = torch.from_numpy(length / shards.sizes[clients]).to(x)
        yield rows, shards.gather(rows, index), share


def _whole_pieces(
    sizes: npt.NDArray[np.int64], most: int, samples: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]]:
    """(clients, where each one's piece starts, its length), at most `most` clients and about `samples`
    samples at a time, such that the pieces of a client are all of its samples.
    """
    done = np.zeros_like(sizes)
    length = 128
    while length:
        together = min(most, max(1, samples // length))
        while len(clients := np.flatnonzero(sizes - done >= length)):
            for start in range(0, len(clients), together):
                some = clients[start : start + together]
                yield some, done[some], length
            done[clients] += length
        length //= 2


def _pieces(counts: Tensor, samples: int, most_clients: int) -> Iterator[tuple[Tensor, int, int]]:
    """(clients, start, stop): all samples of everybody, similar sizes together, about `samples` at a time."""
    order = torch.argsort(counts, descending=True, stable=True)
    order = order[counts[order] > 0]
    while len(order):
        largest = int(counts[order[0]])
        length = min(largest, samples)
        together = min(most_clients, max(1, samples // length))
        clients, order = order[:together], order[together:]
        for start in range(0, largest, length):
            yield clients, start, min(start + length, largest)
