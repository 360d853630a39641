"""What tests share: one Ray cluster for all that need it, and one torch thread, so that small steps do not
fight for cores.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A real Ray cluster on this machine, started once."""
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local", include_dashboard=False, num_cpus=2, log_to_driver=False, logging_level="error"
        )
    yield
    ray.shutdown()
