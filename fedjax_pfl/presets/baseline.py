"""Methods without their own system, on any dataset and partition.

fedjax-pfl baseline --config=baseline:fedavg-digits

Presets are words joined with dashes: a method (fedavg, local, fedper, ...), a dataset (digits,
sensors, speeches, mnist, cifar10, ...), a partition (classes4, dominant2, dirichlet0.5, iid)
and a number of clients (n10).
"""

from ml_collections import ConfigDict

from fedjax_pfl.presets.vocabulary import apply_words, images_of_digits
from fedjax_pfl.settings import configuration


def get_config(preset: str = "fedavg-digits") -> ConfigDict:
    """Returns all settings of a method on a dataset; by default FedAvg on the digits.

    `preset` has words joined with dashes: method, dataset, partition, number of clients.
    """
    config = configuration.default()
    config.local_epochs = 5
    config = apply_words(config, preset, {})
    # Synthetic data have this many examples for each of ten clients.
    digits = images_of_digits(config.clients)
    examples = {"digits": digits, "synthetic": 100}.get(config.dataset, 600)
    config.classes.examples = config.dominant.examples = examples
    return config
