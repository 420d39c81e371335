"""Differential privacy of clients: the server clips updates and adds noise once to their mean.

McMahan et al., Learning Differentially Private Recurrent Language Models, 2018, with a fixed number
K of sampled clients. With the payload p of all clients and Δ_k = upload_k − p over the whole tree:

  Δ ← 1/K Σ_k Δ_k min(1, C / ‖Δ_k‖₂) + N(0, (z C / K)²),   C `clip_norm`, z `noise_multiplier`

The method's `receive` gets K equal uploads p + Δ of equal weights, and neither ids nor numbers of
examples. Everything that the server computes is a function of Δ. An absent client has Δ_k = 0;
K stays the divisor.

Adaptive clipping (Andrew et al., Differentially Private Learning with Adaptive Clipping, 2021):
with the requested quantile γ and the number m of clients that arrived,

  b = Σ_k 1[‖Δ_k‖₂ ≤ C] − γ m + N(0, (z / (2 √0.1))²);   C ← C exp(−0.2 b / K)

with the sum over these m clients, so absent clients do not move C. A tenth of the budget is for b.
A client's term in b is 1 − γ, −γ or, if it is absent, 0. A replaced client moves b by at most 1, so
the noise covers m too. Δ has noise z C / (K √0.9) instead, so that both together are one Gaussian
mechanism of multiplier z.

With more than one band, the noise of rounds is correlated, see `correlated_noise`.

The method must fit: one model for all clients, no rows on the server, and a server update that is
an affine function of the uploads, such as their mean. Other methods are refused.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.core import jaxprs, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError, require, require_above, require_at_least
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.core.groups import has_groups
from fedjax_pfl.transforms.privacy import clip_and_noise, correlated_noise
from fedjax_pfl.transforms.privacy.correlated_noise import NoiseHistory
from fedjax_pfl.transforms.wrapping import (
    RoundShapes,
    Transform,
    round_shapes,
    with_server_state,
)

_QUANTILE_SHARE = 0.1  # of the squared inverse noise multiplier
_QUANTILE_RATE = 0.2  # the paper's learning rate of log C
# Compression and attacks may enlarge an update afterwards. It must stay below the norm at which the
# simulation rejects it: a round without any update has no noise, which would show the rejection.
_LARGEST_NORM = 1e9
_NOISE = (1 << 30) + 2  # folded into the key, which the method also gets


class Server(NamedTuple):
    """Server-side state of the method, and the clipping norm if it is adaptive."""

    method: PyTree  # server-side state of the method
    clip_norm: jax.Array  # C of the next round


class CorrelatedServer(NamedTuple):
    """Server-side state of the method, and the noise of earlier rounds."""

    method: PyTree  # server-side state of the method
    history: NoiseHistory


def client_privacy(
    federation: Federation,
    data: FederatedData,
    *,
    clients_per_round: int,
    clip_norm: float = math.inf,
    noise_multiplier: float = 0.0,
    quantile: float | None = None,
    bands: int = 1,
    is_amplified: bool = False,
) -> Transform:
    """Returns a transform with differential privacy of clients towards all but the server.

    `accounting.epsilon` computes ε. Do not combine it with `max_update_norm`.

    Args:
      federation: Tells the number of clients.
      data: Examples; only their shapes matter.
      clients_per_round: Number of clients sampled in each round, K.
      clip_norm: Largest norm of a client's update. Infinite: no clipping, which requires no noise.
      noise_multiplier: Standard deviation of the noise on the sum of updates, in clipping norms.
      quantile: Share of updates below the norm at which adaptive clipping aims; the first norm is
        `clip_norm`. None: the norm is constant.
      bands: Number of consecutive rounds whose noise is correlated. A client must take part at most
        once in them: use `sampling="cyclic"` in `Simulation`, and at most ⌊N / K⌋ bands. The server
        keeps bands - 1 copies of an upload. 1: independent noise.
      is_amplified: Whether ε counts that clients are sampled at random. Methods with state on
        clients are then refused: their uploads depend on their earlier rounds. Transforms around
        this one must not add such state.
    """
    require_above("clip_norm", clip_norm, 0)
    require_at_least("noise_multiplier", noise_multiplier, 0)
    for name, count in (("clients_per_round", clients_per_round), ("bands", bands)):
        require_at_least(name, count, 1)
    require_above("quantile", quantile, 0)
    require(quantile is None or quantile < 1, f"quantile is {quantile}; it must be below 1")
    is_clipped = math.isfinite(clip_norm)
    if not is_clipped and (noise_multiplier or quantile is not None):
        raise UsageError("noise and a quantile need a finite clip_norm; set it, such as to 1")
    if bands > 1 and quantile is not None:
        raise UsageError(
            "privacy_quantile changes the norm, and privacy_bands above 1 needs a constant one; "
            "leave one of them out"
        )
    delta_share = 1.0 if quantile is None else 1.0 - _QUANTILE_SHARE

    def transform(algorithm: Algorithm) -> Algorithm:
        if reason := unsupported_reason(algorithm, data):
            raise UsageError(f"client-level privacy is not possible here: {reason}")
        if is_amplified and jax.tree.leaves(round_shapes(algorithm, data).state.clients):
            raise UsageError(
                "epsilon with random sampling is proved only for methods without state on clients; "
                "set sampling=cyclic, or leave clients_per_round out"
            )

        def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
            result = algorithm.train(payload, client, ctx)
            return clip_and_noise.accepted(payload, client, result, _LARGEST_NORM)

        def receive_noised(
            state: State, cohort: Cohort, norm: Any, noise: PyTree | None = None
        ) -> tuple[Any, jax.Array]:
            """Returns the results of `receive`, and which clients are below the norm.

            `noise` is correlated noise of deviation 1; None: independent noise.
            """
            payload = algorithm.send(
                state, ClientContext(i=0, data=None, t=cohort.t, key=cohort.key)
            )
            change, is_below = _mean_change(payload, cohort, norm, clients_per_round)
            if noise_multiplier:
                deviation = noise_multiplier * norm / (clients_per_round * math.sqrt(delta_share))
                if noise is None:
                    delta_key, _ = jax.random.split(_noise_key(cohort))
                    change = clip_and_noise.add_noise(change, deviation, delta_key)
                else:
                    change = jax.tree.map(
                        lambda leaf, w: leaf + (deviation * w).astype(leaf.dtype), change, noise
                    )
            released = _released(payload, cohort, change, clients_per_round, federation.clients)
            return algorithm.receive(state, released), is_below

        def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
            if is_clipped:
                return receive_noised(state, cohort, clip_norm)[0]
            weights = cohort.arrived.astype(jnp.float32)
            return algorithm.receive(state, cohort._replace(weights=weights))

        def receive_adaptive(record: Server, state: State, cohort: Cohort) -> tuple[Server, PyTree]:
            assert quantile is not None
            (server, rows), is_below = receive_noised(state, cohort, record.clip_norm)
            noise = noise_multiplier / (2 * math.sqrt(_QUANTILE_SHARE))
            _, share_key = jax.random.split(_noise_key(cohort))
            count = jnp.sum(is_below.astype(jnp.float32)) + noise * jax.random.normal(share_key)
            arrived_share = jnp.sum(cohort.arrived.astype(jnp.float32)) / clients_per_round
            step = _QUANTILE_RATE * (count / clients_per_round - quantile * arrived_share)
            return Server(server, record.clip_norm * jnp.exp(-step)), rows

        def receive_correlated(
            record: CorrelatedServer, state: State, cohort: Cohort
        ) -> tuple[CorrelatedServer, PyTree]:
            noise, history = correlated_noise.advance(
                record.history, cohort.t, _noise_key(cohort), bands
            )
            (server, rows), _ = receive_noised(state, cohort, clip_norm, noise)
            return CorrelatedServer(server, history), rows

        wrapped = algorithm._replace(train=train, receive=receive)
        if bands > 1 and noise_multiplier:
            upload = round_shapes(algorithm, data).upload
            return with_server_state(
                wrapped,
                CorrelatedServer,
                first=lambda server: CorrelatedServer(
                    server, correlated_noise.empty_history(upload, bands)
                ),
                receive=receive_correlated,
            )
        if quantile is None:
            return wrapped
        return with_server_state(
            wrapped,
            Server,
            first=lambda server: Server(server, jnp.float32(clip_norm)),
            receive=receive_adaptive,
            observe=lambda record: {"clip_norm": record.clip_norm},
        )

    return transform


def _noise_key(cohort: Cohort) -> jax.Array:
    return jax.random.fold_in(cohort.key, _NOISE)


def _mean_change(
    payload: PyTree, cohort: Cohort, clip_norm: Any, clients_per_round: int
) -> tuple[PyTree, jax.Array]:
    """Returns the sum of clipped changes divided by K, float32, and who is below the norm.

    An absent client has no change and is not below the norm.
    """

    def clipped(upload: PyTree, arrived: jax.Array) -> tuple[PyTree, jax.Array]:
        change = clip_and_noise.float32_change(payload, upload)
        change = trees.where(arrived, change, jax.tree.map(jnp.zeros_like, change))
        change, norm = clip_and_noise.clip(change, clip_norm)
        return change, arrived & (norm <= clip_norm)

    changes, is_below = jax.vmap(clipped)(cohort.uploads, cohort.arrived)
    return jax.tree.map(lambda leaf: jnp.sum(leaf, 0) / clients_per_round, changes), is_below


def _released(payload: PyTree, cohort: Cohort, change: PyTree, slots: int, clients: int) -> Cohort:
    """Returns the cohort that the method sees: equal uploads, without ids and without weights."""
    old = trees.matching_download(payload, trees.row(cohort.uploads, 0))
    upload = clip_and_noise.add_change(old, change)
    return Cohort(
        ids=jnp.full(slots, clients, jnp.int32),
        arrived=jnp.ones(slots, bool),
        weights=jnp.ones(slots, jnp.float32),
        payloads=trees.repeat(payload, slots),
        uploads=trees.repeat(upload, slots),
        t=cohort.t,
        key=cohort.key,
    )


def unsupported_reason(algorithm: Algorithm, data: FederatedData) -> str:
    """Returns why a method cannot have client-level privacy, or "" if it can.

    Nothing is compiled. `data` are examples; only their shapes matter.
    """
    if has_groups(algorithm):
        return "clients have several architectures"
    shapes = round_shapes(algorithm, data)
    if reason := clip_and_noise.not_covered_reason(jax.tree.leaves(shapes.upload)):
        return reason
    if jax.tree.leaves(shapes.state.rows):
        return "the server keeps a row for each client"
    if _send_depends_on_client(algorithm, shapes):
        return "the download differs between clients"
    if not is_affine(algorithm, shapes):
        return "the server uses uploads other than through their mean"
    return ""


def _send_depends_on_client(algorithm: Algorithm, shapes: RoundShapes) -> bool:
    """Returns True if `send` reads the client's id or random key."""
    state = shapes.state._replace(clients=())

    def send(i: Any, key: Any, t: Any, server: PyTree) -> list[Any]:
        ctx = ClientContext(i=i, data=None, t=t, key=key)
        return jax.tree.leaves(algorithm.send(state._replace(server=server), ctx))

    number, key = jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(jax.random.key, 0)
    program = jax.make_jaxpr(send)(number, key, number, state.server).jaxpr
    _, is_used = jaxprs.prune(program)
    return any(is_used[:2])


