"""One file per method."""

from asyncfed.protocols.schedules import Diminishing, StepDecay
from asyncfed.protocols.sgp import SGP
from asyncfed.protocols.special_cases import DSGD, FedAvg, Local

__all__ = ["DSGD", "SGP", "Diminishing", "FedAvg", "Local", "StepDecay"]
