"""FedMN-correlation: its router compares how clients' labels correlate with their images.

A variant of this library, not of Wang et al., 2022. FedMN averages embeddings of images and
labels separately, so its router cannot distinguish groups of clients that number the same classes
differently. Here the logits are computed from the correlations between φx(x) and φy(y) over a
client's examples, relative to the other clients (`correlation.py`). There are three more
differences from `fedmn`:

- Gates are hard.
- A client holds a block, or an encoder, only if it is on a path from an encoder to the output.
- φx and φy keep their initial values and are downloaded once.
"""

from typing import Any

from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.algorithms.fedmn.correlation import Correlation, correlated
from fedjax_pfl.algorithms.fedmn.diagnostics import PICTURES, diagnostics
from fedjax_pfl.algorithms.fedmn.method import FEDMN
from fedjax_pfl.algorithms.fedmn.modular import Modular
from fedjax_pfl.algorithms.fedmn.routed_training import assemble, check_routing
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation


def fedmn_correlation(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    layout: tuple[int, ...] = (2, 2, 2),
    width: int = 512,
    hidden: int = 256,
    dropout: float = 0.5,
    size: int = 128,
    temperatures: tuple[float, float] = (1.0, 0.1),
    rounds: int = 100,
    first_round: int = 0,
) -> Algorithm:
    """Creates FedMN-correlation: correlations of images and labels choose a client's blocks.

    Args:
      layout: Number of blocks in each layer. The first layer holds encoders, each a copy of
        `model`.
      width: Outputs of an encoder.
      hidden: Outputs of the blocks between the first and the last layer.
      dropout: Probability that one of those outputs is dropped in training.
      size: Outputs of φx and of φy.
      temperatures: Temperature τ in the first and in the last round of the phase.
      rounds: Number of rounds of the phase; `run` passes it.
      first_round: First round of the phase; `run` passes it.
    """
    sizes = {"width": width, "hidden": hidden, "size": size}
    check_routing("fedmn_correlation", model, federation, layout, temperatures, dropout, **sizes)
    n = federation.outputs
    # Only active clients enter the running averages; a group can have none.
    active = max(1, int(federation.active.sum()))
    correlations = Correlation(model, layout, active, size)
    return assemble(
        model,
        training,
        federation,
        network=Modular(
            network=model,
            outputs=n,
            layout=layout,
            width=width,
            hidden=hidden,
            dropout=dropout,
            trimmed=True,
        ),
        routing=correlated(correlations, n, training.batch_size, first_round),
        hard=True,
        temperature=router.schedule(temperatures, rounds, first_round),
    )


FEDMN_CORRELATION = Method(
    fedmn_correlation,
    title="FedMN-correlation",
    paper="Wang et al. 2022",
    variant_of=FEDMN,
    diagnostics=diagnostics(),
    pictures=PICTURES,
)
