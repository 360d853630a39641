"""Whatever is public, given what it is not made for: it works, or a library error says why not.

Every argument of every public class and function gets every one of some hostile values, one at a time, beside
arguments that are good. What comes of it is a value (which, where it is registered, is written down and read
again), or an `AsyncfedError`. Nothing else, and soon. A number that is none never passes.
"""

from __future__ import annotations

import inspect
import json
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch

import asyncfed
import topologies
from asyncfed import AsyncfedError, Scenario, Study, Summary, data, models, network, problems, protocols
from asyncfed.data import IID, Dataset, client_data_from_lists
from asyncfed.mobilenet import mobilenet_v2
from asyncfed.network import Uniform, exact_expectations
from asyncfed.network.links import compile_network
from asyncfed.options import Options
from asyncfed.problems import (
    Layout,
    bilevel_quadratic,
    compositional,
    minimax_saddle,
    normal_mixture,
    quadratic,
)
from asyncfed.protocols import SGP
from asyncfed.registry import from_data, kind_of, registered, to_data
from tests.examples import arguments
from topologies import ring

NAN = float("nan")
NESTED: Any = []
for _ in range(5000):
    NESTED = [NESTED]


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


HOSTILE: tuple[Any, ...] = (
    None, True, "", "0.1", "abc", "x" * 10**6, "a\0b", "\ud800", b"1", NAN, math.inf, -math.inf, -1, 0, -0.0,
    0.5, 2.5, 1e308, -1e308, 5e-324, 10**9, 2**31, 2**63, 10**400, np.float32(0.1), np.float64("nan"),
    np.int64(3), np.bool_(True), np.array([0.5, 0.5]), np.array(["a"]), np.array(0.5), np.array([None, {}]),
    np.datetime64("2020-01-01"), torch.tensor(0.5), torch.zeros(2, 2), [], [[]], [NAN], [None], (1, 2),
    [[1, 2], [3]], NESTED, {}, {"a": 1}, {0: NAN}, {None: None}, {1}, range(3), object(), int, SGP, math, 1j,
    Decimal("0.1"), Fraction(1, 3), Unprintable(), SGP(1, 0.1), pd.DataFrame({"a": [1]}), nx.empty_graph(0),
    nx.MultiGraph([(0, 1), (0, 1)]), Path("/nowhere/at/all"),
)  # fmt: skip

NOT_MADE_BY_HAND = {
    *("Progress", "StudyProgress", "StudyResult", "HypergradientEstimate", "Shakespeare", "Adapted"),
    *(
        "Comparison",
        "Shakespeare",
        "Result",
        "RunStart",
        "PhaseStart",
        "EvaluationReport",
        "MessageSummary",
        "Names",
        "Buffers",
    ),
    *("Attendance", "Expectations", "Knowledge", "Recipe"),  # plain records between parts of the network
    *("Partition", "Presence", "Timing", "Weights", "Params", "DATASETS"),  # names of types and of datasets
    *("CIFAR100_CLASSES", "CIFAR100_SUPERCLASSES"),
    *("problem_factory", "recipe_type"),  # decorators, checked where they are used
}
LONG_BUT_RIGHT = {("hypergradient", "rounds"): 10**9}


def public() -> Iterator[tuple[str, Any]]:
    seen = set()
    for module in (asyncfed, topologies, network, data, problems, protocols):
        for name in module.__all__:
            thing = getattr(module, name)
            error = isinstance(thing, type) and issubclass(thing, BaseException)
            if name not in NOT_MADE_BY_HAND and not error and thing not in seen:
                seen.add(thing)
                yield f"{module.__name__}.{name}", thing
    for name in ("mlp", "cnn", "lenet", "emnist_cnn", "char_lstm", "logistic_regression", "build_model"):
        yield f"asyncfed.models.{name}", getattr(models, name)
    yield "asyncfed.mobilenet.mobilenet_v2", mobilenet_v2
    for name, thing in registered().items():
        if thing not in seen:
            yield f"registered {name}", thing
    yield "asyncfed.options.Options", Options


PUBLIC = dict(public())


