"""pFedLA and HeurpFedLA: the server mixes the clients' models layer by layer.

Ma et al., Layer-wise Model Aggregation for Personalized Federated Learning, 2022. The server
stores the latest model θ_j of every client j and one hypernetwork per client, with parameters ψ_i
and an embedding v_i. Its output α_i [L, N] has one row per layer, which sums to 1. In every round

  θ̄_i^l = Σ_j α_i^{l,j} θ_j^l              (6), for all i from the same stored models
  θ_i    = local training from θ̄_i, Δθ_i = θ_i − θ̄_i      (Algorithm 1)
  v_i   ← v_i + η (∂θ̄_i/∂v_i)ᵀ Δθ_i        (10)
  ψ_i   ← ψ_i + η (∂θ̄_i/∂ψ_i)ᵀ Δθ_i        (11)

HeurpFedLA (Algorithm 2) does not download the k layers with the largest α_i^{l,i} (12): they stay
θ_i^l, the client's own, also where noise or compression has changed the server's copy. All layers
are uploaded, and (10) and (11) hold for all layers, with Δθ_i taken from the model that the
training started from and the derivative of (6).

Where the paper is silent: α is a softmax over heads that start at zero. η is a setting; the
equations print no factor. The sizes of the hypernetwork are settings. BatchNorm's statistics stay
on the client; its scale and shift are one layer.

Not in the paper and off by default: `granularity` and `candidates`, with which a client mixes M
models, its own and those of the M - 1 clients whose updates were most similar to its own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.algorithms.pfedla import candidates as mixing_candidates
from fedjax_pfl.algorithms.pfedla.candidates import CandidateTable, MixingInputs
from fedjax_pfl.algorithms.pfedla.diagnostics import DIAGNOSTICS, PICTURES
from fedjax_pfl.algorithms.pfedla.layer_mixing import (
    check_layer_mixing,
    largest,
    layer_rows,
    mix,
    weight_slopes,
)
from fedjax_pfl.algorithms.pfedla.layer_weights import LayerWeights, normalised
from fedjax_pfl.algorithms.shared.initial_state import (
    continuing,
    initial_momentum,
    initial_variables,
    model_shapes,
)
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import model_trainer
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


class ServerState(NamedTuple):
    """State that the server keeps for each client, stacked over clients."""

    theta: PyTree  # each client's last uploaded parameters, leaves [N, ...]
    psi: PyTree  # parameters of each client's hypernetwork, its embedding included
    candidates: CandidateTable | tuple[()]  # () if every client mixes all models


class ClientState(NamedTuple):
    """State kept on the client between rounds."""

    params: PyTree  # its last trained parameters, from which it retains layers; () if k is 0
    model_state: PyTree  # BatchNorm statistics
    momentum: PyTree  # state of the local optimiser; () if clients do not keep it


def pfedla(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    k: int = 0,
    granularity: str = "layer",
    normalise: str = "softmax",
    rate: float = 0.5,
    embedding: int = 100,
    hidden: int = 100,
    depth: int = 3,
    candidates: int | None = None,
) -> Algorithm:
    """Creates pFedLA: layer-wise mixing of models by one hypernetwork per client.

    The server stores `ServerState`, clients store `ClientState`.

    Args:
      k: Number of layers that each client retains (HeurpFedLA); 0 is pFedLA.
      granularity: layer, or model: one weight per client for all layers.
      normalise: How a row of alpha is normalised: softmax, or relu for relu(x) / sum(relu(x)).
      rate: eta, the factor of Eqs. (10) and (11).
      embedding: Length of the hypernetwork's embedding.
      hidden: Width of its hidden layers.
      depth: Number of its hidden layers.
      candidates: Number of models that each client mixes, its own included. Unset: all. Not in the
        paper.
    """
    n, columns = federation.clients, candidates or federation.clients
    shapes = model_shapes(model, federation)["params"]
    layer_bytes = trees.bytes_per_layer(shapes)
    layers = layer_rows(shapes, model.layers if k else (), granularity == "model")
    sizes = {"embedding": embedding, "hidden": hidden, "depth": depth}
    check_layer_mixing(federation, layers.number, k, granularity, normalise, rate, sizes)
    mixing_candidates.check(n, candidates)
    train_model = model_trainer(model, federation.task, training)
    network = LayerWeights(
        clients=columns,
        layers=layers.number,
        embedding=embedding,
        hidden=hidden,
        depth=depth,
        normalise=normalise,
    )

    def inputs(rows: ServerState, i: Any) -> MixingInputs:
        return mixing_candidates.select_models(rows.candidates, rows.theta, i, federation)

    def alpha(psi: PyTree, stored: MixingInputs) -> jax.Array:
        """Returns one client's alpha, [L, N], or [L, M] with M candidates."""
        raw = jnp.asarray(network.apply({"params": psi}))
        return normalised(raw, stored.own_column, stored.allowed, normalise)

    def init(key: jax.Array, start: State | None = None) -> State:
        variables = initial_variables(model, federation, key, start)
        params, model_state = local_training.split_variables(variables)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(n))
        psi = jax.vmap(network.init)(keys)["params"]
        clients = ClientState(
            params=trees.repeat(params, n) if k else (),
            model_state=trees.repeat(model_state, n),
            momentum=initial_momentum(training, params, federation),
        )
        table = mixing_candidates.initial_table(federation, candidates, key)
        return State((), ServerState(trees.repeat(params, n), psi, table), clients)

    def send(state: State, ctx: ClientContext) -> PyTree:
        stored = inputs(state.rows, ctx.i)
        weights = alpha(trees.row(state.rows.psi, ctx.i), stored)
        retained = jnp.zeros(layers.number, bool)
        if k:
            retained = largest(weights[:, stored.own_column], k, layers)
            one_hot = jax.nn.one_hot(stored.own_column, columns)
            weights = jnp.where(retained[:, None], one_hot, weights)
        return {"params": mix(stored.models, weights, layers), "retained": retained}

    def start_of(payload: PyTree, client: ClientState) -> PyTree:
        """Returns the parameters that a client trains and is served: θ̄_i with retained layers."""
        if not k:
            return payload["params"]
        retained = jax.tree.map(lambda row: payload["retained"][row], layers.of_leaf)
        return jax.tree.map(jnp.where, retained, client.params, payload["params"])

    def train(payload: PyTree, client: ClientState, ctx: ClientContext) -> ClientResult:
        start = start_of(payload, client)
        trained, momentum, metrics = train_model(
            {"params": start, **client.model_state}, client.momentum, ctx
        )
        params, model_state = local_training.split_variables(trained)
        return ClientResult(
            upload={"params": trees.add_change(payload["params"], start, params)},
            variables=trained,
            client=ClientState(params if k else (), model_state, momentum),
            metrics=metrics,
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, ServerState]:
        rows = state.rows

        def alpha_slopes(i: jax.Array, payload: PyTree, upload: PyTree) -> jax.Array:
            """Returns (∂θ̄_i/∂α_i)ᵀ Δθ_i of client i, [L, N]."""
            delta = jax.tree.map(jnp.subtract, upload["params"], payload["params"])
            return weight_slopes(inputs(rows, i).models, delta, layers)

        def updated_row(
            row: ServerState, i: jax.Array, slopes: jax.Array, params: PyTree, table: Any
        ) -> ServerState:
            """Returns the row of client i, with psi after a step along the change of its model."""
            stored = inputs(rows, i)
            _, pull_back = jax.vjp(lambda psi: alpha(psi, stored), row.psi)
            psi = optax.tree.add_scale(row.psi, rate, pull_back(slopes)[0])
            return ServerState(params, psi, table)

        slopes = cohort.map(alpha_slopes, cohort.ids, cohort.payloads, cohort.uploads)
        table = mixing_candidates.updated_rows(rows.candidates, cohort, federation)
        # One update of all parts: XLA copies the stored models unless their new values depend on
        # the last use of the old ones.
        new = cohort.update(rows, updated_row, cohort.ids, slopes, cohort.uploads["params"], table)
        return state.server, new

    def personalize(state: State, client: ClientState, ctx: ClientContext) -> PyTree:
        return {"params": start_of(send(state, ctx), client), **client.model_state}

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        retained = {name: payload["retained"][row] for name, row in layers.row.items()}
        down = {name: jnp.where(retained[name], 0, size) for name, size in layer_bytes.items()}
        return Traffic(down, layer_bytes)

    def observe(state: State) -> dict[str, jax.Array]:
        def client_alpha(i: jax.Array) -> jax.Array:
            return alpha(trees.row(state.rows.psi, i), inputs(state.rows, i))

        all_alpha = jax.lax.map(client_alpha, jnp.arange(n), batch_size=256)
        return {"alpha": all_alpha, **mixing_candidates.diagnostics(state.rows.candidates)}

    def continuing_init(key: jax.Array, start: State | None = None) -> State:
        """Returns `continuing(init)`; an earlier phase may have another k."""
        if start is not None and isinstance(start.clients, ClientState):
            params = start.clients.params or jax.tree.map(jnp.copy, start.rows.theta)
            start = start._replace(clients=start.clients._replace(params=params if k else ()))
        return continuing(init)(key, start)

    return Algorithm(
        init=continuing_init,
        send=send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=model.apply,
        traffic=traffic,
        observe=observe,
        offload=("theta", "psi"),
    )


PFEDLA = Method(
    pfedla, title="pFedLA", paper="Ma et al. 2022", diagnostics=DIAGNOSTICS, pictures=PICTURES
)
