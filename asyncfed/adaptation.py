"""Unseen clients: what a run left, on the data of clients that it never saw.

    adapted = asyncfed.adapt(result, problem_of_new_clients)
    adapted.metrics["accuracy"], adapted.clients

Nothing is trained in common and nothing is sent: every new client does for itself what its method says
(`asyncfed/protocols/adapting.py`) with its training samples, and is judged on its test samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncfed.checks import NonNegativeInt, checked
from asyncfed.errors import ScenarioError
from asyncfed.options import Options
from asyncfed.problems import Derivatives, Problem
from asyncfed.problems.checking import check_data, check_functions
from asyncfed.protocols.adapting import adaptation_of, check_in_common
from asyncfed.protocols.part import Method, Sizes
from asyncfed.result import Result
from asyncfed.rows import means
from asyncfed.runtime.block import Block
from asyncfed.runtime.evaluation import require_finite
from asyncfed.runtime.local import choose_device
from asyncfed.scenario import require_moved

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Adapted:
    """What new clients are worth: `metrics` over all of their test samples, with the names of a run's, and
    `clients` with a row for each.
    """

    metrics: dict[str, float]
    clients: pd.DataFrame


@checked
def adapt(
    result: Result,
    problem: Problem,
    *,
    steps: NonNegativeInt | None = None,
    method: Method | None = None,
    seed: int | None = None,
    device: str = "auto",
) -> Adapted:
    """Judge new clients by what a run left.

    Parameters
    ----------
    result
        Of a run that is complete, with its final variables (`save_final=True`, where it is opened again).
    problem
        The same problem with the data of other clients.
    steps
        How many steps new clients make, where their method makes some: of fine-tuning (`MetaFL`), of E and π
        steps (`FedEM`), of λ (`PDBO`). By default as many as the method says.
    method
        In place of the run's own: FedAvgPlus(…) for a model of FedAvg, say.
    seed
        Of what new clients draw; by default the run's.
    device
        As of `run`.
    """
    import pandas as pd

    device = choose_device(Options(device=device).device, torch.cuda.is_available())
    data = result.scenario_data
    derivatives = Derivatives.of(problem)
    sizes = Sizes(derivatives.inner.d, derivatives.outer.d, problem.clients)
    final = result.final
    for name, length in (("inner", sizes.inner), ("outer", sizes.outer)):
        if final[name].shape[1] != length:
            raise ScenarioError(
                f"the {name} variable of problem {problem.name!r} has {length} numbers, and that of "
                f"{result.path} has {final[name].shape[1]}; give the same problem, with other clients' data"
            )
    check_in_common(result.method, len(final["inner"]))
    check_functions(problem)
    check_data(problem)
    if method is None:
        method = result.method
    else:
        require_moved(problem, method)
    act = adaptation_of(method, problem, sizes, steps)
    dtype = torch.float64 if data["precision"] == "float64" else torch.float32
    everyone = np.arange(problem.clients, dtype=np.int64)
    seed = int(data["seed"]) if seed is None else seed
    n = int(result.manifest["clients"])
    initial = {}
    if problem.local_buffers is not None:  # new clients have noted nothing: what the others have, on average
        noted = final["buffers"] if "buffers" in final else final["clients/buffers"]
        initial["buffers"] = noted.mean(0).to(dtype).repeat(problem.clients, 1)
    block = Block(problem, everyone, seed=seed, dtype=dtype, device=device, n=n, initial=initial)
    common = {"y": final["inner"].mean(0), "x": final["outer"].mean(0), "lam": block.store["outer"][0]}
    found = block.judge(act, {name: value.to(device, dtype) for name, value in common.items()})
    require_finite([found], np.zeros_like(everyone))
    rows: dict[str, Any] = {"client": found.clients, "samples": found.counts}
    with np.errstate(invalid="ignore"):
        rows |= {name: sums / found.counts for name, sums in found.sums.items()}
    return Adapted(means(found.sums, found.counts), pd.DataFrame(rows))
