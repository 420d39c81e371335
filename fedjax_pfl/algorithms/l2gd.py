"""L2GD: clients' own models, each pulled towards their mean before it trains on.

Hanzely and Richtárik, Federated Learning of a Mixture of Global and Local Models, 2020. It descends
mean_i f_i(x_i) + λ/2 mean_i ‖x_i − x̄‖², with x̄ = mean_i x_i, by steps on either of both sums:

  x_i ← (1 − ρ) x_i + ρ x̄, then S times x_i ← x_i − η ∇f_i(x_i; B), and ρ = ηλS

Deviations: the paper throws a coin before each step for which sum it is on, so that the numbers of
steps between two exchanges are random; here S is what `local_epochs` or `local_steps` say, and all
pulls between two exchanges are one. ρ is given in place of λ. Where clients are sampled or drop out
x̄ is the mean of those that arrived. BatchNorm statistics are pulled as parameters are.
"""

from typing import Any, NamedTuple

import jax

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import require


class Client(NamedTuple):
    """What stays with a client."""

    own: PyTree  # the variables x_i
    momentum: PyTree


def l2gd(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    pull: float = 0.5,
) -> Algorithm:
    """With ρ = 0 it is Local, with 1 FedAvg with plain means. Server: x̄. Clients: `Client`.

    A client is served its model as it is when it has been pulled.

    Args:
      pull: ρ, how far a client's model goes to the mean before it trains on, 0 to 1.
    """
    require((pull >= 0) & (pull <= 1), f"l2gd.pull is {pull}; it is a share, 0 to 1")
    average = fedavg(model, training, federation)

    def pulled(own: PyTree, mean: PyTree) -> PyTree:
        return jax.tree.map(lambda x, m: (1 - pull) * x + pull * m, own, mean)

    def init(key: jax.Array, start: State | None = None) -> State:
        state = average.init(key, start)
        own = common.own_first(state.server, start, Client, federation)
        return state._replace(clients=Client(own, state.clients))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        done = average.train(pulled(client.own, payload), client.momentum, ctx)
        return done._replace(client=Client(done.variables, done.client))

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return cohort.mean(cohort.uploads, state.server, cohort.arrived), state.rows

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return pulled(client.own, state.server)

    return average._replace(init=init, train=train, receive=receive, personalize=personalize)


L2GD = Method(l2gd, title="L2GD", paper="Hanzely and Richtárik 2020")
