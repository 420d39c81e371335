"""FedFomo: each client mixes in the peers' models that do well on its validation examples.

Zhang et al., Personalized Federated Learning with First Order Model Optimization, 2021.

  w_n = (L(θ_prev) − L(θ_n)) / ‖θ_n − θ_prev‖₂      L: mean loss on the client's validation examples
  θ = θ_prev + Σ_n s_n (θ_n − θ_prev)               s: max(0, w), normalised to sum 1

The sum is over the client's own last model and those of M peers. Local training starts from θ. If
no w is positive, θ = θ_prev. The server adds the w of every peer, also negative ones, to the
client's row of affinities and sends it the peers with the largest affinities. Each peer is instead
sampled at random with probability ε_t = max(0, ε − decay · t), with t counted within the phase.

θ_prev is older than the models that it is compared with: the θ from which the client's last local
training started (`reference="start"`, as in the authors' code). With `reference="last"` it is the
model after that training. No peer with other classes is better than it, so on such data the method
is then Local.

Deviations: models of peers may be stale if clients are sampled. The distance is over parameters.
BatchNorm statistics are mixed like parameters. The authors' code also offers each client the means
of clusters of clients, adds normalised w to the affinities, and takes the L1 norm by default. A
client is evaluated with the peers of largest affinity, without ε.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedfomo.diagnostics import DIAGNOSTICS, PICTURES, TUNING_NOTE
from fedjax_pfl.algorithms.shared.initial_state import (
    continuing,
    initial_momentum,
    initial_variables,
)
from fedjax_pfl.algorithms.shared.matching import select_peers
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.algorithms.shared.validation import require_validation
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
    """State that the server keeps for each client, stacked over clients."""

    models: PyTree  # each client's last uploaded model, leaves [N, ...]
    affinity: jax.Array  # [N, N]; entry (i, j) sums the weights that client i gave to client j


class Client(NamedTuple):
    """State kept on the client between rounds."""

    start: PyTree  # θ before its last local training; () if the setting reference is "last"
    momentum: PyTree  # state of the local optimiser; () if clients do not keep it


def mixture(reference: PyTree, models: PyTree, weights: jax.Array) -> tuple[PyTree, jax.Array]:
    """Computes θ = θ_prev + Σ_m s_m (θ_m − θ_prev) with s = max(0, w), normalised to sum 1.

    Args:
      reference: θ_prev, one model.
      models: Stacked models, leaves of shape [M, ...].
      weights: w, [M].

    Returns:
      θ and the shares s, [M], which are all zero if no weight is positive.
    """
    positive = jnp.maximum(weights, 0.0)
    total = jnp.sum(positive)
    share = positive / jnp.where(total > 0, total, 1.0)

    def mix(old: jax.Array, new: jax.Array) -> jax.Array:
        step = jnp.tensordot(share.astype(old.dtype), new - old[None], 1, precision="highest")
        return old + step

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
    first_round: int = 0,
) -> Algorithm:
    """Creates FedFomo: clients mix in peers' models that do well on their validation examples.

    The server stores `Rows`, clients store `Client`.

    Args:
      peers: M, the number of peers' models that a client downloads; held-out clients are no peers.
      epsilon: Probability that a peer is sampled at random, in the first round.
      epsilon_decay: Decrease of this probability in each round.
      reference: θ_prev, the model before (start) or after (last) the last local training.
      first_round: First round of the phase; `run` passes it.
    """
    task = federation.task
    require_one_of("fedfomo.reference", reference, REFERENCES)
    _check(federation, peers, epsilon, epsilon_decay)
    train_model = model_trainer(model, task, training)

    def mix(
        last: PyTree, peer_models: PyTree, client: Client, data: ClientData
    ) -> tuple[PyTree, jax.Array, jax.Array]:
        """Mixes the client's last model, as the server has it, and those of its peers.

        Returns θ, the peers' weights w, [M], and the share of `last` in θ.
        """
        previous = client.start if reference == "start" else last
        models = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), last, peer_models)
        weights = weigh(previous, models, data)
        theta, shares = mixture(previous, models, weights)
        own_share = shares[0] if reference == "start" else 1 - jnp.sum(shares[1:])
        return theta, weights[1:], own_share

    def of_client(payload: PyTree) -> PyTree:
        """Returns the client's last model from the download."""
        return {name: payload[name] for name in payload if name not in ("peers", "ids")}

    def weigh(previous: PyTree, models: PyTree, data: ClientData) -> jax.Array:
        """Returns the weight w of each of the stacked models, on validation examples."""
        examples = data.validation.size.astype(jnp.float32)

        def loss(variables: PyTree) -> jax.Array:
            scores = local_training.evaluate(model.apply, variables, data, data.validation, task)
            return scores.loss / examples

        def squared_distance(params: PyTree) -> jax.Array:
            return trees.squared_norm(jax.tree.map(jnp.subtract, params, previous["params"]))

        gain = loss(previous) - jax.lax.map(loss, models)
        distance = jnp.sqrt(jax.vmap(squared_distance)(models["params"]))
        defined = (distance > 0) & jnp.isfinite(gain)
        return jnp.where(defined, gain / jnp.where(defined, distance, 1.0), 0.0)

    def fetch(rows: Rows, i: Any, epsilon: jax.Array, key: jax.Array) -> tuple[PyTree, jax.Array]:
        """Returns the models, leaves [M, ...], and the ids [M] of the peers of client i."""
        is_peer = federation.contributors(i).at[i].set(False)
        ids = select_peers(rows.affinity[i], is_peer, peers, epsilon, key)
        return trees.row(rows.models, ids), ids

    def init(key: jax.Array, start: State | None = None) -> State:
        n = federation.clients
        variables = initial_variables(model, federation, key, start)
        rows = Rows(trees.repeat(variables, n), jnp.zeros((n, n)))
        start_rows = trees.repeat(variables, n) if reference == "start" else ()
        momentum = initial_momentum(training, variables["params"], federation)
        return State((), rows, Client(start_rows, momentum))

    def send(state: State, ctx: ClientContext) -> PyTree:
        rounds = jnp.float32(ctx.t - first_round)
        exploring = jnp.maximum(epsilon - epsilon_decay * rounds, 0.0)
        peer_models, ids = fetch(state.rows, ctx.i, exploring, ctx.key)
        return {**trees.row(state.rows.models, ctx.i), "peers": peer_models, "ids": ids}

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        start, weights, _ = mix(of_client(payload), payload["peers"], client, ctx.data)
        variables, momentum, metrics = train_model(start, client.momentum, ctx)
        return ClientResult(
            upload={**variables, "weights": weights},
            variables=variables,
            client=Client(start if reference == "start" else (), momentum),
            metrics=metrics,
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        rows, uploads = state.rows, cohort.uploads
        models = {name: uploads[name] for name in uploads if name != "weights"}
        entries = rows.affinity.at[cohort.ids[:, None], cohort.payloads["ids"]]
        affinity = entries.add(uploads["weights"], mode="drop")
        return state.server, Rows(cohort.put(rows.models, models), affinity)

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        peer_models, _ = fetch(state.rows, ctx.i, jnp.zeros(()), ctx.key)
        last = trees.row(state.rows.models, ctx.i)
        theta, _, _ = mix(last, peer_models, client, ctx.data)
        return theta

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        """Counts the peers' models down, without the client's own model and the ids."""
        return Traffic(trees.bytes_per_layer(payload["peers"]), trees.bytes_per_layer(upload))

    def kept_change(payload: PyTree, client: Client, ctx: ClientContext) -> jax.Array:
        """Returns 1 − the share of θ that is the server's copy of the client's model."""
        _, _, own_share = mix(of_client(payload), payload["peers"], client, ctx.data)
        return 1 - own_share

    def observe(state: State) -> dict[str, jax.Array]:
        return {"affinity": state.rows.affinity}

    return Algorithm(
        init=continuing(init),
        send=send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=model.apply,
        traffic=traffic,
        observe=observe,
        offload=("models",),
        kept_change=kept_change,
    )


def _check(federation: Federation, peers: int, epsilon: float, epsilon_decay: float) -> None:
    """Raises UsageError for settings or clients that FedFomo cannot use."""
    available = federation.least_contributors - 1
    if available < 1:
        raise UsageError(
            "fedfomo mixes in models of other clients, so a client needs at least one other active "
            "client; raise clients or lower held_out"
        )
    require(
        1 <= peers <= available,
        f"fedfomo.peers is {peers}; a client has {available}, choose 1 to {available}",
    )
    valid = (epsilon >= 0) & (epsilon <= 1)
    require(valid, f"fedfomo.epsilon is {epsilon}; it is a probability, 0 to 1")
    require_at_least("fedfomo.epsilon_decay", epsilon_decay, 0)
    require_validation("fedfomo weighs peers on", federation)


FEDFOMO = Method(
    fedfomo,
    title="FedFomo",
    paper="Zhang et al. 2021",
    diagnostics=DIAGNOSTICS,
    pictures=PICTURES,
    tuning_note=TUNING_NOTE,
)
