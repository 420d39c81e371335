"""Gradient inversion: reconstructs a client's training images from the change that it uploads.

Geiping et al., Inverting Gradients, 2020. With Δ the change that the client uploaded and Δ(x) the
change by local training on images x, Adam on the pixels minimises

  1 − ⟨Δ, Δ(x)⟩ / (‖Δ‖ ‖Δ(x)‖) + w · mean |differences of neighbouring pixels|

from several random starts, of which the lowest objective counts. The signs of the gradients in x
are used, as in the paper. Δ(x) is computed by the method's own local training, without clipping,
noise and compression, and differentiated. Both changes are differences to the upload of the same
client with no training examples: to the model from which local training starts.

Where ReLUs switch, the first term jumps, and its gradient does not show the jumps. If they are most
of its change, the search fails. `input_weight` then adds a term without them. With one example and
one step, the change of a fully connected layer is K = a bᵀ for its weights, where a is its input
and b the change of its bias. So a = K b / ‖b‖², and ‖a − a(x)‖² / ‖a‖² is continuous in x.

The attacker knows the method, its settings, the download, the labels and the range of pixels.
Layers that stay on the client, such as a private head, start at the attacker's own random
initialisation and are optimised with the pixels. All else on the client is assumed to be known, as
the worst case: control variates, which the server can sum up from earlier uploads, and validation
examples.

Deviations: labels are given instead of inferred. Augmentation and dropout use the attacker's own
random key.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_map_with_path

from fedjax_pfl.audit.server_view import by_path
from fedjax_pfl.core.algorithm import ClientContext, ClientResult, PyTree
from fedjax_pfl.core.examples import ClientData, Split
from fedjax_pfl.core.optimizers import with_dtype_promotion


class Exchange(NamedTuple):
    """Arrays of one client's round that the attacker uses."""

    payload: PyTree  # download
    client: PyTree  # client-side state before training; `Attack.init_private` replaces some leaves
    upload: PyTree  # as it arrived
    x: Any  # float32 [examples, ...]: rows of `Attack.data`; training images are replaced
    y: Any  # [examples, ...]
    i: Any  # client id
    t: Any  # round


class Attack(NamedTuple):
    """Knowledge and settings of the attacker."""

    train: Callable[[PyTree, PyTree, ClientContext], ClientResult]  # without noise and compression
    data: ClientData  # data of the client in NumPy arrays, see `attacked_data`
    compared: tuple[str, ...]  # paths of the compared arrays in the upload
    init_private: Callable[[Any], dict[str, jax.Array]]  # key -> unknown layers, by path in client
    iterations: int = 1000  # steps of Adam
    restarts: int = 4
    rate: float = 0.1  # learning rate for pixels, which lie in [0, 1]
    private_rate: float = 0.01  # learning rate for layers that the attacker lacks
    smoothness: float = 0.01  # w, the weight of the total variation
    input_weight: float = 0.0  # weight of the relative error of layer inputs


def attacked_data(data: ClientData, count: int) -> ClientData:
    """Returns the data of a client with its first `count` training examples and no other rows.

    The rows of `x`, float32, are those examples and then the validation examples. The numbers of
    examples are NumPy integers: loops over them can be differentiated.
    """
    validation_rows = np.asarray(data.validation.rows)
    rows = np.concatenate([np.asarray(data.train.rows)[:count], validation_rows])
    return data._replace(
        x=np.asarray(data.x)[rows].astype(np.float32),
        y=np.asarray(data.y)[rows],
        train=Split(np.arange(count), np.int32(count)),
        validation=Split(count + np.arange(len(validation_rows)), np.int32(data.validation.size)),
    )


class Pixels(NamedTuple):
    """Range of stored pixels; an image in [0, 1] is scaled to it."""

    low: Any
    high: Any

    def to_stored(self, images: Any) -> Any:
        """Returns images as the dataset stores them."""
        return self.low + images * (self.high - self.low)

    def to_unit(self, x: Any) -> Any:
        """Returns stored images in [0, 1]."""
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


