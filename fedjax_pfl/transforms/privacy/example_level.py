"""Differential privacy of single examples: DP-SGD on every client (`core.example_noise`).

Local training clips the gradient of each example and adds noise, so the server and other clients
learn little about one example. It is selected in `Training.example_noise`, before the method is
made; this module checks that a method reads examples in no other way before it uploads.

The method must call `local_training.fit` once in a round, with the client's training examples and
with the run's numbers of epochs or steps. Uploads, trained models and client-side state may depend
on examples in no other way: not by validation scores, prototypes or class counts. Not checked: the
key of `fit` must be made from the key of its context, or noise can be repeated.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl.core import jaxprs, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.example_noise import Fit, record_fits
from fedjax_pfl.core.examples import ClientData, FederatedData, client_data
from fedjax_pfl.core.groups import has_groups
from fedjax_pfl.core.local_training import Training
from fedjax_pfl.transforms.wrapping import Transform

_LOOPS = ("while", "scan")


def example_privacy(data: FederatedData, training: Training) -> Transform:
    """Returns a transform that only checks that example-level privacy covers a method's uploads.

    Args:
      data: Examples; only their shapes matter.
      training: Local training with `example_noise`, from which the method was made.
    """

    def transform(algorithm: Algorithm) -> Algorithm:
        if reason := unsupported_reason(algorithm, data, training):
            raise UsageError(f"example-level privacy is not possible here: {reason}")
        return algorithm

    return transform


def unsupported_reason(algorithm: Algorithm, data: FederatedData, training: Training) -> str:
    """Returns why example-level privacy does not cover a method's uploads, or "" if it does.

    Nothing is compiled. `data` are examples; only their shapes matter. The method was made from
    `training`.
    """
    if has_groups(algorithm):
        return "clients have several architectures"
    key, number = jax.random.key(0), jnp.int32(0)
    state, payload = jax.eval_shape(lambda: _first_payload(algorithm, key))
    client = jax.eval_shape(lambda state: trees.row(state.clients, 0), state)
    examples = jax.eval_shape(lambda: client_data(data, number))
    used: list[ClientData] = []

    def train(examples: ClientData, payload: PyTree, client: PyTree) -> tuple[PyTree, ...]:
        used.append(examples)
        ctx = ClientContext(i=number, data=examples, t=number, key=key)
        result = algorithm.train(payload, client, ctx)
        # The server rejects an update by its model and client-side state too.
        return result.upload, result.variables, result.client

    with record_fits() as fits:
        program, shapes = jax.make_jaxpr(train, return_shape=True)(examples, payload, client)
    if not jax.tree.leaves(shapes[0]):
        return "the method uploads nothing"
    noised = [fit for fit in fits if fit.training.example_noise is not None]
    if reason := _training_reason(noised, used[-1], training, program.jaxpr):
        return reason
    _, is_used = jaxprs.prune(program.jaxpr)
    is_public = [leaf is examples.train.size for leaf in jax.tree.leaves(examples)]
    if any(used and not public for used, public in zip(is_used, is_public, strict=False)):
        return "examples matter for more than the noised gradients of local training"
    return ""


def _first_payload(algorithm: Algorithm, key: jax.Array) -> tuple[Any, PyTree]:
    state = algorithm.init(key)
    ctx = ClientContext(i=jnp.int32(0), data=None, t=jnp.int32(0), key=key)
    return state, algorithm.send(state._replace(clients=()), ctx)


def _training_reason(fits: list[Fit], data: ClientData, training: Training, program: Any) -> str:
    """Returns why the calls of `fit` are not one local training with the run's settings, or ""."""
    sizes = list(_marked_sizes(program, in_loop=False))
    if len(fits) != 1 or len(sizes) != 1:
        return "the method trains more than once in a round, or not by local_training.fit"
    (fit,) = fits
    if sizes[0] != fit.size:
        return "the method trains in a loop or several models at once"
    schedule = ("epochs", "steps", "batch_size", "drop_last", "example_noise")
    if any(getattr(fit.training, name) != getattr(training, name) for name in schedule):
        return "the method changes the epochs, steps or batches of local training"
    if fit.data is not data:
        return "the method trains on other examples than the client's training examples"
    return ""


def _marked_sizes(program: Any, *, in_loop: bool) -> Any:
    """Yields the number of parameters of each call of `fit` in a program; −1 inside a loop."""
    for equation in program.eqns:
        if equation.params.get("name") == "without_examples":
            yield -1 if in_loop else sum(v.aval.size for v in equation.outvars)
            continue
        for inner in jaxprs.inner_programs(equation):
            is_loop = in_loop or equation.primitive.name in _LOOPS
            yield from _marked_sizes(inner, in_loop=is_loop)