def is_affine(algorithm: Algorithm, shapes: RoundShapes) -> bool:
    """Returns True if the new server state is an affine function of the uploads.

    The weights are equal, so it depends on the sum of the uploads alone.
    """
    slots = 2

    def server_of(state: State, uploads: PyTree) -> list[Any]:
        cohort = Cohort(
            ids=jnp.zeros(slots, jnp.int32),
            arrived=jnp.ones(slots, bool),
            weights=jnp.ones(slots, jnp.float32),
            payloads=trees.repeat(
                jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes.payload), slots
            ),
            uploads=uploads,
            t=0,
            key=jax.random.key(0),
        )
        leaves = jax.tree.leaves(algorithm.receive(state, cohort)[0])
        return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]

    uploads = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct((slots, *s.shape), s.dtype), shapes.upload
    )

    def transpose(state: State) -> Any:
        f: Callable[[PyTree], list[Any]] = lambda uploads: server_of(state, uploads)  # noqa: E731
        results = jax.eval_shape(f, uploads)
        return jax.linear_transpose(f, uploads)(
            [jnp.zeros(result.shape, result.dtype) for result in results]
        )

    try:
        jax.eval_shape(transpose, shapes.state._replace(clients=()))
    except Exception:  # JAX raises many types for operations that are not linear
        return False
    return True
