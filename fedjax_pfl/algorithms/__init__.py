"""Every method, one factory each: NAME(model, training, federation, **its own settings).

A method's file or folder has its factory and its record `Method`; `METHODS` is the table of all.
The settings in a configuration are the factory's keyword-only arguments; nothing else lists them.
Their meanings stand under `Args:` in its docstring.
"""

from fedjax_pfl.algorithms.apfl import APFL, apfl
from fedjax_pfl.algorithms.clustered_fl import CLUSTERED_FL, clustered_fl
from fedjax_pfl.algorithms.ditto import DITTO, ditto
from fedjax_pfl.algorithms.factorized_fl.method import FACTORIZED_FL, factorized_fl
from fedjax_pfl.algorithms.factorized_fl.moved_variant import (
    FACTORIZED_FL_MOVED,
    factorized_fl_moved,
)
from fedjax_pfl.algorithms.fedala import FEDALA, fedala
from fedjax_pfl.algorithms.fedamp import FEDAMP, fedamp
from fedjax_pfl.algorithms.fedas import FEDAS, fedas
from fedjax_pfl.algorithms.fedavg import FEDAVG, fedavg
from fedjax_pfl.algorithms.fedavg_plus import FEDAVG_PLUS, fedavg_plus
from fedjax_pfl.algorithms.fedbabu import FEDBABU, fedbabu
from fedjax_pfl.algorithms.fedbn import FEDBN, fedbn
from fedjax_pfl.algorithms.fedcac import FEDCAC, fedcac
from fedjax_pfl.algorithms.fedcp import FEDCP, fedcp
from fedjax_pfl.algorithms.feddbe import FEDDBE, feddbe
from fedjax_pfl.algorithms.feddyn import FEDDYN, feddyn
from fedjax_pfl.algorithms.fedem import FEDEM, fedem
from fedjax_pfl.algorithms.fedfomo.method import FEDFOMO, fedfomo
from fedjax_pfl.algorithms.fedgh import FEDGH, fedgh
from fedjax_pfl.algorithms.fedlc import FEDLC, fedlc
from fedjax_pfl.algorithms.fedmn.correlation_variant import FEDMN_CORRELATION, fedmn_correlation
from fedjax_pfl.algorithms.fedmn.method import FEDMN, fedmn
from fedjax_pfl.algorithms.fedpac import FEDPAC, fedpac
from fedjax_pfl.algorithms.fedper import FEDPER, fedper
from fedjax_pfl.algorithms.fedproto import FEDPROTO, fedproto
from fedjax_pfl.algorithms.fedprox import FEDPROX, fedprox
from fedjax_pfl.algorithms.fedrep import FEDREP, fedrep
from fedjax_pfl.algorithms.fedrod import FEDROD, fedrod
from fedjax_pfl.algorithms.fedtgp import FEDTGP, fedtgp
from fedjax_pfl.algorithms.floco import FLOCO, floco
from fedjax_pfl.algorithms.flute import FLUTE, flute
from fedjax_pfl.algorithms.fml import FML, fml
from fedjax_pfl.algorithms.gpfl import GPFL, gpfl
from fedjax_pfl.algorithms.ifca import IFCA, ifca
from fedjax_pfl.algorithms.knn_per import KNN_PER, knn_per
from fedjax_pfl.algorithms.l2gd import L2GD, l2gd
from fedjax_pfl.algorithms.lg_fedavg import LG_FEDAVG, lg_fedavg
from fedjax_pfl.algorithms.local import LOCAL, local
from fedjax_pfl.algorithms.moon import MOON, moon
from fedjax_pfl.algorithms.pefll import PEFLL, pefll
from fedjax_pfl.algorithms.per_fedavg import PER_FEDAVG, per_fedavg
from fedjax_pfl.algorithms.pfedfda import PFEDFDA, pfedfda
from fedjax_pfl.algorithms.pfedgraph import PFEDGRAPH, pfedgraph
from fedjax_pfl.algorithms.pfedhn.method import PFEDHN, PFEDHN_PC, pfedhn, pfedhn_pc
from fedjax_pfl.algorithms.pfedla.method import PFEDLA, pfedla
from fedjax_pfl.algorithms.pfedme import PFEDME, pfedme
from fedjax_pfl.algorithms.pfedpara import PFEDPARA, pfedpara
from fedjax_pfl.algorithms.scaffold import SCAFFOLD, scaffold
from fedjax_pfl.algorithms.shared.checked_factory import checked_factory
from fedjax_pfl.algorithms.shared.method import VARIANT, Method

METHODS: dict[str, Method] = {
    method.name: method._replace(factory=checked_factory(method.factory))
    for method in (
        APFL,
        CLUSTERED_FL,
        DITTO,
        FACTORIZED_FL,
        FACTORIZED_FL_MOVED,
        FEDALA,
        FEDAMP,
        FEDAS,
        FEDAVG,
        FEDAVG_PLUS,
        FEDBABU,
        FEDBN,
        FEDCAC,
        FEDCP,
        FEDDBE,
        FEDDYN,
        FEDEM,
        FEDFOMO,
        FEDGH,
        FEDLC,
        FEDMN,
        FEDMN_CORRELATION,
        FEDPAC,
        FEDPER,
        FEDPROTO,
        FEDPROX,
        FEDREP,
        FEDROD,
        FEDTGP,
        FLOCO,
        FLUTE,
        FML,
        GPFL,
        IFCA,
        KNN_PER,
        L2GD,
        LG_FEDAVG,
        LOCAL,
        MOON,
        PEFLL,
        PER_FEDAVG,
        PFEDFDA,
        PFEDGRAPH,
        PFEDHN,
        PFEDHN_PC,
        PFEDLA,
        PFEDME,
        PFEDPARA,
        SCAFFOLD,
    )
}
# The exported factories check their arguments, too. Methods that build on another one skip that.
globals().update({name: method.factory for name, method in METHODS.items()})
__all__ = [
    "METHODS",
    "VARIANT",
    "Method",
    "apfl",
    "clustered_fl",
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
    "gpfl",
    "ifca",
    "knn_per",
    "l2gd",
    "lg_fedavg",
    "local",
    "moon",
    "pefll",
    "per_fedavg",
    "pfedfda",
    "pfedgraph",
    "pfedhn",
    "pfedhn_pc",
    "pfedla",
    "pfedme",
    "pfedpara",
    "scaffold",
]
