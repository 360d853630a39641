"""Datasets, how they are dealt to clients, and how a block of clients holds its samples."""

from asyncfed.data.counts import class_counts, plot_class_counts
from asyncfed.data.datasets import (
    DATASETS,
    Dataset,
    data_directory,
    has_test_part,
    load_dataset,
    load_with_test,
)
from asyncfed.data.extra_test import load_dealt
from asyncfed.data.long_tail import long_tail, long_tail_sizes
from asyncfed.data.partition import (
    IID,
    Bootstrap,
    DirichletOverClasses,
    DirichletOverClients,
    LabelShards,
    OverlappingDirichlet,
    Pachinko,
    Partition,
    parse_partition,
)
from asyncfed.data.shakespeare import Shakespeare, load_shakespeare
from asyncfed.data.shards import ClientData, ClientShards, client_data_from_lists
from asyncfed.data.sources import client_data
from asyncfed.data.split import partition_data
from asyncfed.data.superclasses import CIFAR100_CLASSES, CIFAR100_SUPERCLASSES

__all__ = [
    "CIFAR100_CLASSES",
    "CIFAR100_SUPERCLASSES",
    "DATASETS",
    "IID",
    "Bootstrap",
    "ClientData",
    "ClientShards",
    "Dataset",
    "DirichletOverClasses",
    "DirichletOverClients",
    "LabelShards",
    "OverlappingDirichlet",
    "Pachinko",
    "Partition",
    "Shakespeare",
    "class_counts",
    "client_data",
    "client_data_from_lists",
    "data_directory",
    "has_test_part",
    "load_dataset",
    "load_dealt",
    "load_shakespeare",
    "load_with_test",
    "long_tail",
    "long_tail_sizes",
    "parse_partition",
    "partition_data",
    "plot_class_counts",
]
