"""Links, timing and mixing weights: everything the network decides, without a single model value."""

from asyncfed.network.distributions import Constant, Exponential, LogNormal, Table
from asyncfed.network.distributions import Uniform as UniformTime
from asyncfed.network.timing import Lockstep, Timing, VirtualTime
from asyncfed.network.weights import FastestMixing, Given, Metropolis, Uniform, Weights

__all__ = [
    "Constant",
    "Exponential",
    "FastestMixing",
    "Given",
    "Lockstep",
    "LogNormal",
    "Metropolis",
    "Table",
    "Timing",
    "Uniform",
    "UniformTime",
    "VirtualTime",
    "Weights",
]
