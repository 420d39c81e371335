"""Every algorithm, one factory each: NAME(model, training, federation, **its own settings).

`METHODS` is the one table of them. The settings in a configuration are the factory's keyword-only
arguments; nothing else lists them. Their meanings stand under `Args:` in its docstring.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_pfl.algorithms.apfl import apfl
from fedjax_pfl.algorithms.clustered_fl import clustered_fl
from fedjax_pfl.algorithms.ditto import ditto
from fedjax_pfl.algorithms.factorized_fl.method import factorized_fl
from fedjax_pfl.algorithms.factorized_fl.moved_variant import factorized_fl_moved
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
from fedjax_pfl.algorithms.fedmn.correlation_variant import fedmn_correlation
from fedjax_pfl.algorithms.fedmn.method import fedmn
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
from fedjax_pfl.algorithms.pfedhn.method import pfedhn, pfedhn_pc
from fedjax_pfl.algorithms.pfedla.method import pfedla
from fedjax_pfl.algorithms.pfedme import pfedme
from fedjax_pfl.algorithms.pfedpara import pfedpara
from fedjax_pfl.algorithms.scaffold import scaffold


class Method(NamedTuple):
    """A factory and its name for people."""

    factory: Callable[..., Any]
    title: str  # as the paper writes it
    paper: str  # authors and year; empty if the method has none
    variant_of: str | None = None  # the paper's method that this library changed

    @property
    def origin(self) -> str:
        """Returns "the method of PAPER" or, for a variant, "variant of this library (of TITLE)"."""
        if self.variant_of is not None:
            return f"{VARIANT} (of {METHODS[self.variant_of].title})"
        return f"the method of {self.paper}" if self.paper else ""

    @property
    def label(self) -> str:
        """Returns title and origin, such as "pFedLA, the method of Ma et al. 2022"."""
        return ", ".join(filter(None, (self.title, self.origin)))

    @property
    def row(self) -> str:
        """Returns the title for tables and figures, with a mark if the method is a variant."""
        return self.title if self.variant_of is None else f"{self.title} ({VARIANT})"


VARIANT = "variant of this library"
METHODS: dict[str, Method] = {
    "apfl": Method(apfl, "APFL", "Deng et al. 2020"),
    "clustered_fl": Method(clustered_fl, "Clustered-FL", "Sattler et al. 2020"),
    "ditto": Method(ditto, "Ditto", "Li et al. 2021"),
    "factorized_fl": Method(factorized_fl, "Factorized-FL", "Jeong and Hwang 2022"),
    "factorized_fl_moved": Method(
        factorized_fl_moved, "Factorized-FL (moved)", "Jeong and Hwang 2022", "factorized_fl"
    ),
    "fedala": Method(fedala, "FedALA", "Zhang et al. 2023"),
    "fedamp": Method(fedamp, "FedAMP", "Huang et al. 2021"),
    "fedas": Method(fedas, "FedAS", "Yang et al. 2024"),
    "fedavg": Method(fedavg, "FedAvg", "McMahan et al. 2017"),
    "fedavg_plus": Method(fedavg_plus, "FedAvg+", "Jiang et al. 2019"),
    "fedbabu": Method(fedbabu, "FedBABU", "Oh et al. 2022"),
    "fedbn": Method(fedbn, "FedBN", "Li et al. 2021"),
    "feddyn": Method(feddyn, "FedDyn", "Acar et al. 2021"),
    "fedem": Method(fedem, "FedEM", "Marfoq et al. 2021"),
    "fedfomo": Method(fedfomo, "FedFomo", "Zhang et al. 2021"),
    "fedmn": Method(fedmn, "FedMN", "Wang et al. 2022"),
    "fedmn_correlation": Method(
        fedmn_correlation, "FedMN-correlation", "Wang et al. 2022", "fedmn"
    ),
    "fedpac": Method(fedpac, "FedPAC", "Xu et al. 2023"),
    "fedper": Method(fedper, "FedPer", "Arivazhagan et al. 2019"),
    "fedproto": Method(fedproto, "FedProto", "Tan et al. 2022"),
    "fedprox": Method(fedprox, "FedProx", "Li et al. 2020"),
    "fedrep": Method(fedrep, "FedRep", "Collins et al. 2021"),
    "fedrod": Method(fedrod, "FedRoD", "Chen and Chao 2022"),
    "l2gd": Method(l2gd, "L2GD", "Hanzely and Richtárik 2020"),
    "lg_fedavg": Method(lg_fedavg, "LG-FedAvg", "Liang et al. 2020"),
    "local": Method(local, "Local", ""),
    "per_fedavg": Method(per_fedavg, "Per-FedAvg", "Fallah et al. 2020"),
    "pfedgraph": Method(pfedgraph, "pFedGraph", "Ye et al. 2023"),
    "pfedhn": Method(pfedhn, "pFedHN", "Shamsian et al. 2021"),
    "pfedhn_pc": Method(pfedhn_pc, "pFedHN-PC", "Shamsian et al. 2021"),
    "pfedla": Method(pfedla, "pFedLA", "Ma et al. 2022"),
    "pfedme": Method(pfedme, "pFedMe", "Dinh et al. 2020"),
    "pfedpara": Method(pfedpara, "pFedPara", "Hyeon-Woo et al. 2022"),
    "scaffold": Method(scaffold, "SCAFFOLD", "Karimireddy et al. 2020"),
}
