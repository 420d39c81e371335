"""Local training of one client, and evaluation of a model on its examples.

The number of steps is a traced loop bound. Under `lax.map` a client runs only its own steps; under
`vmap` further steps leave its state unchanged.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.core import batches, offload, optimizers, trees
from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.core.arguments import check_arguments
from fedjax_pfl.core.errors import UsageError, require_above, require_at_least, require_count
from fedjax_pfl.core.example_noise import (
    ExampleNoise,
    fit_without_examples,
    noised_gradient,
    record_fit,
)
from fedjax_pfl.core.examples import Batch, ClientData, Split, take_repeating
from fedjax_pfl.core.metrics import confusion_matrix
from fedjax_pfl.core.task import Task

PyTree = Any
# (params, non_params, batch, key) -> ((loss, non_params), gradient of the loss in params).
# `non_params` are the variables that the forward pass updates, such as batch statistics.
Gradient = Callable[[PyTree, PyTree, Batch, jax.Array], tuple[tuple[jax.Array, PyTree], PyTree]]


class Training(NamedTuple):
    """Hyper-parameters of local training. Exactly one of `epochs` and `steps` is set.

    `step_schedule` maps (step, steps of the round) to a factor of the learning rate; None: 1.
    """

    base_optimizer: optax.GradientTransformation  # without learning rate and gradient clipping
    clip_norm: Any  # largest global norm of a gradient, or None
    rate: Callable[[jax.Array], Any]  # round -> learning rate
    batch_size: int  # examples of a gradient step
    epochs: int | None  # passes over the training examples in a round
    steps: int | None  # gradient steps in a round
    drop_last: bool  # drop the last batch of an epoch if it is short
    keep_optimizer: bool  # keep the optimiser's state on the client between rounds
    step_schedule: Callable[[Any, Any], Any] | None = None
    example_noise: ExampleNoise | None = None  # clipping and noise of single examples' gradients

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Returns the optimiser with gradient clipping, without learning rate."""
        if self.clip_norm is None:
            return self.base_optimizer
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), self.base_optimizer)

    def with_optimizer(self, optimizer: optax.GradientTransformation) -> "Training":
        """Returns the same training with another optimiser, without `clip_norm`."""
        return self._replace(base_optimizer=optimizer, clip_norm=None)


class Scores(NamedTuple):
    """Sums over the examples of a split of a client."""

    metrics: dict[str, PyTree]  # by name of the metric: the state that `Metric.finish` takes
    loss: jax.Array  # float32 []: sum of the losses of the examples
    examples: jax.Array  # int32: number of examples
    confusion: jax.Array | None = None  # [C, C]: examples by class and predicted class, if counted


def sgd(*, momentum: float = 0.0, weight_decay: float = 0.0, **settings: Any) -> Training:
    """Returns local training by SGD in PyTorch's order: clip, decay, momentum, learning rate.

    Args:
      momentum: Momentum. 0 leaves it out of the program; a traced number does not.
      weight_decay: Weight decay. 0 leaves it out of the program; a traced number does not.
      **settings: Keyword arguments of `make_training`.
    """
    require_at_least("momentum", momentum, 0)
    require_at_least("weight_decay", weight_decay, 0)
    return make_training(optimizers.sgd(momentum, weight_decay), **settings)


