"""FedBABU: only the body is trained and shared, behind a head that stays as it was drawn.

Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, 2022.

  φ_k ← φ_k − η ∇_φ f(φ_k, ω; B), ω the first head of all;  φ ← Σ_k n_k φ_k / Σ_k n_k
  (φ_i, ω_i) = some local epochs on both from (φ, ω), at evaluation; it is discarded
"Before" is the published number. "After" is the body behind the head that was drawn.

Deviations: none in the method. The head is drawn as the network draws it; the paper also tries
orthogonal ones. BatchNorm belongs to the body. Momentum begins at zero in each tuning.
"""

from typing import Any

import jax

from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.split_model import Client, of_layers, partly_shared
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import require_above, require_at_least, require_one_of

PARTS = ("all", "head", "body")


def fedbabu(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    epochs: int = 5,
    rate: float | None = None,
    tune: str = "all",
) -> Algorithm:
    """Server: the body φ. Clients: the head ω, the same for all, and momentum where it is kept.

    Args:
      epochs: passes of the tuning over a client's training examples.
      rate: of the tuning, in all rounds; unset: that of training in the same round.
      tune: what is tuned: all, head or body.
    """
    require_at_least("fedbabu.epochs", epochs, 1)
    require_above("fedbabu.rate", rate, 0)
    require_one_of("fedbabu.tune", tune, PARTS)
    tuning = training._replace(
        rate=training.rate if rate is None else local_training.constant_rate(rate),
        epochs=epochs,
        steps=None,
        keep_optimizer=False,
    )
    sgd, fine = (common.trainer(model, federation.task, how) for how in (training, tuning))
    joint = partly_shared(model, training, federation, of_layers({model.head}))

    def init(key: jax.Array, start: State | None = None) -> State:
        state = joint.init(key, start)
        momentum = common.kept(training, state.server["params"], federation)
        return state._replace(clients=Client(state.clients.own, momentum))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        body, momentum, metrics = sgd(payload, client.momentum, ctx, client.own)
        return ClientResult(
            body, trees.join(body, client.own), Client(client.own, momentum), metrics
        )

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        body, head = state.server, client.own
        if tune == "all":
            return fine(trees.join(body, head), (), ctx)[0]
        moves, stays = (head, body) if tune == "head" else (body, head)
        return trees.join(fine(moves, (), ctx, stays)[0], stays)

    return joint._replace(init=init, train=train, personalize=personalize)


FEDBABU = Method(fedbabu, title="FedBABU", paper="Oh et al. 2022")
