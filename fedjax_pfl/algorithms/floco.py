"""Floco: clients train a simplex of models together, each in a region of its own.

Grinwald et al., Federated Learning over Connected Modes, 2024. The M endpoints ω_1, ..., ω_M are
heads of one body φ. A point α of the simplex (α ≥ 0, Σ_m α_m = 1) is the model (φ, Σ_m α_m ω_m).
Client k has the centre α_k and the radius ρ_k; at first (1/M, ..., 1/M) and 2, the whole simplex:

  a ~ uniform in the simplex;   α = α_k + min(1, ρ_k/‖a − α_k‖₁) (a − α_k)     for every batch
  (φ, ω_m) ← (φ, ω_m) − η ∇f(φ, Σ_m α_m ω_m; B), for all m
  φ, ω_m ← Σ_k n_k (φ_k, ω_mk) / Σ_k n_k

After τ rounds the server places the clients once. The signal g_k is the change old − new of all
endpoints in the client's latest round. κ_k are the first M principal components of g_k:

  α_k ← Π(κ_k/s), ρ_k ← ρ;   Π: projection onto the simplex; s in {0.0001, ..., 1}, 1000 values,
  minimises Σ_{j<k} 1/‖α_j − α_k‖², the Riesz energy, with distances of at least 0.0001

A client is served the model at α_k. With M = 1 it is FedAvg.

Deviations: a signal may be older than the last round if clients are sampled; the authors' code
trains all clients in that round. A client that has not trained by then has the whole simplex, and
its first round places it with the same principal components and s. Points of a region are uniform
points of the simplex, moved towards α_k to a distance of at most ρ_k; the authors' code samples
around α_k and may leave the simplex. Endpoints include the head's bias and start as the network
initialises it. The sign of a principal component makes its largest loading positive. The authors'
code takes the trained endpoints for signals, which negates κ_k. Floco+, which adds the personal
model of Ditto, is not included. With `privacy=example` each example of a batch has its own α.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_map_with_path

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.shared.initial_state import (
    initial_momentum,
    initial_variables,
    model_shapes,
)
from fedjax_pfl.algorithms.shared.method import Method
from fedjax_pfl.algorithms.shared.model_training import fit_variables
from fedjax_pfl.core import local_training, simplex, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.diagnostics import Diagnostic, Picture, of_array
from fedjax_pfl.core.errors import UsageError, require_at_least
from fedjax_pfl.core.examples import Batch

_WHOLE_SIMPLEX = 2.0  # radius of the whole simplex: the largest L1 distance of two points
_SCALES = 1000
_LEAST_DISTANCE = 1e-4
_LEAST_VARIANCE = 1e-6  # components with less variance, relative to the first, are rounding


class Projection(NamedTuple):
    """Maps signals [D] to places in the simplex."""

    mean: jax.Array  # mean signal, [D]
    loadings: jax.Array  # principal components, [M, D]
    scale: jax.Array  # s, []


class Server(NamedTuple):
    """State that all clients share."""

    variables: PyTree  # φ, and the endpoints as the head's parameters with a leading axis [M]
    projection: Projection
    is_placed: jax.Array  # bool [], True once clients have their regions


class Rows(NamedTuple):
    """State that the server keeps for each client, stacked over clients."""

    signal: jax.Array  # g_k, [N, D] for D entries of all endpoints
    has_signal: jax.Array  # bool [N]


def sample_point(key: jax.Array, centre: jax.Array, radius: jax.Array) -> jax.Array:
    """Samples a point α of the simplex, [M], at most `radius` from `centre` in the L1 norm."""
    point = jax.random.exponential(key, centre.shape)
    step = point / jnp.sum(point) - centre
    distance = jnp.maximum(jnp.sum(jnp.abs(step)), 1e-12)
    return centre + jnp.minimum(1.0, radius / distance) * step


def principal_components(
    signals: jax.Array, has_signal: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean of signals, [D], and their first principal components, [count, D].

    Components are unit vectors, or 0 if the signals have fewer.

    Args:
      signals: Array of shape [N, D].
      has_signal: Bool [N], the clients to use.
      count: Number of components.
    """
    present = jnp.where(has_signal[:, None], signals, 0.0)
    mean = jnp.sum(present, 0) / jnp.maximum(jnp.sum(has_signal.astype(signals.dtype)), 1.0)
    centred = jnp.where(has_signal[:, None], signals - mean[None], 0.0)
    variances, vectors = jnp.linalg.eigh(jnp.matmul(centred, centred.T, precision="highest"))
    first = min(count, len(signals))
    variances, vectors = variances[::-1][:first], vectors[:, ::-1][:, :first]
    loadings = jnp.matmul(vectors.T, centred, precision="highest")
    largest = jnp.take_along_axis(loadings, jnp.argmax(jnp.abs(loadings), 1)[:, None], 1)
    is_component = variances > _LEAST_VARIANCE * jnp.max(variances, initial=1e-30)
    scale = jnp.sqrt(jnp.where(is_component, variances, 1.0)) * jnp.where(largest[:, 0] < 0, -1, 1)
    loadings = jnp.where(is_component[:, None], loadings / scale[:, None], 0.0)
    return mean, jnp.pad(loadings, ((0, count - first), (0, 0)))