def loss(inner: torch.Tensor, outer: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (inner - batch[0]).square().mean()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Arguments with which everything works, but for what is registered as a class."""
    folder = tmp_path_factory.mktemp("good")
    problem, net, one_step = quadratic(3, 2), compile_network(ring(3)), SGP(1, 0.1, batch=None)
    tilted, shares, shards = bilevel_quadratic(3, 2, 1, seed=1), Uniform().prepare(net), problem.data.train
    scenario = Scenario(problem=problem, topology=ring(3), protocol=one_step)
    result = asyncfed.run(scenario, out=folder / "run")
    study = Study("s", {"a": scenario}, lambda results: Summary())
    asyncfed.run_study(study, out=folder / "study", pictures=False)
    topologies.save(ring(3), folder / "graph.json")
    dataset = Dataset("d", torch.randn(40, 3), torch.arange(40) % 2, 2)
    one = client_data_from_lists([(dataset.x, dataset.y)])
    row = Layout(None, ((2,),))
    digits = {"dataset": "digits", "clients": 3, "limit": 200}
    return {
        "hypergradient": {"problem": tilted, "topology": ring(3), "inner": one_step, "rounds": 1},
        "compare": {},
        "export": {"run": folder / "run", "to": "csv"},
        "adapt": {"result": result, "problem": problem},
        "load": {"path": folder / "run"},
        "load_study": {"path": folder / "study"},
        "resume": {"path": folder / "run"},
        "run": {"scenario": scenario},
        "sweep": {"scenario": scenario, "settings": {"seed": [0]}, "workers": 1},
        "run_study": {"study": study, "pictures": False},
        "Scenario": {"problem": problem, "topology": ring(3), "protocol": SGP(1, 0.1)},
        "Study": {"name": "s", "parts": {"a": scenario}, "summarise": lambda results: Summary()},
        "SummaryTable": {"title": "t", "frame": pd.DataFrame({"a": [1]})},
        "Trace": {"directory": folder / "run" / "trace"},
        "by_distance": {"base": 1.0, "per_unit": 1.0},
        "edgeless": {"n": 3},
        "erdos_renyi": {"n": 5, "p": 0.9},
        "from_recipe": {"recipe": '{"generator": "ring", "arguments": {"n": 3}}'},
        "fully_connected": {"n": 3},
        "grid": {"rows": 2, "columns": 2},
        "from_file": {"path": folder / "graph.json"},
        "random_geometric": {"n": 4, "radius": 1.0},
        "random_graph": {"n": 5, "mean_degree": 3.0},
        "ring": {"n": 3},
        "save": {"graph": ring(3), "path": folder / "saved.json"},
        "small_world": {"n": 6, "neighbours": 2, "rewire": 0.1},
        "star": {"clients": 3},
        "stochastic_directed": {"n_or_base": 3},
        "stochastic_undirected": {"n_or_base": 3},
        "torus": {"rows": 2, "columns": 2},
        "with_devices": {"graph": ring(3), "devices": {"phone": topologies.Device()}},
        "with_links": {"graph": ring(3)},
        "exact_expectations": {"network": net, "shares": shares, "pace": np.ones(3)},
        "require_links_back": {"network": net},
        "require_undirected": {"network": net, "what": "this"},
        "Tally": {"network": net},
        "DebiasedShares": {"network": net, "expectations": exact_expectations(net, shares, np.ones(3))},
        "TransposedShares": {"network": net, "shares": shares},
        "ClientData": {"train": shards, "validation": shards, "test": shards},
        "ClientShards": {"tensors": shards.tensors, "sizes": shards.sizes},
        "Dataset": {"name": "d", "x": dataset.x, "y": dataset.y, "classes": 2},
        "class_counts": {"data": one, "classes": 2},
        "client_data": {"source": (dataset.x, dataset.y), "clients": 2},
        "client_data_from_lists": {"train": [(dataset.x, dataset.y)]},
        "has_test_part": {"name": "digits"},
        "load_dataset": {"name": "digits", "limit": 20},
        "load_dealt": {"name": "digits", "partition": "iid", "clients": 2, "limit": 20},
        "load_shakespeare": {"root": folder},
        "load_with_test": {"name": "digits", "limit": 20},
        "long_tail": {"dataset": dataset, "largest": 5, "ratio": 0.5},
        "long_tail_sizes": {"classes": 3, "largest": 5, "ratio": 0.5},
        "parse_partition": {"text": "iid"},
        "partition_data": {"dataset": dataset, "partition": IID(), "clients": 2, "seed": 0},
        "plot_class_counts": {"data": one, "classes": 2, "path": folder / "counts.png"},
        "Derivatives": {"problem": problem, "layout_inner": row, "layout_outer": Layout((), ())},
        "Layout": {"names": None, "shapes": ((2,),)},
        "Problem": {"name": "p", "data": problem.data, "init_inner": problem.init_inner, "inner_loss": loss},
        "Stages": {"encode": loss, "loss": loss},
        "Mixture": {"count": 2, "losses": loss},
        "Network": {"module": torch.nn.Linear(2, 2), "inner": loss},
        "mixture_truth": {"problem": normal_mixture(2, samples=3)},
        "normal_mixture": {"clients": 2, "samples": 3},
        "average_minimiser": {"problem": problem},
        "bilevel_quadratic": {"clients": 3, "dimension": 2},
        "classification": digits,
        "compositional": {"clients": 3},
        "compositional_solution": {"problem": compositional(3)},
        "from_module": {"module": models.mlp([3, 2]), "data": one},
        "hyper_representation": digits | {"model": "mlp:4"},
        "local_hypergradient_solution": {"problem": bilevel_quadratic(2, 2, 1, seed=1)},
        "logistic_pair": {"dataset": "digits", "samples": 5},
        "loss_tuning": {"dataset": "digits", "clients": 3, "model": "mlp:4", "largest": 100, "ratio": 0.5},
        "minimax_saddle": {"clients": 3},
        "personalized": {
            "name": "p", "data": one, "module": models.mlp([3, 2]), "classes": 2, "personalize": "none",
        },
        "personalized_characters": {},
        "personalized_classification": digits,
        "problem_from_recipe": {"data": {"factory": "quadratic", "arguments": {}}},
        "quadratic": {"clients": 3, "dimension": 2},
        "regularization_tuning": digits,
        "saddle_point": {"problem": minimax_saddle(3, 2)},
        "shared_hypergradient": {"problem": tilted, "lam": torch.zeros(1, dtype=torch.float64)},
        "shared_solution": {"problem": tilted},
        "mlp": {"sizes": [2, 3, 2]},
        "mobilenet_v2": {"classes": 2, "width": 0.1},
        "char_lstm": {"hidden": 4},
        "logistic_regression": {"inputs": 2, "classes": 2},
        "build_model": {"spec": "logistic", "inputs": 3, "classes": 2},
    }  # fmt: skip


@contextmanager
def soon(seconds: float) -> Iterator[None]:
    """Within so much time of a core, however busy the machine is."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def is_no_number(value: Any) -> bool:
    """NaN, or a list or a mapping of it."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return any(isinstance(item, (float, np.floating)) and math.isnan(item) for item in inside)


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_value_is_refused_in_words(
    name: str, good: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where text is taken for a path
    monkeypatch.setenv("ASYNCFED_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ASYNCFED_DATA", str(tmp_path / "no data"))
    thing, short = PUBLIC[name], name.rpartition(".")[2]
    is_class = isinstance(thing, type) and thing in registered().values()
    usual = arguments(thing) if is_class else good.get(name, good.get(short, {}))
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for value in HOSTILE:
            if value is LONG_BUT_RIGHT.get((short, parameter.name), "none"):
                continue
            case = f"{name}({parameter.name}={type(value).__name__}(…))"
            try:
                with soon(20):
                    if parameter.kind is parameter.VAR_POSITIONAL:
                        made = thing(value, **usual)
                    else:
                        made = thing(**usual | {parameter.name: value})
            except AsyncfedError as refused:
                if not 10 < len(str(refused)) < 10_000:
                    raise AssertionError(f"{case} is refused with {refused!s:.300}") from None
                continue
            except Exception as error:
                raise AssertionError(f"{case} ends in {type(error).__name__}: {error!s:.300}") from error
            assert not is_no_number(value), f"{case} takes a number that is none"
            if is_class:
                written = json.loads(json.dumps(to_data(made), allow_nan=False))
                again = from_data(written)
                assert kind_of(made) == "duration" or again == made, f"{case} is read as {again}"
