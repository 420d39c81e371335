"""FedDBE: FedAvg with a personal shift of the features, whose mean is pulled to a common one.

Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space, 2023: FedAvg
with the domain bias eliminator. z(x) are the d features that the body of θ computes for its head ω,
B is a batch, z̄ starts at 0 in each round:

  z̄ ← (1 − μ) z̄ + μ mean_{x in B} z(x)
  (θ_i, b_i) ← (θ_i, b_i) − η ∇(f(ω(z + b_i); B) + κ ‖z̄ − C‖²/(2d)), from θ;   b_i stays
  θ ← Σ_k n_k θ_k / Σ_k n_k
The first round only finds C: clients train with b_i = 0 and without the penalty, C becomes
Σ_k n_k z̄_k / Σ_k n_k and is then constant, and their models are discarded. A client is served
ω(z(x) + b_i).

Deviations: in the paper all clients take part in the first round; here it is a cohort as in other
rounds. κ multiplies half of the mean square, as in the authors' code. θ_i and b_i are clipped
separately. With compressed uploads C is the mean of compressed means.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import initial_client_rows, initial_momentum
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training, optimizers, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
    Traffic,
    full_traffic,
)
from fedjax_pfl.core.errors import require, require_at_least
from fedjax_pfl.networks import features


class Client(NamedTuple):
    """State that one client keeps between rounds. `State.clients` stacks it over clients."""

    bias: jax.Array  # [d]; b_i, added to the d features of each example of the client
    momentum: PyTree  # optimiser state of model and bias, or () if not kept


@dataclasses.dataclass(frozen=True)
class Shifted:
    """A network whose variables include `feature_bias` [d], which is added to the features."""

    network: Any  # the plain network

    def apply(self, variables: PyTree, x: jax.Array) -> jax.Array:
        """Returns the outputs [B, C] for examples x."""
        variables, bias = _without(variables, "feature_bias"), variables["feature_bias"]
        return features.WithFeatures(self.network, lambda z: z + bias[None]).apply(variables, x)[0]


def _without(variables: PyTree, *names: str) -> PyTree:
    return {name: tree for name, tree in variables.items() if name not in names}


class Regularised(NamedTuple):
    """The network for training. It returns (outputs, penalty on the client's mean features).

    Its parameters are `model`, those of the plain network, and `bias` [d], which is added to the
    features. Its variables include the running mean of the client's features as `mean` [d]. The
    download has the common mean as `mean` [d], and `known`, bool [], False before it exists.
    """

    network: Any  # the plain network
    payload: PyTree  # download; constants
    penalty: Any  # κ, the weight of the penalty
    mean_momentum: Any  # μ, the weight of the current batch in the running mean

    def apply(self, variables: PyTree, x: jax.Array, *, mask: jax.Array, **options: Any) -> Any:
        """Returns ((outputs, penalty []), collections that training updates, with `mean`).

        Bias and penalty are 0 until the payload's mean is known.
        `mask`, bool [B], is False for padding; `options` are those of a Flax module's `apply`.
        """
        params, model_state = variables["params"], _without(variables, "params", "mean")
        known = self.payload["known"].astype(jnp.float32)
        bias = known * params["bias"]
        network = features.WithFeatures(self.network, lambda z: z + bias[None])
        (outputs, z), updated = network.apply(
            {"params": params["model"], **model_state},
            x,
            mask=mask,
            **{**options, "mutable": list(model_state)},
        )
        examples = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
        batch_mean = jnp.sum(jnp.where(mask[:, None], z, 0.0), 0) / examples
        mean = (1 - self.mean_momentum) * variables["mean"] + self.mean_momentum * batch_mean
        penalty = self.penalty / 2 * jnp.mean(jnp.square(mean - self.payload["mean"]))
        return (outputs, known * penalty), {**updated, "mean": mean}


def feddbe(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    penalty: float = 50.0,
    mean_momentum: float = 1.0,
) -> Algorithm:
    """Creates FedDBE: FedAvg with a personal shift of the features, whose mean a penalty pulls.

    The penalty pulls a client's mean features to a common mean C. The first round only finds C; it
    does not change the model. The server stores the variables of the model, C [d] as `mean`, and
    `known`, False until C exists. Clients store `Client`.

    Args:
      penalty: κ, the weight of the distance between the mean features of a client and the common
        mean C.
      mean_momentum: μ, the weight of the current batch in a client's mean features.
    """
    require_at_least("feddbe.penalty", penalty, 0)
    require(
        (mean_momentum > 0) & (mean_momentum <= 1),
        f"feddbe.mean_momentum is {mean_momentum}; it must be above 0 and at most 1",
    )
    d = features.width("feddbe", model, federation)
    base = fedavg(model, training, federation)
    separate = training.with_optimizer(optimizers.per_entry(training.optimizer))

    def loss(outputs: Any, y: jax.Array, classes: Any) -> jax.Array:
        network_outputs, mean_penalty = outputs
        return federation.task.loss(network_outputs, y, classes) + mean_penalty

    def init(key: jax.Array, start: State | None = None) -> State:
        server, bias = base.init(key, start).server, jnp.zeros(d)
        params = {"model": server["params"], "bias": bias}
        client = Client(
            initial_client_rows(bias, start, Client, "bias", federation),
            initial_momentum(separate, params, federation),
        )
        server = {**server, "mean": bias, "known": jnp.zeros((), bool)}
        if start is not None and isinstance(start.clients, Client):
            server = start.server
        return State(server, (), client)

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        network = Regularised(model, payload, penalty, mean_momentum)
        gradient = local_training.gradient(network, federation.task._replace(loss=loss), ctx.data)
        params = {"model": payload["params"], "bias": client.bias}
        start = {**_without(payload, "params", "known"), "mean": jnp.zeros(d)}
        new, model_state, momentum, metrics = local_training.fit(
            separate, gradient, params, start, client.momentum, ctx
        )
        # The server ignores this mean once C is known; C itself adds nothing to a clipped change.
        mean = jnp.where(payload["known"], payload["mean"], model_state["mean"])
        upload = {"params": new["model"], **model_state, "mean": mean}
        return ClientResult(
            upload=upload,
            variables={**_without(upload, "mean"), "feature_bias": new["bias"]},
            client=Client(new["bias"], momentum),
            metrics=metrics,
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        old, known = state.server, state.server["known"]
        new = cohort.mean(cohort.uploads, _without(old, "known"))
        server = {
            **trees.where(known, _without(new, "mean"), _without(old, "mean", "known")),
            "mean": jnp.where(known, old["mean"], new["mean"]),
            "known": known | jnp.any(cohort.weights > 0),
        }
        return server, state.rows

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        return {**_without(state.server, "mean", "known"), "feature_bias": client.bias}

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        """Counts uploaded mean features only in the first round, and models only in later ones."""
        full = full_traffic(payload, upload)
        return full._replace(
            up={
                name: jnp.where(payload["known"] == (name == "mean"), 0, size)
                for name, size in full.up.items()
            }
        )

    return base._replace(
        init=init,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=Shifted(model).apply,
        traffic=traffic,
    )


FEDDBE = Method(feddbe, title="FedDBE", paper="Zhang et al. 2023")
