"""How heterogeneous is it? Samples per client and class, as a table and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncfed.checks import PathLike, checked, shown
from asyncfed.data.datasets import Classes
from asyncfed.data.shards import ClientData, ClientShards
from asyncfed.errors import DataError

if TYPE_CHECKING:
    import pandas as pd


@checked(error=DataError)
def class_counts(data: ClientData | ClientShards, classes: Classes) -> pd.DataFrame:
    """Number of samples, one row per client and one column per class.

    The labels are the last of the tensors. For `ClientData` the three splits are added up.
    """
    import pandas as pd

    splits = (data.train, data.validation, data.test) if isinstance(data, ClientData) else (data,)
    counts = np.zeros((data.clients, classes), dtype=np.int64)
    for split in splits:
        client = torch.from_numpy(np.repeat(np.arange(split.clients), split.sizes))
        cells = client * classes + split.tensors[-1].cpu()
        counts += torch.bincount(cells, minlength=counts.size).numpy().reshape(counts.shape)
    return pd.DataFrame(
        counts, index=pd.RangeIndex(data.clients, name="client"), columns=pd.RangeIndex(classes, name="class")
    )


@checked(error=DataError)
def plot_class_counts(data: ClientData | ClientShards, classes: Classes, path: PathLike) -> None:
    """Draw `class_counts` as bubbles whose area is the number of samples, and save the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = class_counts(data, classes).to_numpy()
    client, label = np.nonzero(counts)
    figure = Figure(
        figsize=(2 + 0.22 * min(len(counts), 60), 1.6 + 0.22 * min(classes, 62)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.scatter(client, label, s=180 * counts[client, label] / max(1, counts.max()), linewidths=0)
    axes.set(xlabel="client", ylabel="class", xlim=(-1, len(counts)), ylim=(-1, classes))
    axes.set_title(f"samples per client and class (largest bubble: {counts.max()})", fontsize=9)
    axes.locator_params(integer=True)
    axes.grid(alpha=0.2)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise DataError(f"the picture {shown(path)} cannot be drawn: {error!s:.300}; give a .png") from error
