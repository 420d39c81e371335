"""Every algorithm, one factory each: NAME(model, task, training, federation, **its own settings).

The settings in a configuration are the factory's keyword-only arguments; nothing else lists
them. What they mean stands under `Args:` in its docstring.
"""

from fedjax_pfl.algorithms.apfl import apfl
from fedjax_pfl.algorithms.clustered_fl import clustered_fl
from fedjax_pfl.algorithms.ditto import ditto
from fedjax_pfl.algorithms.factorized_fl import factorized_fl
from fedjax_pfl.algorithms.fedala import fedala
from fedjax_pfl.algorithms.fedamp import fedamp
from fedjax_pfl.algorithms.fedas import fedas
from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.fedavg_plus import fedavg_plus
from fedjax_pfl.algorithms.fedbabu import fedbabu
from fedjax_pfl.algorithms.fedbn import fedbn
from fedjax_pfl.algorithms.feddyn import feddyn
from fedjax_pfl.algorithms.fedem import fedem
from fedjax_pfl.algorithms.fedfomo import fedfomo
from fedjax_pfl.algorithms.fedmn import fedmn
from fedjax_pfl.algorithms.fedpac import fedpac
from fedjax_pfl.algorithms.fedper import fedper
from fedjax_pfl.algorithms.fedproto import fedproto
from fedjax_pfl.algorithms.fedprox import fedprox
from fedjax_pfl.algorithms.fedrep import fedrep
from fedjax_pfl.algorithms.fedrod import fedrod
from fedjax_pfl.algorithms.l2gd import l2gd
from fedjax_pfl.algorithms.lg_fedavg import lg_fedavg
from fedjax_pfl.algorithms.local import local
from fedjax_pfl.algorithms.per_fedavg import per_fedavg
from fedjax_pfl.algorithms.pfedgraph import pfedgraph
from fedjax_pfl.algorithms.pfedhn import pfedhn, pfedhn_pc
from fedjax_pfl.algorithms.pfedla import pfedla
from fedjax_pfl.algorithms.pfedme import pfedme
from fedjax_pfl.algorithms.pfedpara import pfedpara
from fedjax_pfl.algorithms.scaffold import scaffold

__all__ = [
    "apfl",
    "clustered_fl",
    "ditto",
    "factorized_fl",
    "fedala",
    "fedamp",
    "fedas",
    "fedavg",
    "fedavg_plus",
    "fedbabu",
    "fedbn",
    "feddyn",
    "fedem",
    "fedfomo",
    "fedmn",
    "fedpac",
    "fedper",
    "fedproto",
    "fedprox",
    "fedrep",
    "fedrod",
    "l2gd",
    "lg_fedavg",
    "local",
    "per_fedavg",
    "pfedgraph",
    "pfedhn",
    "pfedhn_pc",
    "pfedla",
    "pfedme",
    "pfedpara",
    "scaffold",
]
