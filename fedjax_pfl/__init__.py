"""Personalised federated learning in JAX: all simulated clients train in one compiled program.

The loop, with the parts that it is made of:

    import fedjax_pfl as pfl

    data = pfl.partition(pfl.datasets.digits(), "classes", clients=10, per_client=4, examples=160)
    training = pfl.local_sgd(learning_rate=0.05, epochs=5)
    method = pfl.fedper(pfl.networks.MLP(outputs=10), training, data.federation)

    simulation = pfl.Simulation(method, data)
    state = simulation.init()
    for t in range(20):
        state, log = simulation.run_round(state, t)
    scores = simulation.evaluate(state, 20)

`run` and `run_all` do the same from a configuration, with a run directory, checkpoints and a
report.
"""

from fedjax_pfl import networks, testing, transforms
from fedjax_pfl.algorithms import (
    apfl,
    clustered_fl,
    ditto,
    factorized_fl,
    factorized_fl_moved,
    fedala,
    fedamp,
    fedas,
    fedavg,
    fedavg_plus,
    fedbabu,
    fedbn,
    fedcac,
    fedcp,
    feddbe,
    feddyn,
    fedem,
    fedfomo,
    fedgh,
    fedlc,
    fedmn,
    fedmn_correlation,
    fedpac,
    fedper,
    fedproto,
    fedprox,
    fedrep,
    fedrod,
    fedtgp,
    floco,
    flute,
    fml,
    gpfl,
    ifca,
    knn_per,
    l2gd,
    lg_fedavg,
    local,
    moon,
    pefll,
    per_fedavg,
    pfedfda,
    pfedgraph,
    pfedhn,
    pfedhn_pc,
    pfedla,
    pfedme,
    pfedpara,
    scaffold,
)
from fedjax_pfl.core.algorithm import Algorithm, State
from fedjax_pfl.core.local_training import local_sgd, local_training
from fedjax_pfl.data import arrays, datasets
from fedjax_pfl.data.partition import PartitionedData, partition
from fedjax_pfl.networks.torch_weights import from_torch, to_torch
from fedjax_pfl.report import loggers
from fedjax_pfl.runs.runner import Result, run, run_all
from fedjax_pfl.simulation.devices import prepare_devices
from fedjax_pfl.simulation.saving import restore, save
from fedjax_pfl.simulation.simulation import Evaluation, RoundLog, Simulation

__version__ = "0.1.0"
__all__ = [
    "Algorithm",
    "Evaluation",
    "PartitionedData",
    "Result",
    "RoundLog",
    "Simulation",
    "State",
    "apfl",
    "arrays",
    "clustered_fl",
    "datasets",
    "ditto",
    "factorized_fl",
    "factorized_fl_moved",
    "fedala",
    "fedamp",
    "fedas",
    "fedavg",
    "fedavg_plus",
    "fedbabu",
    "fedbn",
    "fedcac",
    "fedcp",
    "feddbe",
    "feddyn",
    "fedem",
    "fedfomo",
    "fedgh",
    "fedlc",
    "fedmn",
    "fedmn_correlation",
    "fedpac",
    "fedper",
    "fedproto",
    "fedprox",
    "fedrep",
    "fedrod",
    "fedtgp",
    "floco",
    "flute",
    "fml",
    "from_torch",
    "gpfl",
    "ifca",
    "knn_per",
    "l2gd",
    "lg_fedavg",
    "local",
    "local_sgd",
    "local_training",
    "loggers",
    "moon",
    "networks",
    "partition",
    "pefll",
    "per_fedavg",
    "pfedfda",
    "pfedgraph",
    "pfedhn",
    "pfedhn_pc",
    "pfedla",
    "pfedme",
    "pfedpara",
    "prepare_devices",
    "restore",
    "run",
    "run_all",
    "save",
    "scaffold",
    "testing",
    "to_torch",
    "transforms",
]
