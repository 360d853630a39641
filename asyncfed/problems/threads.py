"""How many threads a computation is worth: sharing a small one costs more than it saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORTH_SHARING = 10_000_000  # multiplications in a forward pass


@contextmanager
def worthwhile_threads(multiplications: int) -> Iterator[None]:
    """One torch thread for a computation as small as that, all there are for others. The rule looks at sizes
    only, so that what is computed can be repeated.
    """
    available = torch.get_num_threads()
    if multiplications >= WORTH_SHARING or available == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(available)
