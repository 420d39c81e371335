"""Attacks by a fixed part of the clients, on any method.

`attackers` draws round(share · clients) active clients with a seed. With a larger share, the
attackers of a smaller one attack too. Let p be the downloaded value at an upload's path, or 0 if
nothing was downloaded there, Δ = upload − p, and s `attack_strength`.

On the attackers' training examples, or copies of those that other clients share, see `poison`:
  label_flip        label y becomes C − 1 − y, with C classes
  backdoor          half of the examples get a trigger, a square of the largest value in the last
                    corner of an image, and the label `attack_target` (Gu et al., 2017)
On an attacker's own upload, before the server checks its norm:
  sign_flip         p − s Δ; s = 1 if unset
  scaled_update     p + s Δ; s = 10 if unset (Bagdasaryan et al., 2020)
  gaussian          p + s N(0, 1); s = 1 if unset
On the uploads of all attackers of a round, equal for all of them. With mean μ and standard
deviation σ of each number over the honest clients that arrived (the attackers see all):
  little_is_enough  μ − s σ; s is the largest z that hides the attack if unset: Φ(z) =
                    (n − a − h) / (n − a) with n clients, a attackers and h = ⌊n/2 + 1⌋ − a, but at
                    least 0 and, if attackers are the majority, 4.75 (Baruch et al., 2019)
  min_max           μ − γ σ with the largest γ ≥ 0 for which no honest upload is farther away than
                    the two most distant honest uploads are apart (Shejwalkar and Houmansadr, 2021)

Deviations: attackers of the last two kinds see honest uploads after compression and noise. The
server does not check their uploads, not even against `max_update_norm`. Baruch et al. estimate μ
and σ from the attackers' own examples. Shejwalkar and Houmansadr search γ by halving steps; here a
formula gives it. Variances of BatchNorm are kept at 0 or above. Masks and counters are as in an
honest upload.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError, require, require_above, require_one_of
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.core.groups import group_algorithms, has_groups
from fedjax_pfl.core.setting import Limits, Setting, UsedWith
from fedjax_pfl.transforms.poisoning import ON_DATA, SEED, poison, triggered
from fedjax_pfl.transforms.private_layers import kept_layers
from fedjax_pfl.transforms.wrapping import (
    Selectable,
    Transform,
    TransformContext,
    is_variance,
    keep_layers,
)

# Default strength of each attack on one upload.
ON_UPLOAD: dict[str, float] = {"sign_flip": 1.0, "scaled_update": 10.0, "gaussian": 1.0}
ON_COHORT = ("little_is_enough", "min_max")
ATTACKS = (*ON_DATA, *ON_UPLOAD, *ON_COHORT)

_KEY = (1 << 30) + 3  # folded into the key; differs from those of other transforms


def attackers(federation: Federation, share: float, seed: int = 0) -> np.ndarray:
    """Returns bool [N]: the attackers, round(share · active clients) of the active clients."""
    require(0 <= share <= 1, f"share is {share}; it must be from 0 to 1")
    active = np.flatnonzero(federation.active)
    order = np.random.default_rng([seed, SEED]).permutation(active)
    return np.isin(np.arange(federation.clients), order[: round(share * len(active))])


def attack_uploads(
    is_attacker: np.ndarray,
    kind: str,
    strength: float | None = None,
    private: Collection[str] = (),
) -> Transform:
    """Returns a transform with which attackers send other uploads.

    Args:
      is_attacker: bool [N], such as from `attackers`.
      kind: One of `ON_UPLOAD` or `ON_COHORT`.
      strength: s of the attack, above 0; None: its default. Only None for min_max.
      private: Layers that `private_layers` keeps on the client. They stay as they are.
    """
    require_one_of("kind", kind, (*ON_UPLOAD, *ON_COHORT))
    require_above("strength", strength, 0)
    require(strength is None or kind != "min_max", "min_max has no strength; leave it out")
    # The id of an absent client is N.
    is_attacker_or_absent = np.append(is_attacker, True)

    def wrap(member: Algorithm) -> Callable[..., ClientResult]:
        scale = ON_UPLOAD[kind] if strength is None else strength

        def train(payload: PyTree, client: PyTree, ctx: ClientContext) -> ClientResult:
            result = member.train(payload, client, ctx)
            sent = _own_attack(kind, scale, payload, result.upload, ctx.key)
            sent = keep_layers(result.upload, sent, private)
            attacks = jnp.asarray(is_attacker)[ctx.i]
            return result._replace(upload=trees.where(attacks, sent, result.upload))

        return train

    def attacked(cohort: Cohort) -> Cohort:
        if not any(map(_is_number, jax.tree.leaves(cohort.uploads))):
            return cohort
        honest = cohort.arrived & ~jnp.asarray(is_attacker_or_absent)[cohort.ids]
        attacks = cohort.arrived & ~honest & jnp.any(honest)
        zeros = jax.tree.map(jnp.zeros_like, cohort.uploads)  # what attackers see of private layers
        x = _vectors(keep_layers(zeros, cohort.uploads, private))
        sent = _with_numbers(cohort.uploads, joint_attack(kind, strength, x, honest, attacks))
        sent = keep_layers(cohort.uploads, sent, private)
        return cohort._replace(uploads=trees.where(attacks, sent, cohort.uploads))

    def transform(algorithm: Algorithm) -> Algorithm:
        if kind in ON_UPLOAD:
            trains = tuple(map(wrap, group_algorithms(algorithm)))
            return algorithm._replace(train=trains if has_groups(algorithm) else trains[0])

        def receive(state: State, cohorts: Any) -> tuple[PyTree, PyTree]:
            grouped = has_groups(algorithm)
            return algorithm.receive(
                state, tuple(map(attacked, cohorts)) if grouped else attacked(cohorts)
            )

        return algorithm._replace(receive=receive)

    return transform


def _is_number(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _own_attack(kind: str, scale: Any, payload: PyTree, upload: PyTree, key: jax.Array) -> PyTree:
    """Returns an attacker's upload, made from its honest one."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(upload)
    downloaded = jax.tree.leaves(trees.matching_download(payload, upload))
    key, sent = jax.random.fold_in(key, _KEY), []
    for n, ((path, leaf), old) in enumerate(zip(leaves, downloaded, strict=True)):
        if _is_number(leaf):
            if kind == "gaussian":
                noise = jax.random.normal(jax.random.fold_in(key, n), leaf.shape, leaf.dtype)
                leaf = old + scale * noise
            else:
                leaf = old + (scale if kind == "scaled_update" else -scale) * (leaf - old)
            leaf = jnp.maximum(leaf, 0.0) if is_variance(path) else leaf
        sent.append(leaf)
    return jax.tree.unflatten(structure, sent)


