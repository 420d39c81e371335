"""Datasets, their partition among clients, and the arrays that training reads."""

from fedjax_pfl.core.examples import Batch, ClientData, FederatedData, Split, client_data, take
from fedjax_pfl.data.dataset import Dataset, arrays, digest
from fedjax_pfl.data.federate import Portions, federate, portions
from fedjax_pfl.data.partitions import PARTITIONS, partition_settings
from fedjax_pfl.data.pool import Pool
from fedjax_pfl.data.request import SPLITS
from fedjax_pfl.data.sources import (
    SOURCES,
    load,
    reads_own_files,
    require_available,
    source_name,
    source_settings,
)

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "SPLITS",
    "Batch",
    "ClientData",
    "Dataset",
    "FederatedData",
    "Pool",
    "Portions",
    "Split",
    "arrays",
    "client_data",
    "digest",
    "federate",
    "load",
    "partition_settings",
    "portions",
    "reads_own_files",
    "require_available",
    "source_name",
    "source_settings",
    "take",
]
