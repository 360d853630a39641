"""Links, timing and mixing weights: everything the network decides, without a single model value."""

from asyncfed.network.distributions import (
    Constant,
    Exponential,
    Geometric,
    LogNormal,
    Table,
    Weibull,
)
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
from asyncfed.network.names import Names
from asyncfed.network.over_time import Bursts, LinkTimes, VaryingProbability
from asyncfed.network.presence import Attendance, DrawnPresence, GivenPresence, Presence, PresenceFile
from asyncfed.network.timing import Lockstep, Timing, VirtualTime
from asyncfed.network.weights import FastestMixing, Given, Metropolis, Uniform, Weights

__all__ = [
    "Attendance",
    "Bursts",
    "Constant",
    "DebiasedShares",
    "DrawnPresence",
    "Expectations",
    "Exponential",
    "FastestMixing",
    "Geometric",
    "Given",
    "GivenPresence",
    "Knowledge",
    "LinkTimes",
    "Lockstep",
    "LogNormal",
    "Metropolis",
    "Names",
    "Presence",
    "PresenceFile",
    "Table",
    "Tally",
    "Timing",
    "TransposedShares",
    "Uniform",
    "UniformTime",
    "VaryingProbability",
    "VirtualTime",
    "Weibull",
    "Weights",
    "exact_expectations",
    "require_links_back",
    "require_undirected",
]