def riesz_energy(points: jax.Array, has_signal: jax.Array) -> jax.Array:
    """Returns the sum of 1/distance² over pairs of rows of `points` [N, M] with a signal."""
    squares = jnp.sum(jnp.square(points[:, None] - points[None]), -1)
    pairs = jnp.triu(has_signal[:, None] & has_signal[None], 1)
    return jnp.sum(jnp.where(pairs, 1 / jnp.maximum(squares, _LEAST_DISTANCE**2), 0.0))


def place(projection: Projection, signal: jax.Array) -> jax.Array:
    """Returns the centre α_k [M] of a client with the signal g_k [D]."""
    scores = jnp.matmul(projection.loadings, signal - projection.mean, precision="highest")
    return simplex.project(scores / projection.scale, jnp.ones(scores.shape, bool))


def make_projection(signals: jax.Array, has_signal: jax.Array, endpoints: int) -> Projection:
    """Returns the projection that spreads the clients that have a signal as far as possible.

    Args:
      signals: Array of shape [N, D].
      has_signal: Bool [N], the clients to use.
      endpoints: M.
    """
    mean, loadings = principal_components(signals, has_signal, endpoints)

    def energy(scale: jax.Array) -> jax.Array:
        centres = jax.vmap(place, (None, 0))(Projection(mean, loadings, scale), signals)
        return riesz_energy(centres, has_signal)

    scales = jnp.linspace(1e-4, 1.0, _SCALES)
    return Projection(mean, loadings, scales[jnp.argmin(jax.lax.map(energy, scales))])


