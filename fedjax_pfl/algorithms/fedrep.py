"""FedRep: each client fits its head to the shared body first, and then the body to its head.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, 2021.

Deviations: while the head trains, the body's BatchNorm statistics stay, as does all else in it (in
PyTorch they would go on running). Clipping measures the part that trains. The mean is weighted by
examples, as in FedAvg.
"""

from typing import Any, NamedTuple

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
from fedjax_pfl.core.errors import require_at_least


class Momentum(NamedTuple):
    """A client's kept momentum; each part's moves only while that part trains."""

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
    """ω_i ← SGD on f(φ, ·); then φ_i ← SGD on f(·, ω_i); φ ← Σ_k n_k φ_k / Σ_k n_k; ω_i stays.

    Server: the body φ, BatchNorm included. Clients: the head ω_i, and momentum where it is kept.

    Args:
      head_epochs: passes over a client's examples in which its head trains; the body's are
        `local_epochs`.
      head_steps: so many batches, each drawn afresh, in place of head_epochs.
    """
    task = federation.task
    require_at_least("fedrep.head_epochs", head_epochs, 1)
    require_at_least("fedrep.head_steps", head_steps, 1)
    by_head = training._replace(
        epochs=head_epochs if head_steps is None else None, steps=head_steps
    )
    fit_head, fit_body = (common.trainer(model, task, one) for one in (by_head, training))
    joint = partly_shared(model, training, federation, of_layers({model.head}))

    def init(key: jax.Array, start: State | None = None) -> State:
        state = joint.init(key, start)
        head = trees.row(state.clients.own, 0)
        momentum = Momentum(
            common.kept(by_head, head["params"], federation),
            common.kept(training, state.server["params"], federation),
        )
        return state._replace(clients=Client(state.clients.own, momentum))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        one, two = (ctx._replace(key=key) for key in jax.random.split(ctx.key))
        head, of_head, first = fit_head(client.own, client.momentum.head, one, payload)
        body, of_body, metrics = fit_body(payload, client.momentum.body, two, head)
        metrics = {**metrics, "head_loss": first["loss"]}
        stays = Client(head, Momentum(of_head, of_body))
        return ClientResult(body, trees.join(body, head), stays, metrics)

    return joint._replace(init=init, train=train)


FEDREP = Method(fedrep, title="FedRep", paper="Collins et al. 2021")
