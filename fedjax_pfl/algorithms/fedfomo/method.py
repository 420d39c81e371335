"""FedFomo: every client mixes in the models of those peers that do well on its validation examples.

Zhang et al., Personalized Federated Learning with First Order Model Optimization, 2021.

  w_n = (L(θ_prev) − L(θ_n)) / ‖θ_n − θ_prev‖₂      L: mean loss on the client's validation examples
  θ = θ_prev + Σ_n s_n (θ_n − θ_prev)               s: max(0, w), normalised to sum 1
over the client's own last model and those of M peers, then local training from θ. Where no w is
positive θ_prev stays. The server adds every peer's w, negative ones too, to the client's row of
affinities, and sends it the peers that lead in this row; each of the M places is instead filled at
random with probability ε_t = max(0, ε − decay · t), t counted within the phase.

θ_prev is older than the models it is compared with: the θ that the client's last local training
began with (`reference="start"`, as in the authors' code). With `reference="last"` it is the model
that this training ended with, which no peer with other classes can beat: on such data the method
is then Local.

Deviations: peers may be stale, where clients are sampled. The distance is over parameters;
BatchNorm statistics are mixed like them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.algorithms.fedfomo.diagnostics import DIAGNOSTICS, PICTURES, TUNING_NOTE
from fedjax_pfl.algorithms.shared import common
from fedjax_pfl.algorithms.shared.matching import leading
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
    Traffic,
)
from fedjax_pfl.core.errors import UsageError, require, require_at_least, require_one_of
from fedjax_pfl.core.examples import ClientData

REFERENCES = ("start", "last")


class Rows(NamedTuple):
    """What the server keeps for each client."""

    models: PyTree  # [N, ...]: the last one that arrived
    affinity: jax.Array  # [N, N]: the sum of the weights that row's client gave column's


class Client(NamedTuple):
    """What stays with a client."""

    start: PyTree  # what its last local training began with; empty where that is no reference
    momentum: PyTree


def mixture(reference: PyTree, models: PyTree, weights: jax.Array) -> tuple[PyTree, jax.Array]:
    """θ and the shares s of the models, all zero where no weight is positive."""
    positive = jnp.maximum(weights, 0.0)
    total = jnp.sum(positive)
    share = positive / jnp.where(total > 0, total, 1.0)

    def mix(old: jax.Array, new: jax.Array) -> jax.Array:
        return old + jnp.tensordot(share, new - old[None], 1, precision="highest")

    return jax.tree.map(mix, reference, models), share


def fedfomo(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    peers: int = 5,
    epsilon: float = 0.3,
    epsilon_decay: float = 0.05,
    reference: str = "start",
) -> Algorithm:
    """Each client trains from its own mixture. Rows: `Rows`. Clients: `Client`.

    Args:
      peers: M, how many models a client is sent; never its own and never a novel client's.
      epsilon: chance that a place goes to a random peer, in the first round.
      epsilon_decay: how far that chance falls in each round.
      reference: θ_prev, what the last local training began with (start) or ended with (last).
    """
    task = federation.task
    require_one_of("fedfomo.reference", reference, REFERENCES)
    _check(federation, peers, epsilon, epsilon_decay)
    active = jnp.asarray(federation.active)
    sgd = common.trainer(model, task, training)

    def mixed(own: PyTree, others: PyTree, client: Client, data: ClientData) -> Any:
        """θ, and the weights of the peers: [M]."""
        previous = client.start if reference == "start" else own
        models = jax.tree.map(lambda one, many: jnp.concatenate([one[None], many]), own, others)
        weights = weigh(previous, models, data)
        return mixture(previous, models, weights)[0], weights[1:]

    def weigh(previous: PyTree, models: PyTree, data: ClientData) -> jax.Array:
        examples = data.validation.size.astype(jnp.float32)

        def loss(one: PyTree) -> jax.Array:
            return (
                local_training.evaluate(model.apply, one, data, data.validation, task).loss
                / examples
            )

        def squared_distance(params: PyTree) -> jax.Array:
            return trees.squared_norm(jax.tree.map(jnp.subtract, params, previous["params"]))

        gain = loss(previous) - jax.lax.map(loss, models)
        distance = jnp.sqrt(jax.vmap(squared_distance)(models["params"]))
        told = (distance > 0) & jnp.isfinite(gain)
        return jnp.where(told, gain / jnp.where(told, distance, 1.0), 0.0)

    def fetch(rows: Rows, i: Any, epsilon: jax.Array, key: jax.Array) -> tuple[PyTree, jax.Array]:
        ids = leading(rows.affinity[i], active.at[i].set(False), peers, epsilon, key)
        return trees.row(rows.models, ids), ids

    def init(key: jax.Array, start: State | None = None) -> State:
        n = federation.clients
        variables = common.initial(model, federation, key, start)
        rows = Rows(trees.repeat(variables, n), jnp.zeros((n, n)))
        begun = trees.repeat(variables, n) if reference == "start" else ()
        momentum = common.kept(training, variables["params"], federation)
        return State((), rows, Client(begun, momentum))

    def send(state: State, ctx: ClientContext) -> PyTree:
        rounds = jnp.float32(ctx.t - training.first_round)
        exploring = jnp.maximum(epsilon - epsilon_decay * rounds, 0.0)
        others, ids = fetch(state.rows, ctx.i, exploring, ctx.key)
        return {**trees.row(state.rows.models, ctx.i), "peers": others, "ids": ids}

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        own = {name: payload[name] for name in payload if name not in ("peers", "ids")}
        start, weights = mixed(own, payload["peers"], client, ctx.data)
        trained, momentum, metrics = sgd(start, client.momentum, ctx)
        client = Client(start if reference == "start" else (), momentum)
        return ClientResult({**trained, "weights": weights}, trained, client, metrics)

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        rows, uploads = state.rows, cohort.uploads
        models = {name: uploads[name] for name in uploads if name != "weights"}
        places = rows.affinity.at[cohort.ids[:, None], cohort.payloads["ids"]]
        affinity = places.add(uploads["weights"], mode="drop")
        return state.server, Rows(cohort.put(rows.models, models), affinity)

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        others, _ = fetch(state.rows, ctx.i, jnp.zeros(()), ctx.key)
        own = trees.row(state.rows.models, ctx.i)
        return mixed(own, others, client, ctx.data)[0]

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        """A client has its own model, and the ids are free."""
        return Traffic(trees.bytes_per_layer(payload["peers"]), trees.bytes_per_layer(upload))

    def observe(state: State) -> dict[str, jax.Array]:
        return {"affinity": state.rows.affinity}

    parts = (init, send, train, receive, personalize, model.apply, traffic, observe)
    return Algorithm(*parts, offload=("models",))


def _check(federation: Federation, peers: int, epsilon: float, epsilon_decay: float) -> None:
    others = int(np.sum(federation.active)) - 1
    if others < 1:
        raise UsageError("fedfomo mixes in peers; it needs at least one other active client")
    require(
        1 <= peers <= others,
        f"fedfomo.peers is {peers}; a client has {others}, choose 1 to {others}",
    )
    probability = (epsilon >= 0) & (epsilon <= 1)
    require(probability, f"fedfomo.epsilon is {epsilon}; it is a probability, 0 to 1")
    require_at_least("fedfomo.epsilon_decay", epsilon_decay, 0)
    known = federation.validation_counts
    counts = np.zeros(federation.clients) if known is None else known
    without = np.flatnonzero(counts == 0)
    if len(without):
        more = f" and {len(without) - 1} others have" if len(without) > 1 else " has"
        raise UsageError(
            f"fedfomo weighs peers on validation examples, and client {without[0]}{more} none; "
            "use a larger validation_fraction, such as 0.2, or a more even partition"
        )


FEDFOMO = Method(
    fedfomo,
    title="FedFomo",
    paper="Zhang et al. 2021",
    diagnostics=DIAGNOSTICS,
    pictures=PICTURES,
    tuning_note=TUNING_NOTE,
)
