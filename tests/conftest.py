"""What tests share: one Ray cluster for all that need it, in one process, and so with the browser; one torch
thread in each, so that small steps do not fight for cores. Tests of a file share a process, for they share
what they made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = item.nodeid.split("::")[0]
        if item.get_closest_marker("ray") and "test_clusters" not in group:  # which has clusters of its own
            group = "ray"
        if item.get_closest_marker("browser"):
            group = "browser"
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session", autouse=True)
def _process() -> None:
    torch.set_num_threads(1)
    os.environ.pop("COLUMNS", None)  # pytest-xdist says 80, and the command line would mind it


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A real Ray cluster on this machine, started once; its actors go from run to run, as in a study."""
    import ray

    from asyncfed.runtime.ray_actors import actors_kept

    if not ray.is_initialized():
        ray.init(
            address="local", include_dashboard=False, num_cpus=2, log_to_driver=False, logging_level="error"
        )
    with actors_kept():
        yield
    ray.shutdown()


@pytest.fixture
def own_actors(ray_cluster: None) -> Iterator[None]:
    """Actors that are hired for this test and end with its runs."""
    from asyncfed.runtime.ray_actors import actors_kept

    with actors_kept(False):
        yield