def by_endpoint(optimizer: optax.GradientTransformation, head: str) -> optax.GradientTransformation:
    """Returns the optimiser for parameters in which the layer `head` has a leading axis [M].

    It gets these arrays as tuples of M, so that a bias is a vector, which may not decay.
    """

    def unstack(tree: PyTree) -> PyTree:
        return tree_map_with_path(
            lambda path, leaf: tuple(leaf) if trees.layer_name(path) == head else leaf, tree
        )

    def stack(tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: jnp.stack(leaf) if isinstance(leaf, tuple) else leaf,
            tree,
            is_leaf=lambda node: isinstance(node, tuple),
        )

    def init(params: PyTree) -> PyTree:
        return optimizer.init(unstack(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        by_endpoint_updates, state = optimizer.update(unstack(updates), state, unstack(params))
        return stack(by_endpoint_updates), state

    return optax.GradientTransformation(init, update)


DIAGNOSTICS = {
    "placed": Diagnostic(
        meaning="mean distance of the clients' centres from their mean in the L1 norm",
        value=of_array("centre", lambda a: abs(a - a.mean(0)).sum(1).mean()),
    ),
}
PICTURES = {
    "centre": Picture("Places in the simplex", "centre of each client's region", "endpoint")
}


def floco(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    endpoints: int = 10,
    place_after: int = 10,
    radius: float = 0.1,
    first_round: int = 0,
) -> Algorithm:
    """Creates Floco: clients train several heads, and use mixtures of them from their own region.

    The server stores `Server` and `Rows`. Clients store the same as FedAvg. A phase starts with all
    clients in the centre; the endpoints start equal if it starts from a global model.

    Args:
      endpoints: M, the number of heads; 1 is FedAvg.
      place_after: τ, the rounds after which clients get their regions.
      radius: ρ, the largest distance of a client's models from its centre, in the L1 norm of α; at
        most 2 has an effect.
      first_round: First round of the phase; `run` passes it.
    """
    require_at_least("floco.endpoints", endpoints, 1)
    require_at_least("floco.place_after", place_after, 1)
    require_at_least("floco.radius", radius, 0)
    if not trees.split(model_shapes(model, federation), {model.head})[0]:
        raise UsageError(f"floco mixes heads, and this network has no layer {model.head!r}")
    base = fedavg(model, training, federation)
    training = training._replace(base_optimizer=by_endpoint(training.base_optimizer, model.head))
    n = federation.clients

    def at(variables: PyTree, alpha: jax.Array) -> PyTree:
        """Returns the variables of the plain network at the point α, [M]."""
        heads, body = trees.split(variables, {model.head})
        return trees.join(body, trees.combine(alpha, heads))

    def signals(uploads: PyTree, payloads: PyTree) -> jax.Array:
        """Returns the changes old − new of all endpoints, [K, entries]."""
        new, old = (trees.split(tree["params"], {model.head})[0] for tree in (uploads, payloads))
        changes = jax.tree.leaves(jax.tree.map(jnp.subtract, old, new))
        return jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in changes], 1)

    def simplex_variables(key: jax.Array, start: State | None) -> PyTree:
        """Returns variables with independent endpoints, or equal ones if there is a start."""
        keys = [key, *(jax.random.fold_in(key, m) for m in range(1, endpoints))]
        models = [initial_variables(model, federation, m_key, start) for m_key in keys]
        heads = [trees.split(variables, {model.head})[0] for variables in models]
        body = trees.split(models[0], {model.head})[1]
        return trees.join(body, jax.tree.map(lambda *leaves: jnp.stack(leaves), *heads))

    def init(key: jax.Array, start: State | None = None) -> State:
        variables = simplex_variables(key, None)
        if start is not None and trees.same_shapes(
            variables, getattr(start.server, "variables", ())
        ):
            variables = start.server.variables
        elif start is not None:
            variables = simplex_variables(key, start)
        size = trees.size(trees.split(variables["params"], {model.head})[0])
        projection = Projection(jnp.zeros(size), jnp.zeros((endpoints, size)), jnp.ones(()))
        server = Server(variables, projection, jnp.zeros((), bool))
        rows = Rows(jnp.zeros((n, size)), jnp.zeros(n, bool))
        return State(server, rows, initial_momentum(training, variables["params"], federation))

    def centre_of(state: State, i: Any) -> tuple[jax.Array, jax.Array]:
        """Returns client i's centre [M], and a bool scalar: it has a region of its own."""
        is_placed = state.server.is_placed & state.rows.has_signal[i]
        centre = place(state.server.projection, state.rows.signal[i])
        return jnp.where(is_placed, centre, 1 / endpoints), is_placed

    def send(state: State, ctx: ClientContext) -> PyTree:
        centre, is_placed = centre_of(state, ctx.i)
        client_radius = jnp.where(is_placed, jnp.asarray(radius, jnp.float32), _WHOLE_SIMPLEX)
        return {**state.server.variables, "centre": centre, "radius": client_radius}

    def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
        variables = {k: tree for k, tree in payload.items() if k not in ("centre", "radius")}
        model_gradient = local_training.gradient(model, federation.task, ctx.data)

        def gradient(params: PyTree, model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
            point_key = jax.random.fold_in(key, 2)
            alpha = sample_point(point_key, payload["centre"], payload["radius"])
            mixed, transpose = jax.vjp(lambda tree: at({"params": tree}, alpha)["params"], params)
            aux, grads = model_gradient(mixed, model_state, batch, key)
            return aux, transpose(grads)[0]

        variables, momentum, metrics = fit_variables(training, gradient, variables, client, ctx)
        return ClientResult(
            upload=variables,
            variables=at(variables, payload["centre"]),
            client=momentum,
            metrics=metrics,
        )

    def receive(state: State, cohort: Cohort) -> tuple[Server, Rows]:
        server, old = state.server, state.rows
        keeps = server.is_placed & old.has_signal  # places are final
        signal = cohort.put(old.signal, signals(cohort.uploads, cohort.payloads))
        signal = jnp.where(keeps[:, None], old.signal, signal)
        rows = Rows(signal, cohort.put(old.has_signal, cohort.arrived))
        is_due = ~server.is_placed & (cohort.t - first_round + 1 >= place_after)
        projection = jax.lax.cond(
            is_due,
            lambda rows: make_projection(rows.signal, rows.has_signal, endpoints),
            lambda rows: server.projection,
            rows,
        )
        variables = cohort.mean(cohort.uploads, server.variables)
        return Server(variables, projection, server.is_placed | is_due), rows

    def personalize(state: State, client: PyTree, ctx: ClientContext) -> PyTree:
        return at(state.server.variables, centre_of(state, ctx.i)[0])

    def observe(state: State) -> dict[str, jax.Array]:
        return {"centre": jax.vmap(centre_of, (None, 0))(state, jnp.arange(n))[0]}

    return base._replace(
        init=init, send=send, train=train, receive=receive, personalize=personalize, observe=observe
    )


FLOCO = Method(
    floco,
    title="Floco",
    paper="Grinwald et al. 2024",
    diagnostics=DIAGNOSTICS,
    pictures=PICTURES,
)
