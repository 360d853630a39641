"""Links, timing and mixing weights: everything the network decides, without a single model value."""

from asyncfed.network.distributions import Constant, Exponential, LogNormal, Table
from asyncfed.network.distributions import Uniform as UniformTime
from asyncfed.network.expectations import (
    DebiasedShares,
    Expectations,
    Knowledge,
    Tally,
    TransposedShares,
    exact_expectations,
    require_links_back,
    require_undirected,
)
from asyncfed.network.timing import Lockstep, Timing, VirtualTime
from asyncfed.network.weights import FastestMixing, Given, Metropolis, Uniform, Weights

__all__ = [
    "Constant",
    "DebiasedShares",
    "Expectations",
    "Exponential",
    "FastestMixing",
    "Given",
    "Knowledge",
    "Lockstep",
    "LogNormal",
    "Metropolis",
    "Table",
    "Tally",
    "Timing",
    "TransposedShares",
    "Uniform",
    "UniformTime",
    "VirtualTime",
    "Weights",
    "exact_expectations",
    "require_links_back",
    "require_undirected",
]
