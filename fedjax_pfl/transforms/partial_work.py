"""Check of methods whose late clients may send partial work; see `simulation.speeds`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import transforms
from fedjax_pfl.core import jaxprs, trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, Cohort, PyTree, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.simulation.speeds import local_fits
from fedjax_pfl.transforms.privacy.client_level import is_affine
from fedjax_pfl.transforms.wrapping import RoundShapes, check_single_model, round_shapes


def check_partial(
    value_of: Callable[[str], Any],
    make_algorithm: Callable[[Mapping[str, Any]], Algorithm],
    data: FederatedData,
) -> None:
    """Raises UsageError if late=partial is not possible; arguments as for `client_speeds`."""
    if value_of("deadline") is None:
        raise UsageError("late=partial needs a deadline; set it, such as to 10")
    if value_of("privacy") != "none":
        raise UsageError("late=partial scales updates, which privacy does not cover; leave it out")
    if value_of("robust_rule") != "mean" or value_of("robust_mixing"):
        raise UsageError(
            "late=partial needs the mean of the uploads; leave robust_rule and robust_mixing out"
        )
    defaults = {name: setting.default_value for name, setting in transforms.SETTINGS.items()}
    algorithm = make_algorithm(defaults)
    check_single_model("late=partial", algorithm, data)
    if reason := _partial_reason(algorithm, data):
        raise UsageError(f"late=partial is not possible here: {reason}; use late=missing")


def _partial_reason(algorithm: Algorithm, data: FederatedData) -> str:
    """Returns why a method without transforms cannot use partial work, or "" if it can."""
    fits, shapes = local_fits(algorithm, data), round_shapes(algorithm, data)
    if len(fits) != 1 or fits[0].max_steps is None:
        return "the method trains more than once in a round, or not by local_training.fit"
    if fits[0].size < trees.size(shapes.upload["params"]):
        return "the method trains several models at once"
    if not is_affine(algorithm, shapes) or not _reads_weights(algorithm, shapes):
        return "the server's update is no mean of the uploads weighted by examples"
    if not _starts_from_download(algorithm, shapes, data):
        return "a client's upload differs from its download even before its first step"
    return ""


def _starts_from_download(algorithm: Algorithm, shapes: RoundShapes, data: FederatedData) -> bool:
    """Returns True if a client that takes no step uploads the parameters that it downloaded.

    Otherwise the difference would be scaled as if steps had caused it. Without a step a loop
    returns the values that it starts with.
    """

    def upload(payload: PyTree, client: PyTree, i: Any, key: Any, data: FederatedData) -> PyTree:
        ctx = ClientContext(i=i, data=client_data(data, i), t=i, key=key, max_steps=i)
        return algorithm.train(payload, client, ctx).upload["params"]

    def operation(equation: Any, operands: list[Any]) -> Sequence[Any]:
        if equation.primitive.name != "while":
            return [None] * len(equation.outvars)
        constants = equation.params["cond_nconsts"] + equation.params["body_nconsts"]
        return operands[constants:]

    client = jax.eval_shape(lambda tree: trees.row(tree, 0), shapes.state.clients)
    key, i = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((), jnp.int32)
    arguments = (shapes.payload, client, i, key, data)
    program = jax.make_jaxpr(upload)(*arguments)
    paths = [path for path, _ in jax.tree.leaves_with_path(shapes.payload)]
    origins = paths + [None] * (len(jax.tree.leaves(arguments)) - len(paths))
    constants = [None] * len(program.jaxpr.constvars)
    results = jaxprs.interpret(program.jaxpr, constants, origins, operation, lambda _: None)
    uploaded = jax.tree.leaves_with_path({"params": shapes.upload["params"]})
    return results == [path for path, _ in uploaded]


def _reads_weights(algorithm: Algorithm, shapes: RoundShapes) -> bool:
    """Returns True if the new server state depends on the numbers of examples of a cohort."""
    state = shapes.state._replace(clients=())

    def receive(weights: jax.Array, state: State, upload: PyTree, payload: PyTree) -> PyTree:
        cohort = Cohort(
            ids=jnp.zeros(1, jnp.int32),
            arrived=jnp.ones(1, bool),
            weights=weights,
            payloads=trees.repeat(payload, 1),
            uploads=trees.repeat(upload, 1),
            t=0,
            key=jax.random.key(0),
        )
        return algorithm.receive(state, cohort)

    weights = jax.ShapeDtypeStruct((1,), jnp.float32)
    program = jax.make_jaxpr(receive)(weights, state, shapes.upload, shapes.payload)
    return jaxprs.prune(program.jaxpr)[1][0]


def transfer_bytes(algorithm: Algorithm, data: FederatedData) -> tuple[int, int]:
    """Returns the bytes that a client of a method without groups downloads and uploads.

    Raises UsageError if they depend on values of the upload.
    """
    shapes, counts = round_shapes(algorithm, data), list[Any]()

    def count(payload: PyTree, upload: PyTree) -> None:
        counts.extend(algorithm.traffic(payload, upload))

    jax.eval_shape(count, shapes.payload, shapes.upload)
    down, up = (sum(by_layer.values()) for by_layer in counts)
    if not isinstance(down, int) or not isinstance(up, int):
        raise UsageError("late=partial needs uploads of a constant size; use late=missing")
    return down, up
