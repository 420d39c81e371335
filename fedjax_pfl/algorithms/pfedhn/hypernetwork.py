"""The algorithm behind pFedHN and pFedHN-PC; the equations are in `pfedhn`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl.algorithms.pfedhn import hypernet
from fedjax_pfl.algorithms.pfedhn.settings import (
    Settings,
    check_settings,
    class_shares,
    embedding_length,
    server_sgd,
)
from fedjax_pfl.algorithms.shared.initial_state import initial_variables, model_shapes
from fedjax_pfl.algorithms.shared.model_training import model_trainer
from fedjax_pfl.core import local_training, trees
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    PyTree,
    State,
)
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import as_single_group
from fedjax_pfl.networks.pretrained import require_random_start
from fedjax_pfl.networks.zero_head import require_random_head


class Server(NamedTuple):
    """Server-side state that all clients share."""

    phi: PyTree  # parameters of the hypernetwork, φ
    spectral: PyTree  # vectors of the power iteration; empty without spectral normalisation
    moments: PyTree  # state of the server's optimiser, for φ and all embeddings


class Rows(NamedTuple):
    """Server-side state with one row for each client."""

    v: jax.Array  # embedding of each client, [N, e]


class Client(NamedTuple):
    """State that one client keeps between rounds, stacked over clients in `State.clients`.

    `momentum` has optimiser states by part of the model: "kept" for the layers that stay on the
    client and, if clients keep their optimiser, "generated" for those from the hypernetwork.
    """

    personal: PyTree  # variables that are not generated: BatchNorm statistics, in PC the head
    momentum: dict[str, PyTree]


def build_algorithm(
    name: str,
    models: Any,
    training: local_training.Training,
    federation: Federation,
    settings: Settings,
    *,
    head_is_local: bool,
) -> Algorithm:
    """Builds pFedHN, or pFedHN-PC if `head_is_local`, with one hypernetwork for all networks.

    Raises UsageError for `head_is_local` if the network has a single layer.

    Args:
      name: Name of the method, for messages.
      models: A network, or a tuple with one for each group of clients.
      training: Local training.
      federation: The clients.
      settings: Settings of the hypernetwork.
      head_is_local: Keep the last layer and its momentum on the client.
    """
    check_settings(name, settings)
    networks = models if isinstance(models, tuple) else (models,)
    for model in networks:
        require_random_start(name, model)
        if not head_is_local:
            require_random_head(name, model)
    n = federation.clients
    fixed = jnp.asarray(class_shares(name, federation)) if settings.fixed else None
    optimizer = server_sgd(settings, jnp.asarray(federation.active))

    def personal_layers(model: Any) -> tuple[str, ...]:
        """Returns the names of the layers that stay with the client."""
        return (model.head,) if head_is_local else ()

    def split(model: Any, variables: PyTree) -> tuple[PyTree, PyTree]:
        """Splits variables into those that are generated and those that stay with the client."""
        params, model_state = local_training.split_variables(variables)
        personal, body = trees.split({"params": params}, personal_layers(model))
        return body, trees.join(personal, model_state)

    bodies = tuple(split(model, model_shapes(model, federation))[0] for model in networks)
    if not all(bodies):
        raise UsageError(
            f"{name} leaves the last layer with the client, and this network has no other"
        )
    network = hypernet.Hypernetwork(
        target=bodies,
        width=settings.width,
        depth=settings.depth,
        spectral_norm=settings.spectral_norm,
    )

    def generate(phi: PyTree, spectral: PyTree, v: jax.Array) -> Any:
        """Returns h(v; φ), a tuple of {"params": ...} with one entry for each network."""
        return network.apply({"params": phi, "spectral": spectral}, v)

    def learned(phi: PyTree, v: jax.Array) -> dict[str, PyTree]:
        """Returns what the server's optimiser updates: `phi` unless frozen, `v` unless fixed."""
        parts = {} if settings.frozen else {"phi": phi}
        return parts if settings.fixed else {**parts, "v": v}

    def local_optimizer(model: Any) -> optax.GradientTransformation:
        """Returns the clients' optimiser; it clips the norm of the generated layers' gradient."""

        def part(layer: str, _: Any) -> str:
            return "kept" if layer in personal_layers(model) else "generated"

        parts = {"generated": training.optimizer, "kept": training.base_optimizer}
        return optax.partition(parts, lambda params: trees.map_layers(part, params))

    persistent = ("generated", "kept") if training.keep_optimizer else ("kept",)

    def kept_momentum(state: Any) -> dict[str, PyTree]:
        return {part: state.inner_states[part] for part in persistent}

    def new_state(key: jax.Array) -> State:
        """Initialises φ, the embeddings and the client-side state, all with fresh momentum."""
        phi_key, v_key, model_key = jax.random.split(key, 3)
        v = jax.random.normal(v_key, (n, embedding_length(settings, n)))
        v = v if fixed is None else fixed
        variables, clients = network.init(phi_key, v[0]), []
        phi, spectral = variables["params"], variables.get("spectral", {})
        for model in networks:
            initial = initial_variables(model, federation, model_key, None)
            momentum = kept_momentum(local_optimizer(model).init(initial["params"]))
            clients.append(trees.repeat(Client(split(model, initial)[1], momentum), n))
        server = Server(phi, spectral, optimizer.init(learned(phi, v)))
        return State(server, Rows(v), tuple(clients))

    def init(key: jax.Array, start: State | None = None) -> State:
        """Returns a new state, or the state of an earlier phase with all momentum reset.

        Raises UsageError if the earlier phase had another method, network or hypernetwork, and for
        `frozen` in the first phase. Without `start` the state of a later phase is for shapes only.
        """
        state = new_state(key)
        if start is None and settings.frozen and settings.first_round == 0:
            raise UsageError(
                f"{name}.frozen is for a phase after one that has trained φ; a program that calls "
                "the factory gives the phase's first_round, above 0"
            )
        if start is None:
            return state

        def weights(s: State) -> PyTree:
            return s.server.phi, s.server.spectral, s.rows, [c.personal for c in s.clients]

        if not isinstance(start.server, Server) or not trees.same_shapes(
            weights(start), weights(state)
        ):
            raise UsageError(
                f"a phase of {name} can only start from one of the same method, network and "
                "hypernetwork: φ cannot be read from a model"
            )
        server = start.server._replace(moments=state.server.moments)
        clients = map(
            lambda new, old: new._replace(personal=old.personal), state.clients, start.clients
        )
        return State(server, start.rows, tuple(clients))

    def client_functions(g: int) -> tuple[Callable[..., Any], ...]:
        """Returns `send`, `train` and `personalize` of a client of group g."""
        model, joint = networks[g], local_optimizer(networks[g])
        train_model = model_trainer(
            model, federation.task, training.with_optimizer(joint)._replace(keep_optimizer=True)
        )

        def send(state: State, ctx: ClientContext) -> PyTree:
            return generate(state.server.phi, state.server.spectral, state.rows.v[ctx.i])[g]

        def train(payload: PyTree, client: Client, ctx: ClientContext) -> ClientResult:
            variables = trees.join(payload, client.personal)
            fresh = joint.init(variables["params"])
            moments = fresh._replace(inner_states={**fresh.inner_states, **client.momentum})
            variables, moments, metrics = train_model(variables, moments, ctx)
            body, personal = split(model, variables)
            return ClientResult(
                upload=body,
                variables=variables,
                client=Client(personal, kept_momentum(moments)),
                metrics=metrics,
            )

        def personalize(state: State, client: Client, ctx: ClientContext) -> PyTree:
            return trees.join(send(state, ctx), client.personal)

        return send, train, personalize

    def receive(state: State, cohorts: tuple[Cohort, ...]) -> tuple[Server, Rows]:
        """Takes one step along g = Jᵀ (θ − θ̃), summed over the cohorts of all groups."""
        server, rows, _ = state
        before = learned(server.phi, rows.v)

        def payloads(parts: dict[str, PyTree]) -> list[PyTree]:
            """Generates each cohort's models from `phi` and `v`, as `learned` returns them."""
            phi, v = parts.get("phi", server.phi), parts.get("v", rows.v)
            h = jax.vmap(generate, (None, None, 0))
            sampled = [v.at[c.ids].get(mode="fill", fill_value=0.0) for c in cohorts]
            return [h(phi, server.spectral, rows)[g] for g, rows in enumerate(sampled)]

        changes = [c.present(jax.tree.map(jnp.subtract, c.payloads, c.uploads)) for c in cohorts]
        (gradient,) = jax.vjp(payloads, before)[1](changes)
        if settings.average:
            arrived = jnp.concatenate([c.arrived for c in cohorts])
            count = jnp.sum(arrived).astype(jnp.float32)
            gradient = jax.tree.map(lambda leaf: leaf / count, gradient)
        updates, moments = optimizer.update(gradient, server.moments, before)
        after = optax.apply_updates(before, updates)
        phi, v = after.get("phi", server.phi), after.get("v", rows.v)
        steps = 0 if settings.frozen else 1
        return Server(phi, hypernet.advance(phi, server.spectral, steps), moments), Rows(v)

    def observe(state: State) -> dict[str, jax.Array]:
        h = partial(generate, state.server.phi, state.server.spectral)
        name = "class_shares" if settings.fixed else "embeddings"
        return {name: state.rows.v, "spread": hypernet.spread(h, state.rows.v)}

    send, train, personalize = zip(*map(client_functions, range(len(networks))), strict=True)
    algorithm = Algorithm(
        init=init,
        send=send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=tuple(net.apply for net in networks),
        observe=observe,
    )
    return algorithm if isinstance(models, tuple) else as_single_group(algorithm)
