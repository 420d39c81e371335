"""FedBABU: clients train and share only the body; the head keeps its initial values.

Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, 2022.

  φ_k ← φ_k − η ∇_φ f(φ_k, ω; B), with the same initial head ω for all;  φ ← Σ_k n_k φ_k / Σ_k n_k
  (φ_i, ω_i) = some local epochs on both from (φ, ω), at evaluation; it is discarded

The metrics called "before" are the paper's personalised accuracy. "After" evaluates the body after
one more local training, with the initial head.

Deviations: none in the method. The head is initialised as the network does it; the paper also tries
orthogonal heads. BatchNorm belongs to the body. Momentum starts at zero in each fine-tuning.
"""

from typing import Any

import jax

from fedjax_pfl.algorithms.shared.initial_state import initial_momentum
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.algorithms.shared.split_model import SplitClient, in_layers, partly_shared
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
from fedjax_pfl.networks.zero_head import require_random_head

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
    """Creates FedBABU: clients train and share the body; the head keeps its initial values.

    Clients fine-tune a copy of the model when it is evaluated. The server stores the body φ;
    clients store `SplitClient`, with the head ω as `personal`.

    Args:
      epochs: Passes over a client's training examples in the fine-tuning.
      rate: Learning rate of the fine-tuning, in all rounds. Unset: the rate of training. With
        your own optax optimiser it multiplies the steps.
      tune: Part that is fine-tuned: all, head or body.
    """
    require_at_least("fedbabu.epochs", epochs, 1)
    require_above("fedbabu.rate", rate, 0)
    require_one_of("fedbabu.tune", tune, PARTS)
    require_random_head("fedbabu", model)  # a fixed head of zeros passes no gradient to the body
    tuning = training._replace(
        rate=training.rate if rate is None else local_training.constant_rate(rate),
        epochs=epochs,
        steps=None,
        keep_optimizer=False,
    )
    train_body = model_trainer(model, federation.task, training)
    fine_tune = model_trainer(model, federation.task, tuning)
    base = partly_shared(model, training, federation, in_layers({model.head}))

    def init(key: jax.Array, start: State | None = None) -> State:
        state = base.init(key, start)
        momentum = initial_momentum(training, state.server["params"], federation)
        return state._replace(clients=SplitClient(state.clients.personal, momentum))

    def train(payload: PyTree, client: SplitClient, ctx: ClientContext) -> ClientResult:
        head = client.personal
        body, momentum, metrics = train_body(payload, client.momentum, ctx, head)
        return ClientResult(
            upload=body,
            variables=trees.join(body, head),
            client=SplitClient(head, momentum),
            metrics=metrics,
        )

    def personalize(state: State, client: SplitClient, ctx: ClientContext) -> PyTree:
        body, head = state.server, client.personal
        if tune == "all":
            return fine_tune(trees.join(body, head), (), ctx)[0]
        tuned, frozen = (head, body) if tune == "head" else (body, head)
        return trees.join(fine_tune(tuned, (), ctx, frozen)[0], frozen)

    return base._replace(init=init, train=train, personalize=personalize)


FEDBABU = Method(fedbabu, title="FedBABU", paper="Oh et al. 2022")
