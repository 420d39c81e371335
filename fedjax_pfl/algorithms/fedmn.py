"""FedMN: every client is routed by its data through blocks of a shared pool.

Wang et al., Personalized Federated Learning via Heterogeneous Modular Networks, 2022. With θ_b the
blocks, ψ the router and V_k the gates of client k:

  π_k = σ(mean_i h_ψ([φx(x_i), φy(y_i)])) over all of its training examples D_k              (10)
  V_k = σ((log ε − log(1 − ε) + logit π_k) / τ), τ from 1 to .1 over the rounds, hard         (5)
  θ_b ← Σ_k |D_k| a_kb θ_kb / Σ_k |D_k| a_kb       a_kb: block b is on an open path of client k

π, ε and with them the architecture hold for one local epoch. Evaluation opens the gates of π > ½.

Deviations: the paper divides by Σ_k |D_k|, which shrinks a block that some client did not use.
Where gates leave no path the likeliest one opens. The router takes one step an epoch, along the sum
of the gradients at its gates; clipping, decay and momentum treat it apart.

As published π hardly differs over clients, and its mean over examples cannot see which label goes
with which image. With embed="product", which is not in the paper either, h_ψ is linear in
ρ (m_k − m̄)/√T, with m_k the mean of φx(x_i) ⊙ φy(y_i), each of length 1, m̄ and T mean and variance
of m_k over clients, and ρ the part of T that drawing so few examples does not explain; weights of
h_ψ start with deviation 4. φx and φy stay as they begin, so that they travel once and do not make
routes swing. `contrast` is another form, to be set for each dataset.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms import common
from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.routed_training import trainer
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    Cohort,
    Federation,
    PyTree,
    State,
    Traffic,
    Trained,
    Visit,
)
from fedjax_pfl.core.errors import UsageError, above, need, one_of
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks import router as routing
from fedjax_pfl.networks.modular import Modular, Routed, blocks, pretrained


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
    embed: str = "concatenated",
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
      embed: what the router makes of φx and φy: their product, or both side by side, concatenated.
    """
    routing.need_blocks(model, federation)
    _check(layout, gates, temperatures, dropout, embed, contrast)
    above("fedmn.router_rate", router_rate, 0)
    n, paths, names = federation.outputs, routing.paths(layout), blocks(layout)
    network = Modular(model, n, layout, width, hidden, dropout)
    router = routing.Router(model, paths, x_size, y_size, contrast, embed)
    logits = partial(routing.logits, router, outputs=n, size=training.batch_size)
    local_epochs = trainer(
        network,
        router,
        task,
        training,
        hard=gates == "hard",
        temperatures=temperatures,
        router_rate=router_rate,
    )

    def draw(key: jax.Array) -> tuple[PyTree, PyTree]:
        """New variables of the network, θ, and of the router, ψ; no layer has the same name."""
        x, y = federation.examples(), jnp.zeros((1, n))
        return dict(network.init(key, x)), dict(router.init(key, x, y))

    shapes = jax.eval_shape(draw, jax.random.key(0))
    bytes_of = trees.bytes_per_layer(trees.join(*shapes))

    def apart(whole: PyTree) -> tuple[PyTree, PyTree]:
        return trees.split(whole, trees.layers(shapes[0]))

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

    def train(payload: PyTree, client: Client, visit: Visit) -> Trained:
        theta, psi = apart(payload)
        share = jnp.where(visit.t == training.begin, 1.0, 0.1)
        psi = routing.spread(router, psi, visit.data, n, training.batch_size, share)
        new = [training.optimizer.init(one["params"]) for one in (theta, psi)]
        momentum = client.momentum if training.keep else new
        end, epochs = local_epochs(theta, psi, momentum, visit)
        trained = {**end.theta, "gates": routing.decide(logits(end.psi, visit.data), layout)}
        extra = {"active": end.used, "first": ~jnp.any(client.pi > 0)}
        stays = end.momentum if training.keep else [(), ()]
        active_blocks = jnp.sum(end.used).astype(jnp.float32)
        return Trained(
            {**trees.join(end.theta, end.psi), **extra},
            trained,
            Client(jax.nn.sigmoid(end.z), end.opened, stays),
            {"loss": end.loss / epochs, "active_blocks": active_blocks},
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        def mean(name: str, old: jax.Array, new: jax.Array) -> jax.Array:
            if name not in names:
                return cohort.mean(new, old)
            used = cohort.uploads["active"][:, names.index(name)]
            return cohort.mean(new, old, jnp.where(used, cohort.weights, 0.0))

        uploaded = {name: cohort.uploads[name] for name in state.server}
        return trees.map_layers(mean, state.server, uploaded), state.rows

    def personal(state: State, client: Client, visit: Visit) -> PyTree:
        theta, psi = apart(state.server)
        return {**theta, "gates": routing.decide(logits(psi, visit.data), layout)}

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        """Active blocks, both ways: the gates are chosen before blocks are fetched.

        φx and φy that do not learn come with a client's first visit, and that is all.
        """
        used = dict(zip(names, upload["active"], strict=True))
        bill = {name: jnp.where(used.get(name, True), b, 0) for name, b in bytes_of.items()}
        still = [name for name in bill if name.partition("/")[0] in routing.frozen(router)]
        down = bill | {name: jnp.where(upload["first"], bill[name], 0) for name in still}
        return Traffic(down, bill | {name: jnp.zeros_like(bill[name]) for name in still})

    def observe(state: State) -> dict[str, jax.Array]:
        return {"pi": state.clients.pi, "gates": state.clients.gates}

    send = fedavg(model, task, training, federation).send
    return Algorithm(init, send, train, receive, personal, Routed(network).apply, traffic, observe)


def _check(
    layout: Any, gates: str, temperatures: Any, dropout: float, embed: str, contrast: Any
) -> None:
    if len(layout) < 2 or min(layout) < 1:
        raise UsageError(f"fedmn.layout is {layout}; give two layers or more, each with a block")
    one_of("fedmn.gates", gates, ("hard", "soft"))
    if len(temperatures) != 2 or min(temperatures) <= 0:
        raise UsageError(f"fedmn.temperatures is {temperatures}; give two numbers above 0")
    share = (dropout >= 0) & (dropout < 1)
    need(share, f"fedmn.dropout is {dropout}; it must be at least 0 and below 1")
    one_of("fedmn.embed", embed, routing.EMBEDS)
    above("fedmn.contrast", contrast, 0)
    if embed == "product" and contrast is not None:
        raise UsageError("fedmn.contrast is for fedmn.embed=concatenated; leave it unset")
