"""One client's work: local SGD over its own examples, and scoring a model on them.

Written for one client. The number of steps is the client's own (a traced loop bound): mapped, a
client runs no step more than it needs; vmapped, a step beyond its own leaves it untouched.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.core import optimizers
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.errors import UsageError, require_at_least
from fedjax_pfl.core.examples import Batch, ClientData, Split, take
from fedjax_pfl.core.task import Task

PyTree = Any
# (params, rest, batch, key) -> ((loss, rest), gradient); `rest` are the variables not trained
Gradient = Callable[[PyTree, PyTree, Batch, jax.Array], tuple[tuple[jax.Array, PyTree], PyTree]]


class Training(NamedTuple):
    """How a client trains. Exactly one of `epochs` and `steps` is set."""

    optimizer: optax.GradientTransformation  # without the rate
    unclipped: optax.GradientTransformation  # the same, for parts whose gradient is not clipped
    rate: Callable[[jax.Array], Any]  # of the round
    batch_size: int
    epochs: int | None
    steps: int | None
    drop_last: bool  # the short batch at the end of an epoch
    keep_optimizer: bool  # the optimiser's state stays with the client from round to round
    first_round: int  # the phase's first round
    rounds: int  # and its length: what a schedule of an algorithm runs over
    step_schedule: Callable[[Any, Any], Any] | None = None  # (step, steps) -> factor of the rate


class Scores(NamedTuple):
    """Sums over a client's examples."""

    metrics: dict[str, PyTree]  # states, by the metric's name
    loss: jax.Array
    examples: jax.Array


def sgd(*, momentum: float = 0.0, weight_decay: float = 0.0, **how: Any) -> Training:
    """SGD in PyTorch's order: clip the gradient, add the decay, then momentum, then the rate.

    Args:
      momentum, weight_decay: 0 leaves them out of the program; a traced number never does.
      how: as for `make_training`.
    """
    return make_training(optimizers.sgd(momentum, weight_decay), **how)


def local_sgd(
    learning_rate: float = 0.01,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    keep_optimizer: bool = False,
) -> Training:
    """Local SGD: what a client does with the model that it receives in a round.

    Args:
      learning_rate: Learning rate.
      epochs: Passes over the client's training examples. Default: 1, unless `steps` is given.
      steps: Number of batches instead of epochs, the same for every client.
      batch_size: Examples of a gradient step.
      momentum: Momentum of SGD.
      weight_decay: Weight decay, added to the gradient before momentum.
      clip_norm: Largest norm of a gradient. Default: no limit.
      keep_optimizer: Whether a client keeps its momentum from round to round.
    """
    return sgd(
        learning_rate=learning_rate,
        epochs=_epochs(epochs, steps),
        steps=steps,
        batch_size=batch_size,
        momentum=momentum,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        keep_optimizer=keep_optimizer,
    )


def local_training(
    optimizer: optax.GradientTransformation,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    clip_norm: float | None = None,
    keep_optimizer: bool = False,
) -> Training:
    """Local training with any optax optimiser that needs gradients and parameters only.

    Args:
      optimizer: With its learning rate, such as `optax.adamw(1e-3)`.
      epochs, steps, batch_size, clip_norm, keep_optimizer: As for `local_sgd`.
    """
    return make_training(
        optimizers.with_rate(optimizer),
        learning_rate=1.0,
        epochs=_epochs(epochs, steps),
        steps=steps,
        batch_size=batch_size,
        clip_norm=clip_norm,
        keep_optimizer=keep_optimizer,
    )


def _epochs(epochs: int | None, steps: int | None) -> int | None:
    """Returns the number of epochs, 1 if neither is given, or raises UsageError."""
    if epochs is not None and steps is not None:
        raise UsageError("give epochs or steps, not both")
    require_at_least("epochs", epochs, 1)
    require_at_least("steps", steps, 1)
    return 1 if epochs is None and steps is None else epochs


