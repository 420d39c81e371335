"""Datasets, their partition among clients, and the arrays that training reads."""

from fedjax_pfl.core.examples import ClientData, FederatedData, client_data, take
from fedjax_pfl.data.dataset import Dataset, arrays, digest
from fedjax_pfl.data.dataset_registry import (
    SOURCES,
    load,
    reads_own_files,
    require_available,
    source_name,
    source_settings,
)
from fedjax_pfl.data.federate import federate
from fedjax_pfl.data.owners import BY_OWNER
from fedjax_pfl.data.partitions import PARTITIONS, partition_settings
from fedjax_pfl.data.request import SPLITS

__all__ = [
    "BY_OWNER",
    "PARTITIONS",
    "SOURCES",
    "SPLITS",
    "ClientData",
    "Dataset",
    "FederatedData",
    "arrays",
    "client_data",
    "digest",
    "federate",
    "load",
    "partition_settings",
    "reads_own_files",
    "require_available",
    "source_name",
    "source_settings",
    "take",
]
