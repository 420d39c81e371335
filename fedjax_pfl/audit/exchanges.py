"""One round of a client of a finished run, for the attacks: its download, upload and network."""

from typing import Any

import jax

from fedjax_pfl.core.algorithm import Algorithm, ClientContext, PyTree
from fedjax_pfl.core.groups import group_algorithms
from fedjax_pfl.core.randomness import PERSONAL, SEND, TRAIN, stage_key
from fedjax_pfl.runs.phase import Phase
from fedjax_pfl.runs.phase_inputs import make_network
from fedjax_pfl.runs.result import Result


def exchange(
    member: Algorithm, state: Any, client: PyTree, ctx: ClientContext
) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the download, the upload and the earlier client-side state of a client."""
    send_key, train_key = (stage_key(ctx.key, s, ctx.t, ctx.i) for s in (SEND, TRAIN))
    payload = member.send(state, ctx._replace(data=None, key=send_key))
    return payload, member.train(payload, client, ctx._replace(key=train_key)).upload, client


def serve_and_exchange(
    member: Algorithm, state: Any, client: PyTree, ctx: ClientContext
) -> tuple[PyTree, PyTree, PyTree]:
    """Returns a client's personal model, and its download and upload in one round."""
    personal_key = stage_key(ctx.key, PERSONAL, ctx.t, ctx.i)
    served = member.personalize(state, client, ctx._replace(key=personal_key))
    return served, *exchange(member, state, client, ctx)[:2]


def group_network(phase: Phase, g: int) -> Any:
    """Returns the network of a group: the one that predicts, or inside of what predicts."""
    network = getattr(group_algorithms(phase.algorithm)[g].predict, "__self__", None)
    if hasattr(network, "init"):
        return network
    return make_network(phase.inputs, phase.inputs.group_configs[g], phase.plan.conv)


def variable_shapes(network: Any, result: Result) -> PyTree:
    """Returns the shapes of a network's variables."""
    return jax.eval_shape(
        lambda: dict(network.init(jax.random.key(0), result.federation.examples()))
    )
