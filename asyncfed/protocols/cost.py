"""What a client computes, as a method declares it: the price that its papers count beside rounds and bytes.

A *gradient* is one of either loss, in either variable or in both at once, of one minibatch (or of all of a
client's samples, where a step uses these). A *Hessian product* is one of second derivatives with one vector,
likewise: ∇²_x f u, ∂_λ ∇_x f u, or both of one u. Judging costs nothing, and neither do forward passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Cost:
    """Of each of some clients: an array over them, or one number for all."""

    gradients: IntArray | int = 0
    hessian_products: IntArray | int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.gradients + other.gradients, self.hessian_products + other.hessian_products)

    def __mul__(self, times: IntArray | int) -> Cost:
        return Cost(self.gradients * times, self.hessian_products * times)

    def of(self, clients: int) -> dict[str, IntArray]:
        """By the names that the columns of a run's tables have, an array each."""
        return {
            name: np.broadcast_to(np.asarray(value, dtype=np.int64), (clients,))
            for name, value in vars(self).items()
        }
