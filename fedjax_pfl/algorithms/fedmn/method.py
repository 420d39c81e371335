"""FedMN: a router opens a path through a shared pool of blocks for every client.

Wang et al., Personalized Federated Learning via Heterogeneous Modular Networks, 2022. With θ_b the
blocks, ψ the router, D_m the training examples of client m and V_m its gates:

  π_m = σ(mean_i h_ψ([φx(x_i), φy(y_i)])) over all of D_m                                    (10)
  V_m = σ((log ε − log(1 − ε) + logit π_m) / τ), ε uniform, τ from 1 to 0.1 over the rounds   (5)
  (θ, ψ) ← (θ, ψ) − η ∇ loss(θ, V_m) for each batch                                           (6)
  θ_b ← Σ_m |D_m| a_mb θ_mb / Σ_m |D_m| a_mb

V_m is sampled once a round. A block is active, a_mb = 1, if it has an input: an open gate, V > ½,
from an encoder or an active block. A client downloads, trains and uploads its active blocks; all
encoders and the router are always sent. Evaluation opens the gates with π > ½.

The paper has two readings of V. Equations (5) and (6) put V itself into the loss: a block's inputs
are weighted by V. This is the default, gates="soft". Equations (4) and (13) have V in {0, 1}:
gates="hard" uses 0 or 1 and the gradient of (5). Both have the same active blocks: under soft gates
a block with V ≤ ½ at all of its inputs is not part of the client's network. At a low τ, V can also
be exactly 0.

Deviations: the paper divides the sum over clients by Σ_m |D_m|, which shrinks a block that some
client did not use. A block that no client used does not change. If no path is open, the likeliest
one is opened. The router takes one step a round, along the sum of its gradients over the
batches. Its clipping, decay and momentum are separate. Schedules over local steps do not change its
rate.
"""

from typing import Any

from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.algorithms.fedmn.diagnostics import PICTURES, diagnostics
from fedjax_pfl.algorithms.fedmn.modular import Modular
from fedjax_pfl.algorithms.fedmn.routed_training import assemble, check_routing
from fedjax_pfl.algorithms.fedmn.router import Router, concatenated, paths
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.errors import require_one_of


def fedmn(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    layout: tuple[int, ...] = (2, 2, 2),
    width: int = 512,
    hidden: int = 256,
    dropout: float = 0.5,
    x_size: int = 128,
    y_size: int = 64,
    gates: str = "soft",
    temperatures: tuple[float, float] = (1.0, 0.1),
    rounds: int = 100,
    first_round: int = 0,
) -> Algorithm:
    """Creates FedMN: clients train the blocks that their gates open, and the router of all gates.

    Args:
      layout: Number of blocks in each layer. The first layer holds encoders, each a copy of
        `model`.
      width: Outputs of an encoder.
      hidden: Outputs of the blocks between the first and the last layer.
      dropout: Probability that one of those outputs is dropped in training.
      x_size: Outputs of φx, the router's own encoder.
      y_size: Outputs of φy, which embeds the label.
      gates: soft (the forward pass of training uses the values V) or hard (it uses 0 or 1).
      temperatures: Temperature τ in the first and in the last round of the phase.
      rounds: Number of rounds of the phase; `run` passes it.
      first_round: First round of the phase; `run` passes it.
    """
    sizes = {"width": width, "hidden": hidden, "x_size": x_size, "y_size": y_size}
    check_routing("fedmn", model, federation, layout, temperatures, dropout, **sizes)
    require_one_of("fedmn.gates", gates, ("soft", "hard"))
    network = Modular(
        network=model,
        outputs=federation.outputs,
        layout=layout,
        width=width,
        hidden=hidden,
        dropout=dropout,
    )
    network_of_router = Router(network=model, gates=paths(layout), x_size=x_size, y_size=y_size)
    return assemble(
        model,
        training,
        federation,
        network=network,
        routing=concatenated(network_of_router, federation.outputs, training.batch_size),
        hard=gates == "hard",
        temperature=router.schedule(temperatures, rounds, first_round),
    )


FEDMN = Method(
    fedmn,
    title="FedMN",
    paper="Wang et al. 2022",
    diagnostics=diagnostics("; see fedmn_correlation"),
    pictures=PICTURES,
)