@check_arguments
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
    """Returns local training by SGD.

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


@check_arguments
def local_training(
    optimizer: optax.GradientTransformation,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    clip_norm: float | None = None,
    keep_optimizer: bool = False,
) -> Training:
    """Returns local training by any optax optimiser that needs only gradients and parameters.

    `optimizer` includes its learning rate, as in `optax.adamw(1e-3)`. Other arguments are those of
    `local_sgd`.
    """
    optimizers.check("optimizer", optimizer)
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
    """Returns the number of epochs: None if `steps` is set, 1 if neither is.

    Raises UsageError if both are set.
    """
    if epochs is not None and steps is not None:
        raise UsageError("give epochs or steps, not both")
    require_count("epochs", epochs)
    require_count("steps", steps)
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
) -> Training:
    """Returns training by an optimiser without learning rate, as in `core.optimizers`.

    Raises ValueError unless exactly one of `epochs` and `steps` is set.

    Args:
      optimizer: Its updates are subtracted from the parameters, times the learning rate.
      learning_rate: A number, or a function of the round.
      step_schedule: (step, steps) -> factor of the learning rate at a step. Default: 1.
      clip_norm: Largest global norm of a gradient. Default: no limit.
      batch_size: Examples of a gradient step.
      epochs: Shuffled passes over all training examples.
      steps: Number of batches instead of epochs, each sampled independently without replacement.
      drop_last: Drop the last batch of an epoch if it is short, unless it is the only one.
      keep_optimizer: Keep the optimiser's state on the client between rounds.
    """
    if (epochs is None) == (steps is None):
        raise ValueError("set either epochs or steps")
    require_count("batch_size", batch_size)
    require_above("clip_norm", clip_norm, 0)
    if not callable(learning_rate):
        require_at_least("learning_rate", learning_rate, 0)
    return Training(
        base_optimizer=optimizer,
        clip_norm=clip_norm,
        rate=learning_rate if callable(learning_rate) else constant_rate(learning_rate),
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        drop_last=drop_last,
        keep_optimizer=keep_optimizer,
        step_schedule=step_schedule,
    )


def constant_rate(rate: Any) -> Callable[[jax.Array], Any]:
    """Returns a function round -> `rate`."""

    def rate_of_round(t: jax.Array) -> Any:
        return rate

    return rate_of_round


def split_variables(variables: PyTree) -> tuple[PyTree, PyTree]:
    """Returns variables["params"] and a dict of the other Flax collections."""
    non_params = {name: tree for name, tree in variables.items() if name != "params"}
    return variables["params"], non_params


def gradient(model: Any, task: Task, data: ClientData) -> Gradient:
    """Returns a function (params, non_params, batch, key) -> ((loss, new non_params), gradient).

    The loss is the task's mean over the examples of the batch; padding does not count. The model
    runs in training mode, with examples augmented if the task does so.
    """

    def loss(params: PyTree, non_params: PyTree, batch: Batch, key: jax.Array) -> Any:
        x, y, mask = batch
        x = x if task.augment is None else task.augment(x, jax.random.fold_in(key, 1))
        outputs, non_params = model.apply(
            {"params": params, **non_params},
            x,
            train=True,
            mask=mask,
            rngs={"dropout": key},
            mutable=list(non_params),
        )
        losses = jnp.where(mask, task.loss(outputs, y, data.classes), 0.0)
        return jnp.sum(losses) / jnp.maximum(jnp.sum(mask).astype(jnp.float32), 1.0), non_params

    return jax.value_and_grad(loss, has_aux=True)


def _batches(
    training: Training, split: Split, key: jax.Array
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, jax.Array]]]:
    """Returns the number of steps of a round, and a function step -> (positions, mask), [B] each.

    Positions are indices into `split.rows`. The mask is False for padding.
    """
    longest = split.rows.shape[0]
    size = batches.padded_size(training.batch_size, longest)
    if training.steps is not None:

        def sampled_batch(step: jax.Array) -> tuple[jax.Array, jax.Array]:
            return batches.sample_positions(
                jax.random.fold_in(key, step), longest, split.size, size
            )

        return batches.local_steps(training, split.size, size), sampled_batch

    assert training.epochs is not None
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(training.epochs))
    orders = jax.vmap(batches.random_order, (0, None, None))(keys, longest, split.size)
    orders = jnp.pad(orders, ((0, 0), (0, -longest % size)))
    steps = batches.local_steps(training, split.size, size)
    per_epoch = steps // training.epochs

    def epoch_batch(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        epoch, batch = step // jnp.maximum(per_epoch, 1), step % jnp.maximum(per_epoch, 1)
        positions = jax.lax.dynamic_slice(orders[epoch], (batch * size,), (size,))
        return positions, batch * size + jnp.arange(size) < split.size

    return steps, epoch_batch


def fit(
    training: Training,
    gradient: Gradient,
    params: PyTree,
    non_params: PyTree,
    optimizer_state: PyTree,
    ctx: ClientContext,
) -> tuple[PyTree, PyTree, PyTree, dict[str, jax.Array]]:
    """Trains parameters on the training examples of the client `ctx.i`.

    Args:
      training: Hyper-parameters.
      gradient: (params, non_params, batch, key) -> ((loss, new non_params), gradient). See the
        function `gradient`; methods replace it to add a proximal term or a meta step.
      params: Parameters to train.
      non_params: The other collections, such as batch statistics, which the forward pass updates.
      optimizer_state: State from the previous round; ignored unless `training.keep_optimizer`.
      ctx: The client, its data, the round and a random key.

    Returns:
      params, non_params, optimiser state, () unless kept, and {"loss": mean over all examples}.
    """
    is_recorded = record_fit(training, params, ctx)
    if training.example_noise is not None:
        if is_recorded:
            return fit_without_examples(training, gradient, params, non_params, ctx)
        gradient = noised_gradient(gradient, training.example_noise)
    data, split = ctx.data, ctx.data.train
    order_key, noise_key = jax.random.split(ctx.key)
    steps, next_batch = _batches(training, split, order_key)
    first = training.optimizer.init(params)
    moments = optimizers.kept_state(optimizer_state, first) if training.keep_optimizer else first
    rate = training.rate(ctx.t)

    def step(s: jax.Array, carry: _FitCarry) -> _FitCarry:
        with jax.named_scope("batch"):  # names for profiles
            positions, mask = next_batch(s)
            batch = take_repeating(data, split.rows[positions], mask)
        noise = jax.random.fold_in(noise_key, s)
        (loss, non_params), grads = gradient(carry.params, carry.non_params, batch, noise)
        with jax.named_scope("optimizer"):
            grads = trees.with_dtypes(grads, carry.params)  # a method may have mixed in float32
            updates, moments = training.optimizer.update(grads, carry.moments, carry.params)
            factor = 1.0 if training.step_schedule is None else training.step_schedule(s, steps)
            params = optimizers.descend(carry.params, updates, rate * factor)
        examples = jnp.sum(mask).astype(jnp.float32)
        return _FitCarry(
            params=params,
            non_params=non_params,
            moments=moments,
            loss=carry.loss + loss * examples,
            examples=carry.examples + examples,
        )

    zero = jnp.zeros((), jnp.float32)
    start = _FitCarry(
        params=params, non_params=non_params, moments=moments, loss=zero, examples=zero
    )
    stop = steps if ctx.max_steps is None else jnp.minimum(steps, ctx.max_steps)
    end = jax.lax.fori_loop(0, stop, step, start)
    metrics = {"loss": end.loss / jnp.maximum(end.examples, 1.0)}
    return end.params, end.non_params, end.moments if training.keep_optimizer else (), metrics


class _FitCarry(NamedTuple):
    """Loop state of `fit`."""

    params: PyTree
    non_params: PyTree
    moments: PyTree  # optimiser state
    loss: jax.Array  # sum over the examples of all steps
    examples: jax.Array  # their number, float32 []


def evaluate(
    predict: Callable[[PyTree, jax.Array], jax.Array],
    variables: PyTree,
    data: ClientData,
    split: Split,
    task: Task,
    batch_size: int = 128,
    *,
    count_confusion: bool = False,
) -> Scores:
    """Sums the task's metrics and loss over the examples of a split.

    Args:
      predict: (variables, x [B, ...]) -> outputs [B, ...].
      variables: Variables of the model.
      data: Data of the client; tells which classes it uses.
      split: The split of the client to evaluate.
      task: Loss and metrics.
      batch_size: Examples per forward pass.
      count_confusion: Whether to count the confusion matrix. Requires a task with classes.
    """

    def score(batch: Batch) -> tuple[dict[str, PyTree], jax.Array, jax.Array | None]:
        outputs = predict(variables, batch.x)

        def masked_sum(values: jax.Array) -> jax.Array:
            # A task of the user may return bfloat16, and its sums would lose examples.
            values = offload.widened(values)
            mask = batch.mask.reshape(batch.mask.shape + (1,) * (values.ndim - 1))
            return jnp.sum(jnp.where(mask, values, 0.0), 0)

        terms = {m.name: m.update(outputs, batch.y, data.classes) for m in task.metrics}
        sums = jax.tree.map(masked_sum, terms)
        matrix = (
            confusion_matrix(outputs, batch.y, data.classes, batch.mask)
            if count_confusion
            else None
        )
        return sums, masked_sum(task.loss(outputs, batch.y, data.classes)), matrix

    if split.rows.shape[0] == 0:
        empty = Split(jnp.zeros((1,), split.rows.dtype), split.size)
        shapes = jax.eval_shape(lambda: batches.sum_batches(score, data, empty, 1))
        metrics, loss, matrix = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    else:
        metrics, loss, matrix = batches.sum_batches(score, data, split, batch_size)
    return Scores(metrics=metrics, loss=loss, examples=split.size, confusion=matrix)
