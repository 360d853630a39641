"""Samples from anywhere, as columns: one tensor for each thing that a sample consists of.

    a tuple of arrays           (x, y): sample i is (x[i], y[i])
    a dict of arrays            {"image": …, "label": …}
    one array                   samples without a label
    a list of samples           [(x, y), …], or [{"image": …, "label": …}, …], or [x, …]
    a Dataset of torch          map-style: len() and [i] give such samples
    a table                     a pandas DataFrame, or what has columns as that has
    a Hugging Face dataset      or what has `column_names` and gives a column by its name

Numbers with a point become float32 (or stay float64), whole numbers int64, bytes float32; pictures become
float32 in [0, 1] with channels first, as torchvision's ToTensor makes them; texts are numbered in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncfed.checks import shown
from asyncfed.errors import DataError

Columns = dict[str, Tensor]
Transform = Callable[[Any], Any]


def columns_of(source: Any, transform: Transform | None, inputs: Sequence[str] | None) -> Columns:
    """Of a source; `transform` is applied once to what comes first in each sample, or to `inputs`."""
    raw = _raw(source)
    if not raw:
        raise DataError("the samples consist of nothing; give at least one array")
    if transform is not None:
        for name in inputs or [next(iter(raw))]:
            if name in raw:
                raw[name] = [transform(one) for one in raw[name]]
    found = {name: _tensor(values, name) for name, values in raw.items()}
    lengths = {name: len(tensor) for name, tensor in found.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"the columns have different numbers of samples: {lengths}; give equally many of each"
        )
    return found


def is_table(source: Any) -> bool:
    """Whether it is a DataFrame, or something like it."""
    return hasattr(source, "columns") and hasattr(source, "to_numpy")


def _raw(source: Any) -> dict[str, Any]:
    if is_table(source):
        return {str(name): source[name].to_numpy() for name in source.columns}
    if isinstance(source, Mapping):
        return {str(name): values for name, values in source.items()}
    if hasattr(source, "column_names") and hasattr(source, "__getitem__"):
        return {str(name): source[name][:] for name in source.column_names}
    if isinstance(source, tuple):
        return {str(place): values for place, values in enumerate(source)}
    if isinstance(source, (np.ndarray, Tensor)):
        return {"0": source}
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return _of_samples([source[place] for place in range(len(source))])
    raise DataError(
        f"samples cannot be read from a {type(source).__name__}; give a tuple or dict of arrays, a list of "
        "samples, a map-style Dataset, a DataFrame, or a Hugging Face dataset"
    )


def _of_samples(samples: list[Any]) -> dict[str, Any]:
    if not samples:
        raise DataError("there are no samples; give at least one")
    kind = type(samples[0])
    for place, sample in enumerate(samples):
        if isinstance(sample, Mapping) != isinstance(samples[0], Mapping) or (
            isinstance(samples[0], (Mapping, tuple))
            and (not isinstance(sample, (Mapping, tuple)) or _parts(sample) != _parts(samples[0]))
        ):
            raise DataError(
                f"sample {place} is {_form(sample)}, and sample 0 is {_form(samples[0])}; all must consist "
                "of the same"
            )
    if issubclass(kind, Mapping):
        return {str(name): [sample[name] for sample in samples] for name in samples[0]}
    if issubclass(kind, tuple):
        return {str(place): [sample[place] for sample in samples] for place in range(len(samples[0]))}
    return {"0": samples}


def _parts(sample: Any) -> Any:
    return sorted(sample) if isinstance(sample, Mapping) else len(sample)


def _form(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return f"a mapping of {', '.join(map(str, sample))}"
    if isinstance(sample, tuple):
        return f"a tuple of {len(sample)}"
    return f"a {type(sample).__name__}"


def _tensor(values: Any, name: str) -> Tensor:
    """One column."""
    if isinstance(values, Tensor):
        found = values.detach().cpu()
    elif isinstance(values, np.ndarray) and values.dtype != object:
        found = _from_array(values, name)
    else:
        found = _stacked(list(values) if isinstance(values, Iterable) else [values], name)
    if not found.ndim:
        raise DataError(f"column {name!r} is a single number; give one entry for each sample")
    return _plain(found)


def _stacked(values: list[Any], name: str) -> Tensor:
    if not values:
        raise DataError(f"column {name!r} has no samples; give at least one")
    if all(isinstance(value, str) for value in values):
        return _from_array(np.array(values), name)
    each = [_one(value, name, place) for place, value in enumerate(values)]
    for place, tensor in enumerate(each):
        if tensor.shape != each[0].shape:
            raise DataError(
                f"sample {place} of column {name!r} has shape {tuple(tensor.shape)}, and sample 0 has "
                f"{tuple(each[0].shape)}; all must be alike: cut, pad or resize them (transform=…)"
            )
    kind = torch.float64 if any(tensor.dtype == torch.float64 for tensor in each) else None
    floats = any(tensor.is_floating_point() for tensor in each)
    return torch.stack([tensor.to(kind or torch.float32) if floats else tensor for tensor in each])


def _one(value: Any, name: str, place: int) -> Tensor:
    if isinstance(value, Tensor):
        return _plain(value.detach().cpu())
    if hasattr(value, "getbands") and hasattr(value, "size"):  # a picture of PIL
        pixels = np.atleast_3d(np.asarray(value)).transpose(2, 0, 1)
        return torch.from_numpy(np.ascontiguousarray(pixels)).float() / 255
    if isinstance(value, (bool, int, float, np.generic)):
        if isinstance(value, float):
            return torch.tensor(value, dtype=torch.float32)
        return _plain(torch.as_tensor(np.asarray(value)))
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty(0, dtype=object)  # lists of different lengths
    if array.dtype == object or array.dtype.kind not in "biuf":
        raise DataError(
            f"sample {place} of column {name!r} is {shown(value, 60)}, which is no array of numbers; leave "
            "the column out (x=…, y=…), or make it one (transform=…)"
        )
    listed = isinstance(value, (list, tuple)) and array.dtype == np.float64
    return _plain(torch.from_numpy(array.astype(np.float32) if listed else array.copy()))


def _from_array(values: np.ndarray[Any, Any], name: str) -> Tensor:
    if values.dtype.kind in "US":
        return torch.from_numpy(np.unique(values, return_inverse=True)[1].astype(np.int64).reshape(-1))
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"column {name!r} holds {values.dtype}, which are no numbers; leave it out (x=…, y=…), or make "
            "it numbers"
        )
    return torch.from_numpy(np.ascontiguousarray(values) if values.flags.writeable else values.copy())


def _plain(tensor: Tensor) -> Tensor:
    """float32, float64 or int64."""
    if tensor.dtype in (torch.float32, torch.float64, torch.int64):
        return tensor
    if tensor.is_floating_point() or tensor.dtype == torch.uint8:
        return tensor.float()
    if tensor.is_complex():
        raise DataError("complex numbers are no samples; give their parts as two columns")
    return tensor.long()
