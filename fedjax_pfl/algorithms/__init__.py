"""Every algorithm, one factory each: NAME(model, task, training, federation, **its own settings).

The settings in a configuration are the factory's keyword-only arguments; nothing else lists them.
"""

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.fedfomo import fedfomo
from fedjax_pfl.algorithms.local import local
from fedjax_pfl.algorithms.per_fedavg import per_fedavg
from fedjax_pfl.algorithms.pfedme import pfedme

__all__ = ["fedavg", "fedfomo", "local", "per_fedavg", "pfedme"]