def make_training(
    optimizer: optax.GradientTransformation,
    *,
    learning_rate: Any = 0.01,
    step_schedule: Callable[[Any, Any], Any] | None = None,
    clip_norm: float | None = None,
    batch_size: int = 32,
    epochs: int | None = None,
    steps: int | None = None,
    drop_last: bool = False,
    keep_optimizer: bool = False,
    first_round: int = 0,
    rounds: int = 1,
) -> Training:
    """Training by an optimiser as in `core.optimizers`, without the rate.

    Args:
      learning_rate: a number, or a function of the round.
      step_schedule: (step, steps) -> a factor of the rate at a client's step; None: 1.
      clip_norm: largest global norm of a gradient; None: any.
      epochs: shuffled passes over all examples.
      steps: instead, so many batches, each drawn afresh without replacement.
      drop_last: a pass ends before its last short batch, unless it has no other.
      keep_optimizer: the client keeps the optimiser's state between rounds.
      first_round, rounds: the phase that this is for, where an algorithm has a schedule of its own.
    """
    if (epochs is None) == (steps is None):
        raise ValueError("set either epochs or steps")
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    rate = learning_rate if callable(learning_rate) else constant_rate(learning_rate)
    return Training(
        optax.chain(clip, optimizer),
        optimizer,
        rate,
        batch_size,
        epochs,
        steps,
        drop_last,
        keep_optimizer,
        first_round,
        rounds,
        step_schedule,
    )


def constant_rate(rate: Any) -> Callable[[jax.Array], Any]:
    """The same rate in every round."""

    def rate_of(t: jax.Array) -> Any:
        return rate

    return rate_of


def split_variables(variables: PyTree) -> tuple[PyTree, PyTree]:
    """Flax variables as what is trained and the rest."""
    rest = {name: tree for name, tree in variables.items() if name != "params"}
    return variables["params"], rest


def gradient(model: Any, task: Task, data: ClientData) -> Gradient:
    """The gradient of the task's mean loss over a batch's real examples."""

    def loss(params: PyTree, rest: PyTree, batch: Batch, key: jax.Array) -> Any:
        x = batch.x if task.augment is None else task.augment(batch.x, jax.random.fold_in(key, 1))
        outputs, rest = model.apply(
            {"params": params, **rest},
            x,
            train=True,
            mask=batch.mask,
            rngs={"dropout": key},
            mutable=list(rest),
        )
        losses = jnp.where(batch.mask, task.loss(outputs, batch.y, data.classes), 0.0)
        examples = jnp.sum(batch.mask).astype(jnp.float32)
        return jnp.sum(losses) / jnp.maximum(examples, 1.0), rest

    return jax.value_and_grad(loss, has_aux=True)


def random_order(key: jax.Array, longest: int, count: jax.Array) -> jax.Array:
    """A random order of 0..count-1, padding behind it; it does not depend on `longest`."""
    return jnp.argsort(_ranks(key, longest, count))


def _ranks(key: jax.Array, longest: int, count: jax.Array) -> jax.Array:
    """A random number for each place; padding has the highest."""
    return jnp.where(jnp.arange(longest) < count, jax.random.uniform(key, (longest,)), 2.0)


