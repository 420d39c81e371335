"""FedRep: each client first trains its head on the shared body, then the body with its head.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, 2021.

Deviations: while the head trains, the body's BatchNorm statistics are frozen too (in PyTorch they
would change). Clipping uses the gradient norm of the part that trains. The mean is weighted by
examples, as in FedAvg.
"""

from typing import Any, NamedTuple

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
from fedjax_pfl.core.errors import require_at_least


class Momentum(NamedTuple):
    """Optimiser states of head and body that one client keeps; each is () if it is not kept."""

    head: PyTree
    body: PyTree


def fedrep(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    head_epochs: int = 10,
    head_steps: int | None = None,
) -> Algorithm:
    """Creates FedRep: clients train the head, then the body, and the server averages the bodies.

    The mean is weighted by training examples. The server stores the body, BatchNorm included.
    Clients store `SplitClient`, with the head as `personal` and `Momentum` as `momentum`.

    Args:
      head_epochs: Passes over a client's examples to train its head. The body has `local_epochs`.
      head_steps: Number of batches instead of head_epochs, each sampled independently.
    """
    require_at_least("fedrep.head_epochs", head_epochs, 1)
    require_at_least("fedrep.head_steps", head_steps, 1)
    head_training = training._replace(
        epochs=head_epochs if head_steps is None else None, steps=head_steps
    )
    train_head = model_trainer(model, federation.task, head_training)
    train_body = model_trainer(model, federation.task, training)
    base = partly_shared(model, training, federation, in_layers({model.head}))

    def init(key: jax.Array, start: State | None = None) -> State:
        state = base.init(key, start)
        head = trees.row(state.clients.personal, 0)
        momentum = Momentum(
            initial_momentum(head_training, head["params"], federation),
            initial_momentum(training, state.server["params"], federation),
        )
        return state._replace(clients=SplitClient(state.clients.personal, momentum))

    def train(payload: PyTree, client: SplitClient, ctx: ClientContext) -> ClientResult:
        head_ctx, body_ctx = (ctx._replace(key=key) for key in jax.random.split(ctx.key))
        head, head_momentum, head_metrics = train_head(
            client.personal, client.momentum.head, head_ctx, payload
        )
        body, body_momentum, metrics = train_body(payload, client.momentum.body, body_ctx, head)
        return ClientResult(
            upload=body,
            variables=trees.join(body, head),
            client=SplitClient(head, Momentum(head_momentum, body_momentum)),
            metrics={**metrics, "head_loss": head_metrics["loss"]},
        )

    return base._replace(init=init, train=train)


FEDREP = Method(fedrep, title="FedRep", paper="Collins et al. 2021")
