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

As published, embed="concatenated" and encoders="always", π hardly differs over clients, and its
mean over examples cannot see which label goes with which image. By default, which is not in the
paper, π_k follows from how φx(x_i) and φy(y_i) correlate at client k, beside the other clients
(`networks.correlation`); clients that differ by chance only take one route. φx and φy stay as they
begin, so that they travel once and do not make routes swing, and an encoder travels as a block
does: where it is used.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms import common
from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.routed_training import check, trainer
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
from fedjax_pfl.core.errors import above, at_least
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks import correlation
from fedjax_pfl.networks import router as routing
from fedjax_pfl.networks.modular import Modular, Routed, block_of, blocks, pretrained


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
    embed: str = "correlation",
    encoders: str = "fetched",
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
      embed: what the router makes of φx and φy: their correlation at a client, in the size of φx;
        or, as published, both side by side, concatenated.
      encoders: are fetched by those whose route uses them, as blocks are; or travel always, as
        published.
    """
    routing.need_blocks(model, federation)
    check(layout, temperatures, dropout, gates=gates, embed=embed, encoders=encoders)
    above("fedmn.router_rate", router_rate, 0)
    sizes = {"width": width, "hidden": hidden, "x_size": x_size, "y_size": y_size}
    for name, value in sizes.items():
        at_least(f"fedmn.{name}", value, 1)
    n, size = federation.outputs, training.batch_size
    network = Modular(model, n, layout, width, hidden, dropout, fetched=encoders == "fetched")
    names = blocks(layout, network.first)
    if embed == "correlation":
        seen_by = correlation.Correlation(model, layout, federation.clients, x_size)
        routes = correlation.correlated(seen_by, n, size)
    else:
        routes = routing.published(
            routing.Router(model, routing.paths(layout), x_size, y_size), n, size
        )
    local_epochs = trainer(
        network,
        routes,
        task,
        training,
        hard=gates == "hard",
        temperatures=temperatures,
        router_rate=router_rate,
    )

    def draw(key: jax.Array) -> tuple[PyTree, PyTree]:
        """New variables of the network, θ, and of the router, ψ; no layer has the same name."""
        x, y = federation.examples(), jnp.zeros((1, n))
        return dict(network.init(key, x)), dict(routes.init(key, x, y))

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
        closed = jnp.zeros((federation.clients, routing.paths(layout)))
        momentum = [common.kept(training, one["params"], federation) for one in apart(server)]
        return State(server, (), Client(closed, closed, momentum))

    def train(payload: PyTree, client: Client, visit: Visit) -> Trained:
        theta, psi = apart(payload)
        seen = routes.look(psi, visit.data)
        psi = routes.averaged(psi, seen, jnp.where(visit.t == training.begin, 1.0, 0.1))
        new = [training.optimizer.init(one["params"]) for one in (theta, psi)]
        momentum = client.momentum if training.keep else new
        end, epochs = local_epochs(theta, psi, momentum, seen, visit)
        chosen = routing.decide(routes.logits(end.psi, visit.data, seen), layout)
        extra = {"active": end.used, "first": ~jnp.any(client.pi > 0)}
        stays = end.momentum if training.keep else [(), ()]
        active_blocks = jnp.sum(end.used).astype(jnp.float32)
        return Trained(
            {**trees.join(end.theta, end.psi), **extra},
            {**end.theta, "gates": chosen},
            Client(jax.nn.sigmoid(end.z), end.opened, stays),
            {"loss": end.loss / epochs, "active_blocks": active_blocks},
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        def mean(name: str, old: jax.Array, new: jax.Array) -> jax.Array:
            block = block_of(name, names)
            if block is None:
                return cohort.mean(new, old)
            used = cohort.uploads["active"][:, names.index(block)]
            return cohort.mean(new, old, jnp.where(used, cohort.weights, 0.0))

        uploaded = {name: cohort.uploads[name] for name in state.server}
        return trees.map_layers(mean, state.server, uploaded), state.rows

    def personal(state: State, client: Client, visit: Visit) -> PyTree:
        theta, psi = apart(state.server)
        z = routes.logits(psi, visit.data, routes.look(psi, visit.data))
        return {**theta, "gates": routing.decide(z, layout)}

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        """Active blocks, both ways: the gates are chosen before blocks are fetched.

        φx and φy that do not learn come with a client's first visit, and that is all.
        """
        used = dict(zip(names, upload["active"], strict=True))
        here = {name: used.get(block_of(name, names) or "", True) for name in bytes_of}
        bill = {name: jnp.where(here[name], b, 0) for name, b in bytes_of.items()}
        still = [name for name in bill if name.partition("/")[0] in routes.frozen]
        down = bill | {name: jnp.where(upload["first"], bill[name], 0) for name in still}
        return Traffic(down, bill | {name: jnp.zeros_like(bill[name]) for name in still})

    def observe(state: State) -> dict[str, jax.Array]:
        return {"pi": state.clients.pi, "gates": state.clients.gates}

    send = fedavg(model, task, training, federation).send
    return Algorithm(init, send, train, receive, personal, Routed(network).apply, traffic, observe)