def changes(
    attack: Attack, exchange: Exchange, images: jax.Array, private: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the change by training on images and the uploaded change, as vectors.

    Args:
      attack: Knowledge of the attacker.
      exchange: The round of the client.
      images: Stored images [B, ...].
      private: Values of layers by their path in the client-side state, instead of those there.
    """
    client = tree_map_with_path(lambda path, leaf: private.get(keystr(path), leaf), exchange.client)
    arrays = jax.tree.map(jnp.asarray, attack.data)
    validation = Split(arrays.validation.rows, attack.data.validation.size)

    def upload(count: int) -> dict[str, jax.Array]:
        data = arrays._replace(
            x=jnp.asarray(exchange.x).at[: len(images)].set(images),
            y=jnp.asarray(exchange.y),
            train=Split(arrays.train.rows, np.int32(count)),
            validation=validation,
        )
        ctx = ClientContext(i=exchange.i, data=data, t=exchange.t, key=jax.random.key(0))
        return by_path(attack.train(exchange.payload, client, ctx).upload)

    start, uploaded = upload(0), by_path(exchange.upload)

    def change(values: dict[str, jax.Array]) -> jax.Array:
        return jnp.concatenate([(values[p] - start[p]).ravel() for p in attack.compared])

    return change(upload(len(images))), change(uploaded)


def mismatch(
    attack: Attack, exchange: Exchange, images: jax.Array, private: dict[str, jax.Array]
) -> jax.Array:
    """Returns 1 − cosine similarity of the two `changes`."""
    return _angle(*changes(attack, exchange, images, private))


def _angle(computed: jax.Array, uploaded: jax.Array) -> jax.Array:
    """Returns 1 − cosine similarity of two changes."""
    return 1 - jnp.vdot(computed, uploaded) / (_norm(computed) * _norm(uploaded))


def connected_layers(attack: Attack, upload: PyTree) -> list[tuple[str, str]]:
    """Returns the paths of weights and bias of the compared fully connected layers."""
    leaves, pairs = by_path(upload), []
    for path in attack.compared:
        bias = path.removesuffix("['kernel']") + "['bias']"
        if path != bias and bias in attack.compared and leaves[path].ndim == 2:
            pairs.append((path, bias))
    return pairs


def layer_inputs(attack: Attack, upload: PyTree, change: jax.Array) -> list[jax.Array]:
    """Returns the input a = K b / ‖b‖² of each of the `connected_layers`, from their change.

    With several examples it is a mean of their inputs, weighted by their parts of b. Terms without
    examples, such as control variates, change it.

    Args:
      attack: Knowledge of the attacker.
      upload: Only paths and shapes matter.
      change: One of the `changes`.
    """
    leaves = by_path(upload)
    ends = np.cumsum([leaves[path].size for path in attack.compared])[:-1]
    parts = dict(zip(attack.compared, jnp.split(change, ends), strict=True))
    return [
        parts[kernel].reshape(leaves[kernel].shape) @ parts[bias] / _norm(parts[bias]) ** 2
        for kernel, bias in connected_layers(attack, upload)
    ]


def input_error(
    attack: Attack, upload: PyTree, computed: jax.Array, uploaded: jax.Array
) -> jax.Array:
    """Returns the relative squared error of the `layer_inputs` of two changes."""
    a, b = (
        jnp.concatenate(layer_inputs(attack, upload, change)) for change in (computed, uploaded)
    )
    return jnp.sum(jnp.square(a - b)) / _norm(b) ** 2


def _norm(x: jax.Array) -> jax.Array:
    """Returns the norm of a vector; the gradient is finite at 0."""
    return jnp.sqrt(jnp.sum(jnp.square(x)) + 1e-30)


def reconstruct(attack: Attack, exchange: Exchange, pixels: Pixels, key: jax.Array) -> Any:
    """Returns a `Reconstruction` with one image per training example of `attack.data`, in order.

    `key` is the attacker's random key.
    """
    shape = (int(attack.data.train.size), *attack.data.x.shape[1:])
    schedule = optax.cosine_decay_schedule(attack.rate, attack.iterations, 0.01)
    pixel_optimizer, private_optimizer = (
        with_dtype_promotion(optax.adam(rate)) for rate in (schedule, attack.private_rate)
    )

    def attempt(exchange: Exchange, key: jax.Array) -> Reconstruction:
        def objective(images: jax.Array, private: dict[str, jax.Array]) -> Any:
            pair = changes(attack, exchange, pixels.to_stored(images), private)
            value = _angle(*pair)
            total = value + attack.smoothness * total_variation(images)
            if attack.input_weight:
                total += attack.input_weight * input_error(attack, exchange.upload, *pair)
            return total, value

        network_key, image_key = jax.random.split(key)
        images, private = jax.random.uniform(image_key, shape), attack.init_private(network_key)
        slope = jax.grad(objective, (0, 1), has_aux=True)

        def step(_: Any, carry: Any) -> Any:
            (images, private), (pixel_state, private_state) = carry
            (towards, private_slope), _ = slope(images, private)
            updates, pixel_state = pixel_optimizer.update(jnp.sign(towards), pixel_state)
            images = jnp.clip(images + updates, 0, 1)
            steps, private_state = private_optimizer.update(private_slope, private_state)
            private = optax.apply_updates(private, steps)
            return (images, private), (pixel_state, private_state)

        optimizers = pixel_optimizer.init(images), private_optimizer.init(private)
        start = ((images, private), optimizers)
        (images, private), _ = jax.lax.fori_loop(0, attack.iterations, step, start)
        return Reconstruction(images, *objective(images, private))

    @jax.jit
    def attempts(exchange: Exchange, keys: jax.Array) -> Reconstruction:
        return jax.lax.map(lambda key: attempt(exchange, key), keys)

    results = attempts(exchange, jax.random.split(key, attack.restarts))
    best = jnp.nanargmin(results.objective)
    return jax.tree.map(lambda leaf: leaf[best], results)


def psnr(image: np.ndarray, reference: np.ndarray) -> float:
    """Returns the peak signal-to-noise ratio of two images in [0, 1] in dB, at most 100."""
    return float(-10 * np.log10(np.maximum(np.mean(np.square(image - reference)), 1e-10)))


def match_order(images: np.ndarray, originals: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the reconstruction for each original, [B]: examples of one label are in any order."""
    from scipy.optimize import linear_sum_assignment

    errors = np.mean(np.square(originals[:, None] - images[None]), (2, 3, 4))
    equal_labels = np.all((y[:, None] == y[None]).reshape(len(y), len(y), -1), -1)
    return linear_sum_assignment(np.where(equal_labels, errors, 1e6))[1]