def _drawn(
    key: jax.Array, longest: int, count: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """`size` different places among 0..count-1 with their mask; padding where there are fewer.

    The first of `random_order`, without sorting the rest.
    """
    _, first = jax.lax.top_k(-_ranks(key, longest, count), min(size, longest))
    return jnp.pad(first, (0, max(size - longest, 0))), jnp.arange(size) < count


_ALWAYS_PADDED = 1024


def padded_size(batch_size: int, longest: int) -> int:
    """Returns the number of rows that a batch is padded to.

    A batch that is larger than any client's data needs no more rows than those. Up to 1,024
    examples it has its own size all the same, so that random numbers drawn in its shape do not
    depend on how many examples other clients have.

    Args:
      batch_size: Examples of a gradient step.
      longest: The most training examples that a client has.
    """
    return min(batch_size, max(longest, _ALWAYS_PADDED))


def sample_batch(data: ClientData, split: Split, size: int, key: jax.Array) -> Batch:
    """A batch of `size` examples of a split, or of all where it has fewer, without replacement."""
    longest = split.rows.shape[0]
    places, mask = _drawn(key, longest, split.size, padded_size(size, longest))
    return take(data, split.rows[places], mask)


def _schedule(
    training: Training, split: Split, key: jax.Array
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array]]]:
    """The number of steps, and for a step the places in `split` of its batch with their mask."""
    longest = split.rows.shape[0]
    size = padded_size(training.batch_size, longest)
    if training.steps is not None:

        def fresh(step: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _drawn(jax.random.fold_in(key, step), longest, split.size, size)

        return jnp.where(split.size > 0, training.steps, 0), fresh

    assert training.epochs is not None
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(training.epochs))
    orders = jax.vmap(random_order, (0, None, None))(keys, longest, split.size)
    orders = jnp.pad(orders, ((0, 0), (0, -longest % size)))
    per_epoch = -(-split.size // size)
    if training.drop_last:
        per_epoch = jnp.minimum(per_epoch, jnp.maximum(split.size // size, 1))

    def next_batch(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        epoch, batch = step // jnp.maximum(per_epoch, 1), step % jnp.maximum(per_epoch, 1)
        places = jax.lax.dynamic_slice(orders[epoch], (batch * size,), (size,))
        return places, batch * size + jnp.arange(size) < split.size

    return training.epochs * per_epoch, next_batch


def fit(
    training: Training,
    gradient: Gradient,
    params: PyTree,
    rest: PyTree,
    optimizer_state: PyTree,
    ctx: ClientContext,
) -> tuple[PyTree, PyTree, PyTree, dict[str, jax.Array]]:
    """Train `params` on the visited client's training examples.

    Args:
      gradient: see `Gradient`; another one makes another method (a proximal term, a meta-step).
      params: the tree that is trained. rest: the variables that only the forward pass changes.
      optimizer_state: as it was kept, or an empty tree to start a new one.
    Returns:
      params, rest, the optimiser's state (empty unless it is kept), and metrics.
    """
    data, split = ctx.data, ctx.data.train
    order_key, noise_key = jax.random.split(ctx.key)
    steps, next_batch = _schedule(training, split, order_key)
    moments = optimizer_state if training.keep_optimizer else training.optimizer.init(params)
    rate = training.rate(ctx.t)

    def step(s: jax.Array, now: _Fit) -> _Fit:
        places, mask = next_batch(s)
        batch = take(data, split.rows[places], mask)
        noise = jax.random.fold_in(noise_key, s)
        (loss, rest), grads = gradient(now.params, now.rest, batch, noise)
        updates, moments = training.optimizer.update(grads, now.moments, now.params)
        factor = 1.0 if training.step_schedule is None else training.step_schedule(s, steps)
        params = descend(now.params, updates, rate * factor)
        examples = jnp.sum(mask).astype(jnp.float32)
        return _Fit(params, rest, moments, now.loss + loss * examples, now.examples + examples)

    zero = jnp.zeros((), jnp.float32)
    end = jax.lax.fori_loop(0, steps, step, _Fit(params, rest, moments, zero, zero))
    metrics = {"loss": end.loss / jnp.maximum(end.examples, 1.0)}
    return end.params, end.rest, end.moments if training.keep_optimizer else (), metrics


class _Fit(NamedTuple):
    """What a step of `fit` hands to the next; loss and examples are sums."""

    params: PyTree
    rest: PyTree
    moments: PyTree
    loss: jax.Array
    examples: jax.Array


def descend(params: PyTree, updates: PyTree, rate: Any) -> PyTree:
    """params − rate · updates."""
    return optax.apply_updates(params, jax.tree.map(lambda u: -(rate * u), updates))


def evaluate(
    predict: Callable[[PyTree, jax.Array], jax.Array],
    variables: PyTree,
    data: ClientData,
    split: Split,
    task: Task,
    batch_size: int = 128,
) -> Scores:
    """Sum metrics and loss over a client's examples in `split`."""

    def one(batch: Batch) -> tuple[dict[str, PyTree], jax.Array]:
        outputs = predict(variables, batch.x)
        mask = batch.mask

        def add(values: jax.Array) -> jax.Array:
            real = mask.reshape(mask.shape + (1,) * (values.ndim - 1))
            return jnp.sum(jnp.where(real, values, 0.0), 0)

        each = {m.name: m.update(outputs, batch.y, data.classes) for m in task.metrics}
        return jax.tree.map(add, each), add(task.loss(outputs, batch.y, data.classes))

    if split.rows.shape[0] == 0:
        empty = Split(jnp.zeros((1,), split.rows.dtype), split.size)
        shapes = jax.eval_shape(lambda: sum_batches(one, data, empty, 1))
        metrics, loss = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return Scores(metrics, loss, jnp.zeros((), jnp.int32))
    metrics, loss = sum_batches(one, data, split, batch_size)
    return Scores(metrics, loss, split.size)


def sum_batches(
    f: Callable[[Batch], PyTree], data: ClientData, split: Split, batch_size: int = 128
) -> PyTree:
    """The sum of f(batch) over the batches that a client's examples in `split` make, in order."""
    longest = split.rows.shape[0]
    size = min(batch_size, longest)
    index = jnp.pad(split.rows, (0, -longest % size))

    def batch(s: Any) -> Batch:
        places = jax.lax.dynamic_slice(index, (s * size,), (size,))
        return take(data, places, s * size + jnp.arange(size) < split.size)

    def step(s: jax.Array, sums: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, sums, f(batch(s)))

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(f, batch(0)))
    return jax.lax.fori_loop(0, -(-split.size // size), step, zeros)
