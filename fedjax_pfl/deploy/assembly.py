"""From a configuration, and what nodes say of their examples, to a federation's method.

A node says how many examples it has, of which shapes and classes, and sums for a normalisation; the
server makes a description of the federation of that, and both sides build the same method of it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from ml_collections import ConfigDict

from fedjax_pfl.config import configuration, custom
from fedjax_pfl.core.algorithm import Federation, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.deploy.programs import Method
from fedjax_pfl.engine.execution_plan import Plan
from fedjax_pfl.runs.build import Built, task_of
from fedjax_pfl.runs.phase import Phase, Work

_ALIKE = ("input_shape", "input_dtype", "each", "target", "input", "normalise", "constants")
_SPLITS = ("train", "validation", "test")


class Own(NamedTuple):
    """A node's examples, and what it says of them."""

    data: FederatedData  # of one client
    facts: dict[str, Any]  # plain data, which leaves the node


def complete(given: Mapping[str, Any]) -> tuple[ConfigDict, configuration.Words]:
    """The settings of a run on real machines; UsageError for what only a simulation has."""
    words, given = custom.added(given)
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


def plain(settings: ConfigDict, words: configuration.Words = configuration.OURS) -> dict[str, Any]:
    """Settings as they are written down and sent."""
    return json.loads(json.dumps(configuration.resolved(settings, words)))


def brought(given: Mapping[str, Any]) -> dict[str, str]:
    """What a configuration names as MODULE:NAME but the examples, by what it is.

    Names alone travel: each machine has the code, and `digest` among the settings says which.
    """
    named = {kind: str(given.get(kind, "")) for kind in configuration.OURS._fields}
    return {kind: said for kind, said in named.items() if kind != "dataset" and ":" in said}


def facts(data: FederatedData, federation: Federation, **more: Any) -> dict[str, Any]:
    """What a node says of its examples: numbers, shapes and names, and no value of any of them.

    Args:
      federation: of this client alone.
      more: `classes`, the names of its classes; `input`, of what goes in; sums.
    """
    constants = {name: getattr(data, name) for name in ("scale", "shift", "label_map", "classes")}
    return {
        "counts": {s: int(np.asarray(getattr(data, s).size)[0]) for s in _SPLITS},
        "widths": {s: int(getattr(data, s).rows.shape[1]) for s in _SPLITS},
        "examples": int(data.x.shape[0]),
        "input_shape": list(federation.input_shape),
        "input_dtype": federation.input_dtype,
        "stored_dtype": np.asarray(data.x).dtype.name,
        "outputs": federation.outputs,
        "each": list(federation.each),
        "target": [np.asarray(data.y).dtype.name, list(data.y.shape[1:])],
        "constants": {
            name: [np.asarray(value).dtype.name, list(np.shape(value))]
            for name, value in constants.items()
            if value is not None
        },
        **more,
    }


def agreed(said: Mapping[int, Mapping[str, Any]], settings: ConfigDict) -> dict[str, Any]:
    """The description of the federation, of what all nodes have said; UsageError if they differ.

    Args:
      said: by client, all of them.
    """
    first = said[0]
    for i in sorted(said):
        for name in _ALIKE:
            here, there = (json.dumps(one.get(name)) for one in (said[i], first))
            if here != there:
                raise UsageError(
                    f"client {i} has {name} {here[:200]}, and client 0 {there[:200]}; all clients' "
                    "examples must be of one kind"
                )
    named = [said[i].get("classes") for i in sorted(said)]
    classes = None
    if any(named):
        if not all(named):
            raise UsageError("some clients name their classes and some number them; use one way")
        found = {str(name) for each in named for name in each or ()}
        whole = all(name.lstrip("-").isdigit() for name in found)
        classes = sorted(found, key=int) if whole else sorted(found)
    outputs = len(classes) if classes else max(int(said[i]["outputs"]) for i in said)
    made = {
        "counts": [said[i]["counts"] for i in sorted(said)],
        "outputs": outputs,
        "classes": classes,
        "held_out": settings.held_out,
        "groups": max(1, len(settings.groups)),
        **_moments([said[i].get("sums") for i in sorted(said)]),
        "like": {
            k: first[k] for k in (*_ALIKE, "stored_dtype", "widths", "examples") if k in first
        },
    }
    return json.loads(json.dumps(made))


