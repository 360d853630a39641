"""One file per method."""

from asyncfed.protocols.exact_backprop import ExactBackprop
from asyncfed.protocols.hgp import HGP
from asyncfed.protocols.itd import ITDBackward, ITDForward
from asyncfed.protocols.pdbo import CDBO, PDBO, CompareHypergradients, EstimateHypergradient
from asyncfed.protocols.schedules import Diminishing, StepDecay
from asyncfed.protocols.sgp import SGP
from asyncfed.protocols.special_cases import DSGD, FedAvg, Local
from asyncfed.protocols.vr_hgp import VRHGP

__all__ = [
    "CDBO",
    "DSGD",
    "HGP",
    "PDBO",
    "SGP",
    "VRHGP",
    "CompareHypergradients",
    "Diminishing",
    "EstimateHypergradient",
    "ExactBackprop",
    "FedAvg",
    "ITDBackward",
    "ITDForward",
    "Local",
    "StepDecay",
]
