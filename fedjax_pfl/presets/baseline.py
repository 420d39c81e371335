"""Methods without a system of their own, on any dataset and partition.

python -m experiments.baseline --config=experiments/configs/baseline.py:fedavg-digits

Presets are words joined with dashes: a method (fedavg, local, fedper, ...), a dataset (digits,
sensors, speeches, mnist, cifar10, ...), a partition (classes4, dominant2, dirichlet0.5, iid)
and a number of clients (n10).
"""

from ml_collections import ConfigDict

from fedjax_pfl.presets import words as preset_words
from fedjax_pfl.settings import configuration


def get_config(preset: str = "fedavg-digits") -> ConfigDict:
    """A method on a dataset; FedAvg on the embedded digits where nothing is said."""
    config = configuration.default()
    config.local_epochs = 5
    config = preset_words.apply(config, preset, {})
    # Of these two there are as many for ten clients.
    each = {"digits": 160, "synthetic": 100}.get(config.dataset, 600)
    config.classes.examples = config.dominant.examples = each
    return config
