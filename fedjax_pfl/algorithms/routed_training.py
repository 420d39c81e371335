"""The local epochs of FedMN: gates are drawn, the open blocks train, and the router takes a step.

The equations are in `fedmn`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import PyTree, Visit
from fedjax_pfl.core.errors import UsageError, need, one_of
from fedjax_pfl.core.examples import Batch
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks import router as routing
from fedjax_pfl.networks.modular import Modular, WithLogits, blocks, keep_inactive

CHOICES = {
    "gates": ("hard", "soft"),
    "embed": ("concatenated", "correlation"),
    "encoders": ("always", "fetched"),
}


class Epochs(NamedTuple):
    """What a local epoch hands to the next."""

    theta: PyTree
    psi: PyTree
    momentum: list[PyTree]  # of both
    used: jax.Array  # bool [B]: blocks that were active in any epoch so far
    z: jax.Array  # [E] the logits of this epoch
    opened: jax.Array  # [E] and the gates sampled from them
    loss: jax.Array  # the sum


def trainer(
    network: Modular,
    routes: routing.Routes,
    task: Task,
    training: local_training.Training,
    *,
    hard: bool,
    temperatures: tuple[float, float],
    router_rate: float,
) -> Callable[[PyTree, PyTree, list[PyTree], Any, Visit], tuple[Epochs, int]]:
    """(θ, ψ, momentum of both, what `look` saw, visit) -> what the last epoch leaves, and how many.

    Steps, where they are counted instead of epochs, are one epoch.
    """
    layout, first = network.layout, network.first
    paths, names = routing.paths(layout), blocks(layout, first)
    one_epoch = training._replace(epochs=training.epochs and 1, keep=True)
    epochs = training.epochs or 1

    def network_epoch(
        theta: PyTree, trace: PyTree, z: jax.Array, sample: Any, visit: Visit
    ) -> tuple[PyTree, PyTree, jax.Array, jax.Array]:
        """SGD at fixed gates: θ, its momentum, the loss, and Σ of the gradients at the logits z."""
        whole = local_training.gradient(WithLogits(network, sample), task, visit.data)

        def gradient(params: PyTree, carried: Any, batch: Batch, key: jax.Array) -> Any:
            rest, pulled = carried
            (loss, rest), grads = whole({**params, "logits": z}, rest, batch, key)
            return (loss, (rest, pulled + grads.pop("logits"))), grads

        params, rest = local_training.split_variables(theta)
        params, (rest, pulled), trace, metrics = local_training.fit(
            one_epoch, gradient, params, (rest, jnp.zeros(paths)), trace, visit
        )
        return {"params": params, **rest}, trace, metrics["loss"], pulled

    def router_step(
        psi: PyTree, trace: PyTree, grads: PyTree, visit: Visit
    ) -> tuple[PyTree, PyTree]:
        params = psi["params"]
        updates, trace = training.optimizer.update(grads, trace, params)
        new = local_training.descend(params, updates, router_rate * training.rate(visit.t))
        # Decay would move the frozen ones too.
        new |= {name: params[name] for name in routes.frozen}
        return {**psi, "params": new}, trace

    def train(
        theta: PyTree, psi: PyTree, momentum: list[PyTree], seen: Any, visit: Visit
    ) -> tuple[Epochs, int]:
        tau = routing.temperature(visit.t - training.begin, training.rounds, *temperatures)

        def epoch(e: Any, now: Epochs) -> Epochs:
            noise_key, fit_key = jax.random.split(jax.random.fold_in(visit.key, e))
            noise = jax.random.logistic(noise_key, (paths,))
            sample = partial(routing.sample, noise=noise, tau=tau, layout=layout, hard=hard)
            trace, psi_trace = now.momentum
            z = routes.logits(now.psi, visit.data, seen)
            opened = sample(z)
            active = routing.active(opened, layout, first)
            new, moved, more, pulled = network_epoch(
                now.theta, trace, z, sample, visit._replace(key=fit_key)
            )
            # Decay and momentum would move blocks, too, that the client has not fetched.
            theta, trace = keep_inactive(active, names, (new, moved), (now.theta, trace))
            grads = routes.pull(now.psi, visit.data, seen, pulled)
            psi, psi_trace = router_step(now.psi, psi_trace, grads, visit)
            used, loss = now.used | active, now.loss + more
            return Epochs(theta, psi, [trace, psi_trace], used, z, opened, loss)

        none, closed = jnp.zeros(len(names), bool), jnp.zeros(paths)
        start = Epochs(theta, psi, momentum, none, closed, closed, jnp.zeros(()))
        return jax.lax.fori_loop(0, epochs, epoch, start), epochs

    return train


def check(layout: Any, temperatures: Any, dropout: float, **words: str) -> None:
    """Whether FedMN's own settings can be; words: its choices."""
    if len(layout) < 2 or min(layout) < 1:
        raise UsageError(f"fedmn.layout is {layout}; give two layers or more, each with a block")
    for name, value in words.items():
        one_of(f"fedmn.{name}", value, CHOICES[name])
    if len(temperatures) != 2 or min(temperatures) <= 0:
        raise UsageError(f"fedmn.temperatures is {temperatures}; give two numbers above 0")
    share = (dropout >= 0) & (dropout < 1)
    need(share, f"fedmn.dropout is {dropout}; it must be at least 0 and below 1")
