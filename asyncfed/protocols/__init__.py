"""One file per method."""

from asyncfed.network.buffer import Buffered, HingeDecay, NoDecay, PolynomialDecay
from asyncfed.network.server import Server
from asyncfed.protocols.aggitd import AggITD
from asyncfed.protocols.aggitd_peers import PeerAggITD
from asyncfed.protocols.async_sgp import AsyncSGP
from asyncfed.protocols.clustered_fl import ClusteredFL
from asyncfed.protocols.epoch_sgp import EpochSGP
from asyncfed.protocols.exact_backprop import ExactBackprop
from asyncfed.protocols.fed_ihgp import Neumann
from asyncfed.protocols.fedasync import FedAsync
from asyncfed.protocols.fedavg import FedAvg
from asyncfed.protocols.fedavg_plus import FedAvgPlus
from asyncfed.protocols.fedavg_s import FedAvgS
from asyncfed.protocols.fedbuff import FedBuff
from asyncfed.protocols.fedem import FedEM
from asyncfed.protocols.fednest import FedNest, FedNestSGD
from asyncfed.protocols.fedprox import FedProx
from asyncfed.protocols.gossip_bilevel import GossipBilevel
from asyncfed.protocols.hgp import HGP
from asyncfed.protocols.itd import ITDBackward, ITDForward
from asyncfed.protocols.lfednest import LFedNest, LFedNestNonAlt, LFedNestSVRG
from asyncfed.protocols.local_steps import LocalSteps
from asyncfed.protocols.meta_fl import MetaFL, PerFedAvg
from asyncfed.protocols.pdbo import CDBO, PDBO, CompareHypergradients, EstimateHypergradient
from asyncfed.protocols.peer_fedem import PeerFedEM
from asyncfed.protocols.pfedme import PFedMe
from asyncfed.protocols.push_diging import PushDIGing
from asyncfed.protocols.push_pull import PushPull
from asyncfed.protocols.scaffold import Scaffold
from asyncfed.protocols.schedules import Diminishing, StepDecay
from asyncfed.protocols.sgp import SGP
from asyncfed.protocols.simfbo import SimFBO
from asyncfed.protocols.special_cases import DSGD, Local, LocalEpochs, PeerFedAvg
from asyncfed.protocols.vr_hgp import VRHGP

__all__ = [
    "CDBO",
    "DSGD",
    "HGP",
    "PDBO",
    "SGP",
    "VRHGP",
    "AggITD",
    "AsyncSGP",
    "Buffered",
    "ClusteredFL",
    "CompareHypergradients",
    "Diminishing",
    "EpochSGP",
    "EstimateHypergradient",
    "ExactBackprop",
    "FedAsync",
    "FedAvg",
    "FedAvgPlus",
    "FedAvgS",
    "FedBuff",
    "FedEM",
    "FedNest",
    "FedNestSGD",
    "FedProx",
    "GossipBilevel",
    "HingeDecay",
    "ITDBackward",
    "ITDForward",
    "LFedNest",
    "LFedNestNonAlt",
    "LFedNestSVRG",
    "Local",
    "LocalEpochs",
    "LocalSteps",
    "MetaFL",
    "Neumann",
    "NoDecay",
    "PFedMe",
    "PeerAggITD",
    "PeerFedAvg",
    "PeerFedEM",
    "PerFedAvg",
    "PolynomialDecay",
    "PushDIGing",
    "PushPull",
    "Scaffold",
    "Server",
    "SimFBO",
    "StepDecay",
]
