"""FedMN: every client is routed by its data through blocks of a shared pool.

Wang et al., Personalized Federated Learning via Heterogeneous Modular Networks, 2022. With θ_b the
blocks, ψ the router and V_k the gates of client k:

  π_k = σ(mean_i h_ψ([φx(x_i), φy(y_i)])) over all of its training examples D_k              (10)
  V_k = σ((log ε − log(1 − ε) + logit π_k) / τ), τ from 1 to .1 over the rounds, hard         (5)
  θ_b ← Σ_k |D_k| a_kb θ_kb / Σ_k |D_k| a_kb       a_kb: block b is on an open path of client k

π, ε and with them the architecture hold for one local epoch. Evaluation opens the gates of π > ½.

Deviations: the paper divides by Σ_k |D_k|, which shrinks a block that some client did not use.
Where gates leave no path the likeliest one opens. The router takes one step an epoch, along the sum
of the gradients at its gates; clipping, decay and momentum treat it apart. `contrast` is not in the
paper: without it π hardly differs, and all clients get one route.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms import common
from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import Algorithm, Federation, PyTree, State, Traffic
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import Batch, ClientData
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks import router as routing
from fedjax_pfl.networks.modular import (
    Modular,
    Routed,
    WithLogits,
    blocks,
    keep_inactive,
    pretrained,
)


class Client(NamedTuple):
    """What stays with each client."""

    pi: jax.Array  # [E] at its last visit; 0 before the first
    gates: jax.Array  # [E] that it then trained with
    momentum: PyTree  # of network and router


def fedmn(
    model: Any,
    task: Task,
    training: local_training.Training,
    federation: Federation,
    *,
    layout: tuple[int, ...] = (2, 2, 2),
    width: int = 512,
    hidden: int = 256,
    dropout: float = 0.5,
    x_size: int = 128,
    y_size: int = 64,
    gates: str = "hard",
    temperatures: tuple[float, float] = (1.0, 0.1),
    router_rate: float = 1.0,
    contrast: float | None = None,
) -> Algorithm:
    """Each client trains the blocks that its gates open, and the router that opened them.

    Server: variables of encoders, blocks and router. Clients: `Client`. A phase starts from its own
    kind or from a global `model`, which goes, but for its head, into every encoder and into φx.

    Args:
      layout: blocks in each layer; the first are encoders, each the network that `model` names.
      width: outputs of an encoder.
      hidden: outputs of the blocks between the first and the last layer.
      dropout: share of those outputs that is dropped in training.
      x_size: outputs of φx, the router's own encoder.
      y_size: outputs of φy, which takes the label.
      gates: hard, or soft: used as sampled, which makes every block active.
      temperatures: τ of the gates in the phase's first and last round.
      router_rate: the router's learning rate, as a multiple of the rest's.
      contrast: deviation over clients to which embeddings are brought; unset: as published.
    """
    _check(layout, gates, temperatures, dropout, contrast=contrast, router_rate=router_rate)
    n, paths, names = federation.outputs, routing.paths(layout), blocks(layout)
    network = Modular(model, n, layout, width, hidden, dropout)
    router = routing.Router(model, paths, x_size, y_size, contrast)
    logits = partial(routing.logits, router, outputs=n, size=training.batch_size)
    one_epoch = training._replace(epochs=training.epochs and 1, keep=True)
    epochs = training.epochs or 1  # steps, where they are counted instead, are one epoch

    def draw(key: jax.Array) -> tuple[PyTree, PyTree]:
        """New variables of the network, θ, and of the router, ψ; no layer has the same name."""
        x, y = jnp.zeros((1, *federation.input_shape)), jnp.zeros((1, n))
        return dict(network.init(key, x)), dict(router.init(key, x, y))

    shapes = jax.eval_shape(draw, jax.random.key(0))
    bytes_of = trees.bytes_per_layer(trees.join(*shapes))
    apart = lambda whole: trees.split(whole, trees.layers(shapes[0]))

    def init(key: jax.Array, start: State | None = None) -> State:
        server = trees.join(*draw(key))
        if start is not None and trees.alike(server, start.server):
            server = start.server
        elif start is not None:
            known = common.initial(model, federation, key, start)
            server = pretrained(server, trees.split(known, {model.head})[1], layout[0])
        closed = jnp.zeros((federation.clients, paths))
        momentum = [common.kept(training, one["params"], federation) for one in apart(server)]
        return State(server, (), Client(closed, closed, momentum))

    def network_epoch(theta: PyTree, trace: PyTree, z: jax.Array, sample: Any, data: ClientData,
                      t: Any, key: jax.Array) -> Any:  # fmt: skip
        """SGD at fixed gates: θ, its momentum, the loss, and Σ of the gradients at the logits z."""
        whole = local_training.gradient(WithLogits(network, sample), task, data)

        def gradient(params: PyTree, carried: Any, batch: Batch, key: jax.Array) -> Any:
            rest, pulled = carried
            (loss, rest), grads = whole({**params, "logits": z}, rest, batch, key)
            return (loss, (rest, pulled + grads.pop("logits"))), grads

        params, rest = local_training.split_variables(theta)
        params, (rest, pulled), trace, metrics = local_training.fit(
            one_epoch, gradient, params, (rest, jnp.zeros(paths)), trace, data, t, key
        )
        return {"params": params, **rest}, trace, metrics["loss"], pulled

    def router_step(psi: PyTree, trace: PyTree, pulled: jax.Array, data: ClientData, t: Any) -> Any:
        grads = routing.pull(router, psi, data, n, training.batch_size, pulled)
        updates, trace = training.optimizer.update(grads, trace, psi["params"])
        step = lambda p, u: p - (router_rate * training.rate(t) * u).astype(p.dtype)
        return {**psi, "params": jax.tree.map(step, psi["params"], updates)}, trace

    def train(payload: PyTree, client: Client, data: ClientData, t: Any, key: jax.Array) -> Any:
        tau = routing.temperature(t - training.begin, training.rounds, *temperatures)

        def epoch(e: Any, carry: Any) -> Any:
            theta, psi, (trace, psi_trace), used, _, _, loss = carry
            noise_key, fit_key = jax.random.split(jax.random.fold_in(key, e))
            noise = jax.random.logistic(noise_key, (paths,))
            sample = lambda z: routing.sample(z, noise, tau, layout, gates == "hard")
            z = logits(psi, data)
            opened = sample(z)
            active = routing.active(opened, layout)
            new, moved, more, pulled = network_epoch(theta, trace, z, sample, data, t, fit_key)
            # Decay and momentum would move the other blocks too, which are not even here.
            theta, trace = keep_inactive(active, names, (new, moved), (theta, trace))
            psi, psi_trace = router_step(psi, psi_trace, pulled, data, t)
            return theta, psi, [trace, psi_trace], used | active, z, opened, loss + more

        theta, psi = apart(payload)
        if contrast is not None:
            share = jnp.where(t == training.begin, 1.0, 0.1)
            psi = routing.spread(router, psi, data, n, training.batch_size, share)
        new = [training.optimizer.init(one["params"]) for one in (theta, psi)]
        momentum, nothing = client.momentum if training.keep else new, jnp.zeros(len(names), bool)
        carry = (theta, psi, momentum, nothing, client.pi, client.gates, jnp.zeros(()))
        theta, psi, momentum, used, z, opened, loss = jax.lax.fori_loop(0, epochs, epoch, carry)
        trained = {**theta, "gates": routing.decide(logits(psi, data), layout)}
        client = Client(jax.nn.sigmoid(z), opened, momentum if training.keep else [(), ()])
        metrics = {"loss": loss / epochs, "active_blocks": jnp.sum(used).astype(jnp.float32)}
        return {**trees.join(theta, psi), "active": used}, trained, client, metrics

    def receive(
        server: PyTree, rows: PyTree, ids: Any, arrived: Any, payloads: Any, uploads: Any, t: Any
    ) -> tuple[PyTree, PyTree]:
        weights = common.examples(federation, ids)

        def mean(name: str, old: jax.Array, new: jax.Array) -> jax.Array:
            if name not in names:
                return trees.weighted_mean(new, weights)
            share = jnp.where(uploads["active"][:, names.index(name)], weights, 0.0)
            anyone = jnp.any(share > 0)
            return jnp.where(anyone, trees.weighted_mean(new, jnp.where(anyone, share, 1.0)), old)

        return trees.map_layers(mean, server, {name: uploads[name] for name in server}), rows

    def personal(
        server: PyTree, rows: PyTree, client: Client, i: Any, data: ClientData, t: Any, key: Any
    ) -> PyTree:
        theta, psi = apart(server)
        return {**theta, "gates": routing.decide(logits(psi, data), layout)}

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        """Active blocks, both ways: the gates are chosen before blocks are fetched."""
        used = dict(zip(names, upload["active"], strict=True))
        bill = {name: jnp.where(used.get(name, True), b, 0) for name, b in bytes_of.items()}
        return Traffic(bill, bill)

    observe = lambda state: {"pi": state.clients.pi, "gates": state.clients.gates}
    send = fedavg(model, task, training, federation).send
    return Algorithm(init, send, train, receive, personal, Routed(network).apply, traffic, observe)


def _check(layout: Any, gates: str, temperatures: Any, dropout: float, **above: Any) -> None:
    if len(layout) < 2 or min(layout) < 1:
        raise UsageError(f"fedmn.layout is {layout}; give two layers or more, each with a block")
    if gates not in ("hard", "soft"):
        raise UsageError(f"fedmn.gates is {gates!r}; choose hard or soft")
    if len(temperatures) != 2 or min(temperatures) <= 0:
        raise UsageError(f"fedmn.temperatures is {temperatures}; give two numbers above 0")
    for name, value in above.items():
        if value is not None and value <= 0:
            raise UsageError(f"fedmn.{name} is {value}; it must be above 0")
    if not 0 <= dropout < 1:
        raise UsageError(f"fedmn.dropout is {dropout}; it must be at least 0 and below 1")
