"""FedJAX's FedAvg (google/fedjax) on the benchmark's work, from a checkout that the user has.

Its `federated_averaging` and its data sets in memory are run as they are; the network is written
here with JAX's own functions. Needs jax, dm-haiku, optax, msgpack, absl-py and requests, in
versions that it can be imported with: `--fedjax_python` names a Python that has them.
"""

import math
from collections.abc import Callable
from typing import Any

import child

_NEEDS = ("numpy", "jax", "haiku", "optax", "msgpack", "absl", "requests")
_SHAPES = {
    "lenet": [(5, 5, 3, 16), (5, 5, 16, 32), (800, 120), (120, 84), (84, 10)],
    "mlp": [(3072, 200), (200, 10)],
}


def prepare(spec: child.Spec) -> tuple[dict[str, Any], Callable[[], None]]:
    """Their algorithm on data of theirs."""
    child.checkout(spec, *_NEEDS)
    if spec["algorithm"] != "fedavg" or spec["network"] not in _SHAPES:
        raise child.Lacks(f"its adapter runs FedAvg with {' and '.join(_SHAPES)}")
    import fedjax
    import jax
    import jax.numpy as jnp
    import numpy as np
    from fedjax.algorithms import fed_avg

    rng, traced = np.random.default_rng(0), set()

    def fresh(shape: tuple[int, ...]) -> Any:
        bound = 1 / math.sqrt(math.prod(shape[:-1]))
        drawn = (rng.uniform(-bound, bound, size) for size in (shape, shape[-1:]))
        w, b = (jnp.asarray(one, jnp.float32) for one in drawn)
        return {"w": w, "b": b}

    def outputs(params: Any, x: Any) -> Any:
        for n, layer in enumerate(params, 1):
            if layer["w"].ndim == 4:
                kinds = ("NHWC", "HWIO", "NHWC")
                x = jax.lax.conv_general_dilated(
                    x, layer["w"], (1, 1), "VALID", dimension_numbers=kinds
                )
                window = (1, 2, 2, 1)
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
                x = jax.nn.relu(x + layer["b"])
            else:
                x = x.reshape(x.shape[0], -1) @ layer["w"] + layer["b"]
                x = x if n == len(params) else jax.nn.relu(x)
        return x

    def loss(params: Any, batch: Any, key: Any) -> Any:
        del key
        traced.add(batch["x"].shape[0])
        chosen = jax.nn.log_softmax(outputs(params, batch["x"]))
        return -jnp.mean(jnp.take_along_axis(chosen, batch["y"][:, None], 1))

    params = [fresh(shape) for shape in _SHAPES[spec["network"]]]
    people = []
    for i in range(spec["clients"]):
        x = rng.standard_normal((spec["examples"], 32, 32, 3), np.float32)
        own = fedjax.ClientDataset({"x": x, "y": rng.integers(10, size=spec["examples"])})
        people.append((str(i), own))
    how = fedjax.ShuffleRepeatBatchHParams(batch_size=spec["batch"], num_epochs=spec["epochs"])
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss), fedjax.optimizers.sgd(spec["rate"]), fedjax.optimizers.sgd(1.0), how
    )
    state = algorithm.init(params)

    def one_round() -> None:
        nonlocal state
        chosen = rng.permutation(len(people))[: spec["cohort"]]
        keys = jax.random.split(jax.random.PRNGKey(0), len(chosen))
        state, told = algorithm.apply(
            state, [(*people[i], key) for i, key in zip(chosen, keys, strict=True)]
        )
        jax.block_until_ready((state.params, told))

    one_round()
    size = sum(leaf.size for leaf in jax.tree_util.tree_leaves(params))
    steps = spec["cohort"] * sum(1 for _ in people[0][1].shuffle_repeat_batch(how))
    asked = (spec["parameters"], spec["client_steps"], {spec["batch"]})
    if (size, steps, traced) != asked:
        raise child.Lacks(
            f"its work is another: {(size, steps, traced)} where {asked} is asked for"
        )
    about = {"parameters": size, "client_steps": steps, "batch": spec["batch"]}
    return {**about, "versions": child.versions("jax", "jaxlib")}, one_round


if __name__ == "__main__":
    child.serve(prepare)
