"""Robust aggregation around any method whose server averages the models of its clients.

Let x_1 ... x_m be the uploads that arrived, as vectors, w the model that their clients downloaded
and f = round(m · `robust_share`), at most (m − 1) // 2, the number of attackers to tolerate.

  median            coordinate median; the mean of the middle two if m is even
  trimmed_mean      per coordinate, the mean without the f largest and f smallest values
                    (Yin et al., 2018)
  krum              the upload with the smallest sum of squared distances to the m − f − 2 nearest
                    (Blanchard et al., 2017)
  multi_krum        the mean of the m − f uploads with the smallest such sums
  geometric_median  T smoothed Weiszfeld steps from the coordinate median:
                    v ← Σ x_i/d_i / Σ 1/d_i with d_i = max(‖x_i − v‖, 1e-6) (Pillutla et al., 2022)
  norm_clipping     w + mean of (x_i − w) min(1, τ / ‖x_i − w‖) (Sun et al., 2019)
  centred_clipping  T steps from w: v ← v + mean of (x_i − v) min(1, τ / ‖x_i − v‖)
                    (Karimireddy et al., 2021)

With `robust_mixing`, each upload is first replaced by the mean of the m − f uploads nearest to it,
itself included (nearest-neighbour mixing, Allouah et al., 2023). The method's server then gets the
result as its only upload. T is `robust_steps` and τ `robust_norm`; with τ unset, the clippings use
the median of the m norms, in every step.

Every upload counts once, because an attacker can state a wrong number of examples. Absent clients
do not count in m. Statistics of BatchNorm belong to the vectors.

Deviations: the geometric median starts from the coordinate median. The authors' code starts from
the weighted mean, which one attacker can move anywhere. Norms without τ are relative. Centred
clipping starts from w instead of the previous round's aggregate, and clips changes of models
instead of momenta. Where m − f − 2 < 1, Krum uses one neighbour. Krum and multi-Krum take the first
of equal sums.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import require, require_above, require_count, require_one_of
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.core.setting import Limits, Role, Setting, UsedWith
from fedjax_pfl.transforms.wrapping import (
    Selectable,
    Transform,
    TransformContext,
    check_single_model,
    with_server_state,
)

_SMOOTHING = 1e-6  # least distance in a Weiszfeld step
_LARGEST = float(jnp.finfo(jnp.float32).max)


class Uploads(NamedTuple):
    """Uploads of a round as vectors, and the settings of the rule.

    Rows of absent clients equal `start`.
    """

    x: jax.Array  # float32 [K, D]
    arrived: jax.Array  # bool [K]
    start: jax.Array  # float32 [D]: the model that the clients downloaded
    f: jax.Array  # int32 []: number of attackers to tolerate
    norm: float | None  # τ; None: the median of the norms
    steps: int  # T

    def mean(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns Σ w_k x_k / Σ w_k; weights [K] of absent clients must be 0."""
        return jnp.tensordot(weights / jnp.sum(weights), x, 1, precision="highest")


class Aggregate(NamedTuple):
    """Result of a rule."""

    value: jax.Array  # float32 [D]
    trust: jax.Array  # float32 [K], 0 to 1: how far the rule used each upload


Rule = Callable[[Uploads], Aggregate]


class Server(NamedTuple):
    """Server-side state of the method, and how far the rule used the uploads of each client."""

    method: PyTree  # server-side state of the method
    trust: jax.Array  # float32 [N]: sum over rounds of `Aggregate.trust`
    rounds: jax.Array  # int32 [N]: number of rounds in which an upload arrived


