"""Gradient inversion: reconstructs a client's training images from the change that it uploads.

Geiping et al., Inverting Gradients, 2020. With Δ the uploaded change of the network's parameters
and Δ(x) the change by training on images x, Adam on the pixels minimises

  1 − ⟨Δ, Δ(x)⟩ / (‖Δ‖ ‖Δ(x)‖) + w · mean |differences of neighbouring pixels|

from several random starts, of which the lowest objective counts. The signs of the gradients in x
are used, as in the paper. The attacker knows the download, the network, the loss, the optimiser,
the labels and the range of pixels. Only layers that are downloaded and uploaded are compared.
Values that the attacker lacks, such as a private head, start at its own random initialisation and
are optimised with the pixels.

Deviations: labels are given instead of inferred. Training by a method's own loss, such as FedProx
with its penalty, is approximated by steps on the plain loss, without augmentation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_map_with_path

from fedjax_pfl.audit.server_view import ServerView, by_path
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.core.local_training import Training
from fedjax_pfl.core.optimizers import with_dtype_promotion
from fedjax_pfl.core.task import Task


class Attack(NamedTuple):
    """Knowledge and settings of the attacker."""

    network: Any
    task: Task
    training: Training
    data: ClientData  # only `classes` is used
    t: Any  # round
    steps: int = 1  # gradient steps of the client, each on all images
    iterations: int = 1000  # steps of Adam
    restarts: int = 4
    rate: float = 0.1  # learning rate for pixels, which lie in [0, 1]
    private_rate: float = 0.01  # learning rate for values that the attacker lacks
    smoothness: float = 0.01  # w, the weight of the total variation


class Pixels(NamedTuple):
    """Range of the network's inputs; an image in [0, 1] is scaled to it."""

    low: Any
    high: Any

    def to_input(self, images: Any) -> Any:
        """Returns images as the network takes them."""
        return self.low + images * (self.high - self.low)

    def to_unit(self, x: Any) -> Any:
        """Returns inputs of the network as images in [0, 1]."""
        return (x - self.low) / (self.high - self.low)


class Reconstruction(NamedTuple):
    """Reconstructed images in [0, 1], and the objective of the best start."""

    images: jax.Array  # [B, height, width, channels]
    objective: jax.Array
    mismatch: jax.Array  # 1 − cosine similarity of the changes


def total_variation(images: jax.Array) -> jax.Array:
    """Returns the mean absolute difference of neighbouring pixels, for images [B, H, W, C]."""
    vertical, horizontal = jnp.diff(images, axis=1), jnp.diff(images, axis=2)
    return (jnp.sum(jnp.abs(vertical)) + jnp.sum(jnp.abs(horizontal))) / images.size


def mismatch_function(attack: Attack, view: ServerView, y: jax.Array) -> Any:
    """Returns a function (x, variables) -> 1 − cosine similarity of uploaded and computed change.

    It is 0 for all x if no layer can be compared. `y` are the labels [B].
    """
    task = attack.task._replace(augment=None)
    gradient = local_training.gradient(attack.network, task, attack.data)
    key = jax.random.key(0)  # of dropout, whose key the attacker lacks
    mask = jnp.ones(len(y), bool)

    def mismatch(x: jax.Array, variables: PyTree) -> jax.Array:
        if not view.compared:
            return jnp.zeros(())
        start, non_params = local_training.split_variables(variables)
        params, moments = start, attack.training.optimizer.init(start)
        change = jax.tree.map(jnp.zeros_like, start)  # exact, unlike a difference of parameters
        for step in range(attack.steps):
            grads = gradient(params, non_params, Batch(x, y, mask), jax.random.fold_in(key, step))
            updates, moments = attack.training.optimizer.update(grads[1], moments, params)
            change = local_training.descend(change, updates, attack.training.rate(attack.t))
            params = jax.tree.map(jnp.add, start, change)
        pairs = [
            (leaf.ravel(), view.change[path].ravel())
            for path, leaf in by_path({"params": change}).items()
            if path in view.compared
        ]
        computed, uploaded = (jnp.concatenate(leaves) for leaves in zip(*pairs, strict=True))
        norms = _norm(computed) * _norm(uploaded)
        return 1 - jnp.vdot(computed, uploaded) / norms

    return mismatch


def _norm(x: jax.Array) -> jax.Array:
    """Returns the norm of a vector; the gradient is finite at 0."""
    return jnp.sqrt(jnp.sum(jnp.square(x)) + 1e-30)


def reconstruct(
    attack: Attack,
    view: ServerView,
    pixels: Pixels,
    y: jax.Array,
    shape: tuple[int, ...],
    key: jax.Array,
) -> Reconstruction:
    """Returns one image per label in `y` [B], in the order of the labels.

    `shape` is the shape of an image, and `key` the attacker's random key.
    """
    mismatch = mismatch_function(attack, view, y)
    schedule = optax.cosine_decay_schedule(attack.rate, attack.iterations, 0.01)
    pixel_optimizer, private_optimizer = (
        with_dtype_promotion(optax.adam(rate)) for rate in (schedule, attack.private_rate)
    )

    def objective(images: jax.Array, private: dict[str, jax.Array], variables: PyTree) -> Any:
        values = {**private, **view.start}
        variables = tree_map_with_path(lambda path, x: values.get(keystr(path), x), variables)
        value = mismatch(pixels.to_input(images), variables)
        return value + attack.smoothness * total_variation(images), value

    def attempt(key: jax.Array) -> Reconstruction:
        network_key, image_key = jax.random.split(key)
        variables = dict(attack.network.init(network_key, pixels.to_input(jnp.zeros((1, *shape)))))
        images = jax.random.uniform(image_key, (len(y), *shape))
        private = {
            path: leaf
            for path, leaf in by_path({"params": variables["params"]}).items()
            if path not in view.start
        }
        slope = jax.grad(objective, (0, 1), has_aux=True)

        def step(_: Any, carry: Any) -> Any:
            (images, private), (pixel_state, private_state) = carry
            (towards, private_slope), _ = slope(images, private, variables)
            updates, pixel_state = pixel_optimizer.update(jnp.sign(towards), pixel_state)
            images = jnp.clip(images + updates, 0, 1)
            changes, private_state = private_optimizer.update(private_slope, private_state)
            private = optax.apply_updates(private, changes)
            return (images, private), (pixel_state, private_state)

        optimizers = pixel_optimizer.init(images), private_optimizer.init(private)
        start = ((images, private), optimizers)
        (images, private), _ = jax.lax.fori_loop(0, attack.iterations, step, start)
        return Reconstruction(images, *objective(images, private, variables))

    keys = jax.random.split(key, attack.restarts)
    attempts = jax.jit(lambda keys: jax.lax.map(attempt, keys))(keys)
    best = jnp.nanargmin(attempts.objective)
    return jax.tree.map(lambda leaf: leaf[best], attempts)


def psnr(image: np.ndarray, reference: np.ndarray) -> float:
    """Returns the peak signal-to-noise ratio of two images in [0, 1] in dB, at most 100."""
    return float(-10 * np.log10(np.maximum(np.mean(np.square(image - reference)), 1e-10)))


def match_order(images: np.ndarray, originals: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the reconstruction for each original, [B]: examples of one label are in any order."""
    from scipy.optimize import linear_sum_assignment

    errors = np.mean(np.square(originals[:, None] - images[None]), (2, 3, 4))
    equal_labels = np.all((y[:, None] == y[None]).reshape(len(y), len(y), -1), -1)
    return linear_sum_assignment(np.where(equal_labels, errors, 1e6))[1]
