"""The bare mathematics: SGP (4b) written by hand, with no network, trace or runtime around it.

`VmappedLoop` uses the same vmapped gradients in the same chunks and the same dense mixing as asyncfed;
`HandBatched` writes the network's gradient out as batched matrix products, the real floor.
"""

from __future__ import annotations

import torch
from torch.func import grad_and_value, vmap

from asyncfed.problems import Problem
from asyncfed.problems.derivatives import Derivatives


class VmappedLoop:
    """z ← P z − α ∇f(z/ω), ω ← P ω, for all clients, gradients through vmap in chunks."""

    def __init__(self, problem: Problem, *, batch: int, lr: float, chunk: int, seed: int = 0) -> None:
        n = problem.clients
        self.n, self.batch, self.lr, self.chunk = n, batch, lr, chunk
        layout = Derivatives.of(problem).inner
        self.layout = layout
        start = layout.flatten(problem.init_inner(torch.Generator().manual_seed(seed)))
        self.z, self.omega = start.expand(n, -1).clone(), torch.ones(n, 1)
        self.work, self.descent = torch.empty_like(self.z), torch.empty_like(self.z)
        self.shards = problem.data.to(torch.float32).train
        self.sizes = torch.from_numpy(self.shards.sizes)
        self.generator = torch.Generator().manual_seed(seed)
        self.mixing = mixing(n, self.generator)
        self.gradient = vmap(grad_and_value(lambda x, batch: problem.inner_loss(x, {}, batch)))

    def step(self) -> None:
        index = (torch.rand(self.n, self.batch, generator=self.generator) * self.sizes[:, None]).long()
        for start in range(0, self.n, self.chunk):
            here = slice(start, min(start + self.chunk, self.n))
            batch = self.shards.gather(torch.arange(here.start, here.stop), index[here])
            x = self.z[here] / self.omega[here]
            gradient, _ = self.gradient(self.layout.views(x), batch)
            into = self.layout.views(self.descent[here])
            for name, value in gradient.items():
                torch.mul(value, -self.lr, out=into[name])
        self.descent.addmm_(self.mixing, self.z)
        self.z, self.descent, self.work = self.descent, self.work, self.z
        self.omega = self.mixing @ self.omega


class HandBatched:
    """The same for an MLP with one hidden layer, gradients written out as batched matrix products."""

    def __init__(self, problem: Problem, *, batch: int, lr: float, seed: int = 0) -> None:
        self.loop = VmappedLoop(problem, batch=batch, lr=lr, chunk=problem.clients, seed=seed)
        layout = self.loop.layout
        assert list(layout.names or ()) == ["hidden1.weight", "hidden1.bias", "head.weight", "head.bias"], (
            layout.names
        )

    def step(self) -> None:
        loop = self.loop
        index = (torch.rand(loop.n, loop.batch, generator=loop.generator) * loop.sizes[:, None]).long()
        for start in range(0, loop.n, 25):
            here = slice(start, min(start + 25, loop.n))
            x, y = loop.shards.gather(torch.arange(here.start, here.stop), index[here])
            x = x.flatten(2)
            w1, b1, w2, b2 = loop.layout.leaves(loop.layout.views(loop.z[here] / loop.omega[here]))
            pre = torch.baddbmm(b1[:, None], x, w1.transpose(1, 2))
            hidden = pre.relu()
            out = torch.baddbmm(b2[:, None], hidden, w2.transpose(1, 2))
            delta = torch.softmax(out, -1)
            delta.scatter_add_(2, y[..., None], -torch.ones_like(y, dtype=delta.dtype)[..., None])
            delta *= -loop.lr / loop.batch
            back = torch.bmm(delta, w2) * (pre > 0)
            g1, c1, g2, c2 = loop.layout.leaves(loop.layout.views(loop.descent[here]))
            torch.bmm(back.transpose(1, 2), x, out=g1)
            torch.sum(back, 1, out=c1)
            torch.bmm(delta.transpose(1, 2), hidden, out=g2)
            torch.sum(delta, 1, out=c2)
        loop.descent.addmm_(loop.mixing, loop.z)
        loop.z, loop.descent, loop.work = loop.descent, loop.work, loop.z
        loop.omega = loop.mixing @ loop.omega


def mixing(n: int, generator: torch.Generator) -> torch.Tensor:
    """A column-stochastic matrix like those of stochastic directed links with probabilities around 0.6."""
    links = (torch.rand(n, n, generator=generator) < 0.6).float()
    links.fill_diagonal_(1.0)
    return links / links.sum(0)
