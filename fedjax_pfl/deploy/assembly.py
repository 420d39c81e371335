"""Builds a method from a configuration and a federation's description, alike on both sides."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from ml_collections import ConfigDict

from fedjax_pfl.core.algorithm import Federation, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.deploy.node_file import OF_DATA
from fedjax_pfl.deploy.programs import Method
from fedjax_pfl.runs.build import Experiment, make_task
from fedjax_pfl.runs.phase import Phase, PhaseInputs
from fedjax_pfl.settings import configuration, custom
from fedjax_pfl.settings.general import settings_with
from fedjax_pfl.simulation.execution_plan import Plan


def complete(given: Mapping[str, Any]) -> tuple[ConfigDict, configuration.Registry]:
    """Completes the settings of a run on real machines; refuses those of simulations."""
    words, given = custom.register(given)
    settings = configuration.complete(given, words)
    configuration.specify(settings, words)
    wrong = {
        "phases": len(settings.phases) > 0,
        "seeds": settings.seeds > 1,
        "sweep": settings.sweep != "",
        "reference": settings.reference,
        "beside": settings.beside != "",
        "augment": settings.augment,
        "evaluate_clients": settings.evaluate_clients is not None,
        "store": settings.store not in ("auto", "device"),
    }
    for name, one in wrong.items():
        if one:
            raise UsageError(
                f"{name} is for simulations, and this is a run on real machines; leave it out"
            )
    if settings.dropout:
        raise UsageError(
            f"dropout is {settings.dropout}: it simulates what real machines do; leave it out"
        )
    return settings, words


def plain(
    settings: ConfigDict, words: configuration.Registry = configuration.BUILTINS
) -> dict[str, Any]:
    """Returns settings as plain data, as they are stored and sent."""
    return json.loads(json.dumps(configuration.resolve(settings, words)))


def brought(given: Mapping[str, Any]) -> dict[str, str]:
    """Returns by kind the code that a configuration names as MODULE:NAME.

    Only names are sent: each machine has the code, and its setting `digest` says which.
    """
    named = {kind: str(given.get(kind, "")) for kind in configuration.BUILTINS._fields}
    return {kind: said for kind, said in named.items() if kind != "dataset" and ":" in said}


def sent(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that the server sends to nodes: those that decide how they train.

    They are the same in every start of a run, so that a node can refuse others.
    """
    settings, words = complete(given)
    whole = {**plain(settings, words), **brought(given)}
    here = {*OF_DATA, *settings_with("resumable")}
    return {name: value for name, value in whole.items() if name not in here}


def federation_of(description: Mapping[str, Any]) -> Federation:
    """Converts a description to the form that algorithms take."""
    alike, counts = description["alike"], description["counts"]
    n = len(counts)
    return Federation(
        counts=np.array([one["train"] for one in counts]),
        input_shape=tuple(alike["input_shape"]),
        outputs=alike["outputs"],
        active=np.arange(n) < n - description["held_out"],
        groups=np.arange(n, dtype=np.int32) % description["groups"],
        validation_counts=np.array([one["validation"] for one in counts]),
        input_dtype=alike["input_dtype"],
        positions=tuple(alike["each"]),
        metadata=_normalisation(description),
    )


def _normalisation(description: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the means and deviations of inputs, for files of models."""
    if "mean" not in description:
        return None
    which = np.array(description["alike"]["normalise"]["features"], bool)
    mean, deviation = np.zeros(len(which)), np.ones(len(which))
    mean[which] = description["mean"][: which.sum()]
    deviation[which] = description["deviation"][: which.sum()]
    return {"input_mean": mean.tolist(), "input_deviation": deviation.tolist()}


def shaped(description: Mapping[str, Any]) -> FederatedData:
    """Returns zero examples of the federation's shapes."""
    alike = description["alike"]
    dtype, inner = alike["target"]

    def zeros(shape: Sequence[int], dtype: str) -> Any:  # which nodes may have said to be huge
        return np.broadcast_to(np.zeros((), dtype), shape)

    x = zeros((1, *alike["input_shape"]), description["stored_dtype"])
    y = zeros((1, *inner), dtype)

    def split(name: str) -> Split:
        return Split(zeros((1, description["widths"][name]), "int32"), zeros((1,), "int32"))

    train, validation, test = map(split, ("train", "validation", "test"))
    constants = {name: zeros(shape, of) for name, (of, shape) in alike["constants"].items()}
    return FederatedData(x, y, train, validation, test, **constants)


def built(
    settings: ConfigDict,
    words: configuration.Registry,
    description: Mapping[str, Any],
    arrays: FederatedData | None = None,
) -> tuple[Experiment, Method]:
    """Builds the record that reports read, and the method that both sides compute with.

    Args:
      arrays: of the client whose side this is; None: at the server, which has none.
    """
    federation = federation_of(description)
    data = shaped(description) if arrays is None else arrays
    specified = configuration.specify(settings, words)
    one = specified.phases[0]
    task = make_task(specified.settings, words, np.asarray(data.y), federation)
    federation = federation._replace(task=task)
    work = PhaseInputs([one.settings], one.groups, [], words, data, federation, 0, None)
    plan = Plan(one.settings.conv, 1)
    phase = Phase(work, plan, work.rounds(plan))
    method = Method(
        phase.algorithm,
        federation,
        one.settings.seed,
        one.settings.max_update_norm,
        one.settings.evaluate_after,
        one.settings.validate_after,
    )
    return Experiment((phase,), data, federation, ()), method


def observed(method: Method, state: State) -> dict[str, np.ndarray]:
    """Returns those of the method's observations that depend on the server's state alone.

    Args:
      state: without clients.
    """
    whole = method.whole
    clients = jax.eval_shape(whole.init, jax.eval_shape(jax.random.key, 0)).clients

    def show(state: State, clients: PyTree) -> dict[str, jax.Array]:
        return whole.observe(state._replace(clients=clients))

    program, shapes = jax.make_jaxpr(show, return_shape=True)(state, clients)
    names, of_server = sorted(shapes), len(jax.tree.leaves(state))
    kept = []
    for name in names:
        _, used = dce_jaxpr(program.jaxpr, [name == other for other in names])
        kept += [] if any(used[of_server:]) else [name]

    def shown(state: State) -> dict[str, jax.Array]:
        nobody = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), clients)
        found = show(state, nobody)
        return {name: found[name] for name in kept}

    return jax.device_get(jax.jit(shown)(state))