def tolerated(arrived: jax.Array, share: float) -> jax.Array:
    """Returns f, the number of attackers to tolerate among the uploads that arrived."""
    m = jnp.sum(arrived)
    return jnp.minimum(jnp.round(m.astype(jnp.float32) * share).astype(jnp.int32), (m - 1) // 2)


def _mean(uploads: Uploads) -> Aggregate:
    weights = uploads.arrived.astype(jnp.float32)
    return Aggregate(uploads.mean(uploads.x, weights), weights)


def _trimmed(uploads: Uploads, f: jax.Array) -> Aggregate:
    """Computes the mean per coordinate without the f largest and f smallest values.

    `trust` is the fraction of coordinates with a client's value inside the kept range.
    """
    x, arrived, m = uploads.x, uploads.arrived[:, None], jnp.sum(uploads.arrived)
    ordered = jnp.sort(jnp.where(arrived, x, jnp.inf), 0)
    ranks = jnp.arange(len(x))[:, None]
    is_counted = (ranks >= f) & (ranks < m - f)
    value = jnp.sum(jnp.where(is_counted, ordered, 0.0), 0) / (m - 2 * f).astype(jnp.float32)
    low, high = ordered[f][None], ordered[m - f - 1][None]
    trust = jnp.mean(arrived & (x >= low) & (x <= high), 1)
    # Rounding must not move the mean of equal values.
    return Aggregate(jnp.clip(value, low[0], high[0]), trust)


def _median(uploads: Uploads) -> Aggregate:
    return _trimmed(uploads, (jnp.sum(uploads.arrived) - 1) // 2)


def _squared_distances(uploads: Uploads) -> jax.Array:
    """Returns ‖x_i − x_j‖², [K, K]; infinite in the columns of absent clients.

    Squares that overflow are finite, so these clients are nearer than absent ones.
    """
    squares = jax.lax.map(lambda row: jnp.sum(jnp.square(uploads.x - row[None]), -1), uploads.x)
    return jnp.where(uploads.arrived[None], jnp.minimum(squares, _LARGEST), jnp.inf)


def _smallest(values: jax.Array, count: Any) -> jax.Array:
    """Returns bool [..., K]: the `count` smallest values, the first ones of equal values."""
    return jnp.argsort(jnp.argsort(values, stable=True), stable=True) < count


def _krum_selection(uploads: Uploads, count: Any) -> jax.Array:
    """Returns float32 [K]: 1 for the `count` uploads with the smallest sums of Krum, else 0."""
    m = jnp.sum(uploads.arrived)
    itself = jnp.eye(len(uploads.x), dtype=bool)
    distances = jnp.where(itself, jnp.inf, _squared_distances(uploads))
    is_other = uploads.arrived[None] & ~itself
    nearest = _smallest(distances, jnp.maximum(m - uploads.f - 2, 1)) & is_other
    sums = jnp.minimum(jnp.sum(jnp.where(nearest, distances, 0.0), -1), _LARGEST)
    return _smallest(jnp.where(uploads.arrived, sums, jnp.inf), count).astype(jnp.float32)


def _krum(uploads: Uploads) -> Aggregate:
    selected = _krum_selection(uploads, 1)
    return Aggregate(uploads.x[jnp.argmax(selected)], selected)


def _multi_krum(uploads: Uploads) -> Aggregate:
    selected = _krum_selection(uploads, jnp.sum(uploads.arrived) - uploads.f)
    return Aggregate(uploads.mean(uploads.x, selected), selected)


def _geometric_median(uploads: Uploads) -> Aggregate:
    def step(_: Any, aggregate: Aggregate) -> Aggregate:
        distances = jnp.linalg.norm(uploads.x - aggregate.value[None], axis=1)
        weights = jnp.where(uploads.arrived, 1 / jnp.maximum(distances, _SMOOTHING), 0.0)
        return Aggregate(uploads.mean(uploads.x, weights), weights / jnp.max(weights))

    # Steps from an upload stay there, so a client that uploads w would hold them at w.
    first = Aggregate(_median(uploads).value, jnp.zeros(len(uploads.x)))
    return jax.lax.fori_loop(0, uploads.steps, step, first)


def _clipped_step(uploads: Uploads, centre: jax.Array) -> Aggregate:
    """Returns the centre plus the mean of the clipped differences, and the clip factors."""
    differences = uploads.x - centre[None]
    norms = jnp.linalg.norm(differences, axis=1)
    if uploads.norm is None:
        limit: Any = jnp.nanmedian(jnp.where(uploads.arrived, norms, jnp.nan))
    else:
        limit = uploads.norm
    factors = jnp.where(norms > limit, limit / jnp.maximum(norms, 1e-30), 1.0)
    trust = jnp.where(uploads.arrived, factors, 0.0)
    arrived = uploads.arrived.astype(jnp.float32)
    return Aggregate(centre + uploads.mean(differences * factors[:, None], arrived), trust)


def _norm_clipping(uploads: Uploads) -> Aggregate:
    return _clipped_step(uploads, uploads.start)


def _centred_clipping(uploads: Uploads) -> Aggregate:
    def step(_: Any, aggregate: Aggregate) -> Aggregate:
        return _clipped_step(uploads, aggregate.value)

    first = Aggregate(uploads.start, jnp.zeros(len(uploads.x)))
    return jax.lax.fori_loop(0, uploads.steps, step, first)


RULES: dict[str, Rule] = {
    "mean": _mean,
    "median": _median,
    "trimmed_mean": lambda uploads: _trimmed(uploads, uploads.f),
    "krum": _krum,
    "multi_krum": _multi_krum,
    "geometric_median": _geometric_median,
    "norm_clipping": _norm_clipping,
    "centred_clipping": _centred_clipping,
}


def mix(uploads: Uploads) -> tuple[Uploads, jax.Array]:
    """Replaces each upload by the mean of the m − f uploads nearest to it, itself included.

    Also returns, for each client, the fraction of these means that contain its upload, [K].
    """
    count = jnp.sum(uploads.arrived) - uploads.f
    nearest = _smallest(_squared_distances(uploads), count).astype(jnp.float32)
    x = jnp.matmul(nearest / count.astype(jnp.float32), uploads.x, precision="highest")
    arrived = uploads.arrived[:, None]
    share = jnp.sum(jnp.where(arrived, nearest, 0.0), 0) / jnp.sum(arrived, dtype=jnp.float32)
    return uploads._replace(x=jnp.where(arrived, x, uploads.start[None])), share


def robust(
    federation: Federation,
    data: FederatedData,
    rule: str,
    *,
    share: float = 0.2,
    mixing: bool = False,
    norm: float | None = None,
    steps: int = 3,
) -> Transform:
    """Returns a transform with which the server gets a robust aggregate as its only upload.

    It suits methods whose server, downloads and uploads hold one model of the same shapes; other
    methods raise UsageError. `observe` also returns `client_trust`, [N]: how far the rule used the
    uploads of each client, or with `mixing` the share of mixtures that contain them; the mean over
    its rounds, NaN before the first.

    Args:
      federation: Tells the number of clients.
      data: Examples; only their shapes matter.
      rule: One of `RULES`.
      share: Fraction of the uploads of a round that may come from attackers.
      mixing: Whether each upload is first mixed with its nearest neighbours.
      norm: Largest norm of the clippings. None: the median of the norms.
      steps: Number of steps of geometric_median and centred_clipping.
    """
    require_one_of("rule", rule, tuple(RULES))
    require(0 <= share < 0.5, f"share is {share}; it must be at least 0 and below 0.5")
    require_above("norm", norm, 0)
    require_count("steps", steps)
    clients = federation.clients

    def aggregate(cohort: Cohort) -> tuple[PyTree, jax.Array]:
        payload = trees.row(cohort.payloads, jnp.argmax(cohort.arrived))
        start, unravel = ravel_pytree(_as_float32(payload))
        x = jax.vmap(lambda upload: ravel_pytree(_as_float32(upload))[0])(cohort.uploads)
        uploads = Uploads(
            x=jnp.where(cohort.arrived[:, None], x, start[None]),
            arrived=cohort.arrived,
            start=start,
            f=tolerated(cohort.arrived, share),
            norm=norm,
            steps=steps,
        )
        mixed, mixed_share = mix(uploads) if mixing else (uploads, None)
        value, trust = RULES[rule](mixed)
        upload = jax.tree.map(lambda new, old: new.astype(old.dtype), unravel(value), payload)
        return upload, trust if mixed_share is None else mixed_share

    def transform(algorithm: Algorithm) -> Algorithm:
        check_single_model("robust_rule", algorithm, data)

        def first(server: PyTree) -> Server:
            return Server(server, jnp.zeros(clients), jnp.zeros(clients, jnp.int32))

        def receive(record: Server, state: State, cohort: Cohort) -> tuple[Server, PyTree]:
            upload, trust = aggregate(cohort)
            place = jnp.argmax(cohort.arrived)[None]
            single = Cohort(
                ids=cohort.ids[place],
                arrived=cohort.arrived[place],
                weights=jnp.ones(1),
                payloads=trees.row(cohort.payloads, place),
                uploads=jax.tree.map(lambda leaf: leaf[None], upload),
                t=cohort.t,
                key=cohort.key,
            )
            server, rows = algorithm.receive(state, single)
            total = record.trust.at[cohort.ids].add(trust, mode="drop")
            rounds = record.rounds.at[cohort.ids].add(1, mode="drop")
            return Server(server, total, rounds), rows

        def observe(record: Server) -> dict[str, jax.Array]:
            mean = record.trust / jnp.maximum(record.rounds, 1).astype(jnp.float32)
            return {"client_trust": jnp.where(record.rounds > 0, mean, jnp.nan)}

        return with_server_state(algorithm, Server, first, receive, observe)

    return transform


def _as_float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


_PER_PHASE: frozenset[Role] = frozenset({"per_phase"})


def _make(value_of: Callable[[str], Any], context: TransformContext) -> Transform | None:
    """Returns the transform, or None for the rule mean without mixing.

    `value_of` returns the value of a setting by its name.
    """
    rule, mixing = value_of("robust_rule"), value_of("robust_mixing")
    if rule == "mean" and not mixing:
        return None
    return robust(
        context.federation,
        context.data,
        rule,
        share=value_of("robust_share"),
        mixing=mixing,
        norm=value_of("robust_norm"),
        steps=value_of("robust_steps"),
    )


ROBUST = Selectable(
    "Uploads and the server",
    {
        "robust_rule": Setting(
            "mean",
            "Aggregation of the uploads: mean, the method's own, or a robust rule: "
            f"{', '.join(list(RULES)[1:-1])} or {list(RULES)[-1]}.",
            choices=tuple(RULES),
            roles=_PER_PHASE,
        ),
        "robust_mixing": Setting(
            False,
            "Replace each upload by the mean of its nearest neighbours before robust_rule.",
            roles=_PER_PHASE,
        ),
        "robust_share": Setting(
            0.2,
            "Fraction of a round's uploads that may come from attackers, for trimmed_mean, krum, "
            "multi_krum and robust_mixing.",
            limits=Limits(low=0, below=0.5),
            roles=_PER_PHASE,
            used_with=UsedWith(
                "robust_rule", ("trimmed_mean", "krum", "multi_krum"), or_true="robust_mixing"
            ),
        ),
        "robust_norm": Setting(
            float,
            "Norm to which the clipping rules scale larger changes down; unset: the median norm.",
            limits=Limits(above=0),
            roles=_PER_PHASE,
            used_with=UsedWith("robust_rule", ("norm_clipping", "centred_clipping")),
        ),
        "robust_steps": Setting(
            3,
            "Number of steps of geometric_median and centred_clipping.",
            limits=Limits(low=1),
            roles=_PER_PHASE,
            used_with=UsedWith("robust_rule", ("geometric_median", "centred_clipping")),
        ),
    },
    _make,
)
