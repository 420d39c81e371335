"""L2GD: clients' own models, each moved towards their mean before local training.

Hanzely and Richtárik, Federated Learning of a Mixture of Global and Local Models, 2020. It
minimises mean_i f_i(x_i) + λ/2 mean_i ‖x_i − x̄‖², with x̄ = mean_i x_i, by steps on one of the two
sums at a time:

  x_i ← (1 − ρ) x_i + ρ x̄, then S times x_i ← x_i − η ∇f_i(x_i; B), and ρ = ηλS

Deviations: the paper decides at random before each step which sum to use, so the number of steps
between two exchanges is random. Here S is `local_epochs` or `local_steps`, and all steps on the
second sum between two exchanges are one. ρ is a setting instead of λ. If clients are sampled or
absent, x̄ is the mean over those that returned an update. BatchNorm statistics move like
parameters.
"""

from typing import Any, NamedTuple

import jax

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import initial_client_rows
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
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    variables: PyTree  # the client's own model x_i
    momentum: PyTree  # optimiser state, or () if clients do not keep it


def l2gd(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    pull: float = 0.5,
) -> Algorithm:
    """Creates L2GD: clients move their own models towards the mean model, then train locally.

    With ρ = 0 it is Local, with ρ = 1 FedAvg with unweighted means. The server stores x̄, the mean
    of the clients' models; clients store `Client`. The personalised model is the client's own x_i
    after the step towards x̄.

    Args:
      pull: ρ, the share of the mean model in a client's model before local training, 0 to 1.
    """
    require((pull >= 0) & (pull <= 1), f"l2gd.pull is {pull}; it is a share, 0 to 1")
    base = fedavg(model, training, federation)

    def mix(variables: PyTree, mean: PyTree) -> PyTree:
        return jax.tree.map(lambda x, m: (1 - pull) * x + pull * m, variables, mean)

    def init(key: jax.Array, start: State | None = None) -> State:
        state = base.init(key, start)
        rows = initial_client_rows(state.server, start, Client, "variables", federation)
        return state._replace(clients=Client(rows, state.clients))

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        result = base.train(mix(client.variables, payload), client.momentum, ctx)
        return result._replace(client=Client(result.variables, result.client))

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        return cohort.mean(cohort.uploads, state.server, cohort.arrived), state.rows

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return mix(client.variables, state.server)

    return base._replace(
        init=init,
        train=train,
        receive=receive,
        personalize=personalize,
        kept_change=1 - pull,
    )


L2GD = Method(l2gd, title="L2GD", paper="Hanzely and Richtárik 2020")
