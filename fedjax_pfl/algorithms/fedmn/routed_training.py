"""Training of a modular network with a router, for `fedmn` and its variant."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl.algorithms.fedavg import fedavg
from fedjax_pfl.algorithms.fedmn import router
from fedjax_pfl.algorithms.fedmn.modular import (
    Modular,
    Routed,
    WithLogits,
    block_of,
    blocks,
    keep_inactive,
    pretrained,
)
from fedjax_pfl.algorithms.shared.initial_state import initial_momentum, initial_variables
from fedjax_pfl.core import local_training, optimizers, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
    Traffic,
)
from fedjax_pfl.core.errors import UsageError, require, require_at_least
from fedjax_pfl.core.examples import Batch
from fedjax_pfl.networks.pretrained import require_random_start
from fedjax_pfl.networks.user_defined import UserNetwork
from fedjax_pfl.networks.zero_head import require_random_head


class Client(NamedTuple):
    """State that one client keeps between rounds. E is the number of gates."""

    pi: jax.Array  # [E]; probability that a gate opens, in its last round; 0 before
    gates: jax.Array  # [E]; gates sampled in that round, 0 (closed) to 1 (open)
    momentum: list[PyTree]  # optimiser states of network and router; () if not kept


def check_routing(
    name: str,
    model: Any,
    federation: Federation,
    layout: Any,
    temperatures: Any,
    dropout: float,
    **sizes: int,
) -> None:
    """Raises UsageError if the method `name` cannot work with these settings or this network.

    The network must be built in, read no tokens, and start from random parameters, head included.
    `sizes` are further settings by name, which must be at least 1.
    """
    require_random_start(name, model)
    require_random_head(name, model)
    user_defined = isinstance(model, UserNetwork)
    if user_defined or federation.positions:
        kind = f"{model.name}, a network of your own" if user_defined else "tokens"
        raise UsageError(
            f"{name} routes examples with one label through blocks of our networks, not {kind}; "
            "use another method"
        )
    if len(layout) < 2 or min(layout) < 1:
        raise UsageError(f"{name}.layout is {layout}; give two layers or more, each with a block")
    if len(temperatures) != 2 or min(temperatures) <= 0:
        raise UsageError(f"{name}.temperatures is {temperatures}; give two numbers above 0")
    share = (dropout >= 0) & (dropout < 1)
    require(share, f"{name}.dropout is {dropout}; it must be at least 0 and below 1")
    for size, value in sizes.items():
        require_at_least(f"{name}.{size}", value, 1)


def assemble(
    model: Any,
    training: local_training.Training,
    federation: Federation,
    *,
    network: Modular,
    routing: router.Routing,
    hard: bool,
    temperature: Callable[[jax.Array], jax.Array],
) -> Algorithm:
    """Returns the algorithm: clients sample gates, train active blocks, and step the router.

    The server stores the variables of encoders, blocks and router; clients store `Client`. A phase
    starts from a state of the same method, or from a global `model`, whose layers, except its head,
    are copied to every encoder and to φx.

    Args:
      model: The network of a global model to start from.
      training: Local training.
      federation: The clients.
      network: The modular network.
      routing: Functions that compute a client's logits of gates.
      hard: Use gates that are 0 or 1 in training.
      temperature: Function from the round to τ, the temperature of sampling gates.
    """
    layout, names = network.layout, blocks(network.layout, network.trimmed)
    paths = router.paths(layout)

    def initialise(key: jax.Array) -> tuple[PyTree, PyTree]:
        """Initialises the variables of the network, θ, and of the router, ψ."""
        x, y = federation.examples(), jnp.zeros((1, federation.outputs))
        return dict(network.init(key, x)), dict(routing.init(key, x, y))

    shapes = jax.eval_shape(initialise, jax.random.key(0))
    bytes_of = trees.bytes_per_layer(trees.join(*shapes))

    def divide(variables: PyTree) -> tuple[PyTree, PyTree]:
        """Splits the server's variables into θ and ψ, which share no layer's name."""
        return trees.split(variables, trees.layers(shapes[0]))

    def init(key: jax.Array, start: State | None = None) -> State:
        server = trees.join(*initialise(key))
        closed = jnp.zeros((federation.clients, paths))
        pi = closed
        if start is not None and trees.same_shapes(server, start.server):
            server = start.server
            if isinstance(start.clients, Client):
                pi = start.clients.pi  # tells who has the frozen encoders
        elif start is not None:
            trained = initial_variables(model, federation, key, start)
            server = pretrained(server, trees.split(trained, {model.head})[1], layout[0])
        momentum = [
            initial_momentum(training, part["params"], federation) for part in divide(server)
        ]
        return State(server, (), Client(pi=pi, gates=closed, momentum=momentum))

    def fit(theta: PyTree, trace: PyTree, z: jax.Array, sample: Any, ctx: ClientContext) -> Any:
        """Runs SGD at fixed gates, sampled from logits z [E] by `sample`.

        Returns (variables, momentum, sum over batches of the gradient in z, loss).
        """
        routed_gradient = local_training.gradient(
            WithLogits(network, sample), federation.task, ctx.data
        )

        def gradient(params: PyTree, carry: Any, batch: Batch, key: jax.Array) -> Any:
            model_state, cotangent = carry
            (loss, model_state), grads = routed_gradient(
                {**params, "logits": z}, model_state, batch, key
            )
            return (loss, (model_state, cotangent + grads.pop("logits"))), grads

        params, model_state = local_training.split_variables(theta)
        params, (model_state, cotangent), trace, metrics = local_training.fit(
            training, gradient, params, (model_state, jnp.zeros(paths)), trace, ctx
        )
        return {"params": params, **model_state}, trace, cotangent, metrics["loss"]

    def step_router(
        psi: PyTree, trace: PyTree, grads: PyTree, ctx: ClientContext
    ) -> tuple[PyTree, PyTree]:
        """Takes one step of the router ψ. Returns ψ and its momentum, () if not kept."""
        params = psi["params"]
        trace = trace if training.keep_optimizer else training.optimizer.init(params)
        updates, trace = training.optimizer.update(grads, trace, params)
        new = optimizers.descend(params, updates, training.rate(ctx.t))
        new |= {name: params[name] for name in routing.frozen}  # decay would move them
        return {**psi, "params": new}, trace if training.keep_optimizer else ()

    def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
        theta, psi = divide(payload)
        trace, psi_trace = client.momentum
        noise_key, fit_key = jax.random.split(ctx.key)
        tau = temperature(ctx.t)
        noise = jax.random.logistic(noise_key, (paths,))
        sample = partial(router.sample, noise=noise, tau=tau, layout=layout, hard=hard)
        psi, z, pullback = routing.route(psi, ctx)
        gates = sample(z)
        active = router.active(gates, layout, network.trimmed)
        fitted = fit(theta, trace, z, sample, ctx._replace(key=fit_key))
        new_theta, new_trace, cotangent, loss = fitted
        # Decay and momentum would also move blocks that the client does not hold.
        theta, trace = keep_inactive(active, names, (new_theta, new_trace), (theta, trace))
        psi, psi_trace = step_router(psi, psi_trace, pullback(cotangent), ctx)
        first = {"first": ~jnp.any(client.pi > 0)} if routing.frozen else {}
        return ClientResult(
            upload={**trees.join(theta, psi), "active": active, **first},
            variables={**theta, "gates": router.decide(routing.logits(psi, ctx.data), layout)},
            client=Client(pi=jax.nn.sigmoid(z), gates=gates, momentum=[trace, psi_trace]),
            metrics={"loss": loss, "active_blocks": jnp.sum(active).astype(jnp.float32)},
        )

    def receive(state: State, cohort: Cohort) -> tuple[PyTree, PyTree]:
        def mean(layer: str, old: jax.Array, new: jax.Array) -> jax.Array:
            block = block_of(layer, names)
            if block is None:
                return cohort.mean(new, old)
            active = cohort.uploads["active"][:, names.index(block)]
            return cohort.mean(new, old, jnp.where(active, cohort.weights, 0.0))

        uploaded = {name: cohort.uploads[name] for name in state.server}
        return trees.map_layers(mean, state.server, uploaded), state.rows

    def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
        theta, psi = divide(state.server)
        return {**theta, "gates": router.decide(routing.logits(psi, ctx.data), layout)}

    def traffic(payload: PyTree, upload: PyTree) -> Traffic:
        """Counts active blocks in both directions; frozen φx and φy in the first download only."""
        active = dict(zip(names, upload["active"], strict=True))
        holds = {layer: active.get(block_of(layer, names) or "", True) for layer in bytes_of}
        up = {layer: jnp.where(holds[layer], size, 0) for layer, size in bytes_of.items()}
        down = dict(up)
        for layer in up:
            if layer.partition("/")[0] in routing.frozen:
                down[layer] = jnp.where(upload["first"], up[layer], 0)
                up[layer] = jnp.zeros_like(up[layer])
        return Traffic(down=down, up=up)

    def observe(state: State) -> dict[str, jax.Array]:
        return {"pi": state.clients.pi, "gates": state.clients.gates}

    return Algorithm(
        init=init,
        send=fedavg(model, training, federation).send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=Routed(network).apply,
        traffic=traffic,
        observe=observe,
    )