def _moments(sums: Sequence[Any]) -> dict[str, Any]:
    """Mean and deviation over all clients' training examples, from each one's n, mean and M2."""
    if not all(sums):
        return {}
    n = np.array([one["n"] for one in sums], np.float64)[:, None]
    means, m2 = (np.array([one[k] for one in sums], np.float64) for k in ("mean", "m2"))
    mean = (n * means).sum(0) / n.sum()
    deviation = np.sqrt((m2 + n * np.square(means - mean)).sum(0) / n.sum())
    deviation = np.where(deviation > 1e-12 * np.abs(mean), deviation, 1.0)
    return {"mean": mean.tolist(), "deviation": deviation.tolist()}


def federation_of(description: Mapping[str, Any]) -> Federation:
    """A description as algorithms take it."""
    like, counts = description["like"], description["counts"]
    n = len(counts)
    return Federation(
        counts=np.array([one["train"] for one in counts]),
        input_shape=tuple(like["input_shape"]),
        outputs=description["outputs"],
        active=np.arange(n) < n - description["held_out"],
        groups=np.arange(n, dtype=np.int32) % description["groups"],
        validation_counts=np.array([one["validation"] for one in counts]),
        input_dtype=like["input_dtype"],
        each=tuple(like["each"]),
        about=_normalisation(description),
    )


def _normalisation(description: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the means and deviations of inputs, for files of models."""
    if "mean" not in description:
        return None
    which = description["like"]["normalise"]["features"]
    mean, deviation = (description[k] for k in ("mean", "deviation"))
    return {
        "input_mean": [m if w else 0.0 for w, m in zip(which, mean, strict=False)],
        "input_deviation": [d if w else 1.0 for w, d in zip(which, deviation, strict=False)],
    }


def shaped(description: Mapping[str, Any]) -> FederatedData:
    """Examples of the federation's shapes, all zero, in the place of a client's."""
    like = description["like"]
    dtype, inner = like["target"]
    x: Any = np.zeros((1, *like["input_shape"]), like["stored_dtype"])
    y: Any = np.zeros((1, *inner), dtype)

    def split(name: str) -> Split:
        rows: Any = np.zeros((1, like["widths"][name]), np.int32)
        size: Any = np.zeros(1, np.int32)
        return Split(rows, size)

    train, validation, test = map(split, _SPLITS)
    constants: dict[str, Any] = {
        name: np.zeros(shape, of) for name, (of, shape) in like["constants"].items()
    }
    return FederatedData(x, y, train, validation, test, **constants)


def built(
    settings: ConfigDict,
    words: configuration.Words,
    description: Mapping[str, Any],
    arrays: FederatedData | None = None,
) -> tuple[Built, Method]:
    """What runs are described and reported by, and what both sides compute by.

    Args:
      arrays: of the client whose side this is; None: at the server, which has none.
    """
    federation = federation_of(description)
    data = shaped(description) if arrays is None else arrays
    specified = configuration.specify(settings, words)
    one = specified.phases[0]
    task = task_of(specified.settings, words, np.asarray(data.y), federation)
    work = Work([one.settings], one.groups, [], words, task, data, federation, 0, None)
    plan = Plan(one.settings.conv, 1)
    phase = Phase(work, plan, work.rounds(plan))
    method = Method(
        phase.algorithm,
        task,
        federation,
        one.settings.seed,
        one.settings.max_update_norm,
        one.settings.evaluate_after,
        one.settings.validate_after,
    )
    return Built((phase,), data, federation, task, ()), method


def observed(method: Method, state: State) -> dict[str, np.ndarray]:
    """What the method shows of its state, as far as that is the server's.

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