def _vectors(uploads: PyTree) -> jax.Array:
    """Returns the floating-point numbers of uploads with leaves [K, ...], float32 [K, D]."""
    numbers = filter(_is_number, jax.tree.leaves(uploads))
    return jnp.concatenate([x.reshape(len(x), -1).astype(jnp.float32) for x in numbers], 1)


def _with_numbers(uploads: PyTree, vector: jax.Array) -> PyTree:
    """Returns uploads, leaves [K, ...], with the numbers of `vector`, [D], in every row."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(uploads)
    new, begin = [], 0
    for path, leaf in leaves:
        if _is_number(leaf):
            end = begin + leaf[0].size
            values = vector[begin:end].reshape(1, *leaf.shape[1:]).astype(leaf.dtype)
            values = jnp.maximum(values, 0.0) if is_variance(path) else values
            leaf, begin = jnp.broadcast_to(values, leaf.shape), end
        new.append(leaf)
    return jax.tree.unflatten(structure, new)


def joint_attack(
    kind: str, strength: float | None, x: jax.Array, honest: jax.Array, attacks: jax.Array
) -> jax.Array:
    """Returns what all attackers send, [D].

    Args:
      kind: little_is_enough or min_max.
      strength: s of little_is_enough; None: the largest that hides the attack.
      x: Uploads, float32 [K, D].
      honest: bool [K]: uploads of honest clients that arrived.
      attacks: bool [K]: attackers that arrived.
    """
    count = jnp.maximum(jnp.sum(honest), 1).astype(jnp.float32)
    mask = honest[:, None]
    mean = jnp.sum(jnp.where(mask, x, 0.0), 0) / count
    differences = jnp.where(mask, mean[None] - x, 0.0)
    variance = jnp.sum(jnp.square(differences), 0) / jnp.maximum(count - 1, 1.0)
    deviation = jnp.sqrt(variance)
    if kind == "min_max":
        factor = _largest_factor(x, honest, differences, deviation)
    elif strength is None:
        clients = jnp.sum(honest) + jnp.sum(attacks)
        helpers = clients // 2 + 1 - jnp.sum(attacks)
        hidden = (jnp.sum(honest) - helpers).astype(jnp.float32) / count
        factor = jax.scipy.special.ndtri(jnp.clip(hidden, 0.5, 1 - 1e-6))
    else:
        factor = jnp.float32(strength)
    return mean - factor * deviation


def _largest_factor(
    x: jax.Array, honest: jax.Array, differences: jax.Array, deviation: jax.Array
) -> jax.Array:
    """Returns γ of min_max: the smallest positive root of ‖μ − γ σ − x_i‖ = largest ‖x_i − x_j‖.

    Args:
      x: Uploads, [K, D].
      honest: bool [K].
      differences: μ − x_i of honest clients, [K, D].
      deviation: σ, [D].
    """

    def farthest(row: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(honest, jnp.sum(jnp.square(x - row[None]), 1), 0.0))

    largest = jnp.max(jnp.where(honest, jax.lax.map(farthest, x), 0.0))
    # γ does not depend on the unit of length. In this one, no fourth power over- or underflows.
    unit = jnp.where(largest > 0, jnp.sqrt(largest), 1.0)
    differences, deviation = differences / unit, deviation / unit
    a = jnp.sum(jnp.square(deviation))
    b = -jnp.sum(differences * deviation[None], 1)
    c = jnp.sum(jnp.square(differences), 1) - (largest > 0).astype(jnp.float32)
    roots = (jnp.sqrt(jnp.maximum(jnp.square(b) - a * c, 0.0)) - b) / jnp.maximum(a, 1e-30)
    return jnp.maximum(jnp.min(jnp.where(honest, roots, jnp.inf)), 0.0)


class DataAttack(NamedTuple):
    """Examples of all clients under an attack that the settings select."""

    train: FederatedData  # with the attackers' changed training examples
    triggered: FederatedData | None  # for the success of a backdoor, see `triggered`


def select_attackers(value_of: Callable[[str], Any], federation: Federation) -> np.ndarray:
    """Returns bool [N]: the attackers that the settings select, none by default.

    Raises UsageError if no client is honest. `value_of` returns the value of a setting by its name.
    """
    share = value_of("attack_share") if value_of("attack") != "none" else 0.0
    is_attacker = attackers(federation, share, value_of("partition_seed"))
    active = int(np.sum(federation.active))
    if share and is_attacker.sum() == active:
        raise UsageError(
            f"attack_share is {share:g}, which makes attackers of all {active} clients; lower it "
            "until at least one is honest"
        )
    return is_attacker


def require_attackers(value_of: Callable[[str], Any], phases: Iterable[np.ndarray]) -> None:
    """Raises UsageError if the settings request attackers and no phase has one.

    Args:
      value_of: Returns the value of a setting by its name.
      phases: The attackers of each phase, bool [N].
    """
    share = value_of("attack_share") if value_of("attack") != "none" else 0.0
    require(
        not share or any(is_attacker.any() for is_attacker in phases),
        f"attack_share is {share:g}, which makes an attacker of no client; raise it",
    )


def attack_data(
    value_of: Callable[[str], Any], data: FederatedData, federation: Federation
) -> DataAttack:
    """Returns the examples under the attack that the settings select, unchanged by default.

    `value_of` returns the value of a setting by its name.
    """
    kind, target = value_of("attack"), value_of("attack_target")
    is_attacker = select_attackers(value_of, federation)
    if kind not in ON_DATA or not is_attacker.any():
        return DataAttack(data, None)
    poisoned = poison(data, federation, is_attacker, kind, target)
    return DataAttack(
        poisoned, triggered(data, is_attacker, target) if kind == "backdoor" else None
    )


def _make(value_of: Callable[[str], Any], context: TransformContext) -> Transform | None:
    """Returns the transform, or None if no client attacks the uploads.

    `value_of` returns the value of a setting by its name.
    """
    is_attacker = select_attackers(value_of, context.federation)
    if value_of("attack") in ("none", *ON_DATA) or not is_attacker.any():
        return None
    return attack_uploads(
        is_attacker,
        value_of("attack"),
        value_of("attack_strength"),
        private=kept_layers(value_of, context.model),
    )


ATTACK = Selectable(
    "Uploads and the server",
    {
        "attack": Setting(
            "none",
            f"Attack by a part of the clients: none, {', '.join(ATTACKS[:-1])} or {ATTACKS[-1]}.",
            choices=("none", *ATTACKS),
            roles={"simulation_only"},
        ),
        "attack_share": Setting(
            0.2,
            "Fraction of the active clients that attack, chosen by partition_seed.",
            limits=Limits(low=0, below=1),
            used_with=UsedWith("attack", ATTACKS),
        ),
        "attack_strength": Setting(
            float,
            "Factor of the change of an upload, or of the deviation of the noise or of the honest "
            "uploads; unset: the attack's default.",
            limits=Limits(above=0),
            used_with=UsedWith("attack", (*ON_UPLOAD, "little_is_enough")),
        ),
        "attack_target": Setting(
            0,
            "Class that a backdoor makes models predict.",
            limits=Limits(low=0),
            used_with=UsedWith("attack", ("backdoor",)),
        ),
    },
    _make,
)
