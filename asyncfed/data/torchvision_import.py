"""Import torchvision, and let it download; also where its compiled operators could not be loaded.

A torchvision built for CUDA next to a CPU-only torch fails at import ("operator torchvision::nms does not
exist"), because it registers output shapes for operators that are not there. Datasets need none of them. So
that one registration may fail, during this import and at no other time; whatever else goes wrong is raised as
usual.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from asyncfed.errors import DataError

_FORBIDDEN = ContextVar("_FORBIDDEN", default=False)


@contextmanager
def no_downloads() -> Iterator[None]:
    """Within this, data that is not on disk is an error, whoever asks for a download: a file may not."""
    before = _FORBIDDEN.set(True)
    try:
        yield
    finally:
        _FORBIDDEN.reset(before)


def import_torchvision(module: str = "torchvision") -> ModuleType:
    """torchvision, or one of its modules such as "torchvision.datasets.mnist"."""
    with _missing_operators_tolerated():
        return importlib.import_module(module)


def download_into(root: Path, name: str, kind: str, **options: Any) -> None:
    """Let torchvision's dataset class of that kind fetch its files."""
    if _FORBIDDEN.get():
        raise DataError(
            f"dataset {name!r} is not in {root}, and nothing is downloaded on behalf of a file; fetch it "
            f"first, with asyncfed.data.load_dataset({name!r}, download=True), or set ASYNCFED_DATA to a "
            "directory that holds it"
        )
    datasets = import_torchvision("torchvision.datasets")
    try:
        getattr(datasets, kind)(root, download=True, **options)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"dataset {name!r} could not be downloaded into {root} ({error}); "
            "put the files there by hand, or set ASYNCFED_DATA to a directory that holds them"
        ) from error


@contextmanager
def _missing_operators_tolerated() -> Iterator[None]:
    original = torch.library.register_fake

    def tolerant(op: Any, func: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            try:
                original(op, function, **options)
            except RuntimeError as error:
                if not (str(op).startswith("torchvision::") and "does not exist" in str(error)):
                    raise
            return function

        return register if func is None else register(func)

    torch.library.register_fake = tolerant
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Failed to load image Python extension")
            yield
    finally:
        torch.library.register_fake = original
