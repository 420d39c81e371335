"""Runs FedJAX's FedAvg (google/fedjax) on the benchmark's work, from the user's checkout.

`federated_averaging` and the in-memory datasets run unchanged; the network is written here with
JAX's own functions. Needs jax, dm-haiku, optax, msgpack, absl-py and requests in versions that can
import FedJAX; `--fedjax_python` names a Python that has them.
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
    """Returns facts about the library, and a function that runs one round."""
    child.checkout(spec, *_NEEDS)
    if spec["algorithm"] != "fedavg" or spec["network"] not in _SHAPES:
        raise child.Lacks(f"its adapter runs FedAvg with {' and '.join(_SHAPES)}")
    import fedjax
    import jax
    import jax.numpy as jnp
    import numpy as np
    from fedjax.algorithms import fed_avg

    rng, batch_sizes = np.random.default_rng(0), set()

    def initial_layer(shape: tuple[int, ...]) -> Any:
        bound = 1 / math.sqrt(math.prod(shape[:-1]))
        w, b = (rng.uniform(-bound, bound, size) for size in (shape, shape[-1:]))
        return {"w": jnp.asarray(w, jnp.float32), "b": jnp.asarray(b, jnp.float32)}

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
        batch_sizes.add(batch["x"].shape[0])
        log_probabilities = jax.nn.log_softmax(outputs(params, batch["x"]))
        return -jnp.mean(jnp.take_along_axis(log_probabilities, batch["y"][:, None], 1))

    params = [initial_layer(shape) for shape in _SHAPES[spec["network"]]]
    clients = []
    for i in range(spec["clients"]):
        x = rng.standard_normal((spec["examples"], 32, 32, 3), np.float32)
        dataset = fedjax.ClientDataset({"x": x, "y": rng.integers(10, size=spec["examples"])})
        clients.append((str(i), dataset))
    batching = fedjax.ShuffleRepeatBatchHParams(batch_size=spec["batch"], num_epochs=spec["epochs"])
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss), fedjax.optimizers.sgd(spec["rate"]), fedjax.optimizers.sgd(1.0), batching
    )
    state = algorithm.init(params)

    def run_round() -> None:
        nonlocal state
        cohort = rng.permutation(len(clients))[: spec["cohort"]]
        keys = jax.random.split(jax.random.PRNGKey(0), len(cohort))
        state, diagnostics = algorithm.apply(
            state, [(*clients[i], key) for i, key in zip(cohort, keys, strict=True)]
        )
        jax.block_until_ready((state.params, diagnostics))

    run_round()
    size = sum(leaf.size for leaf in jax.tree_util.tree_leaves(params))
    steps = spec["cohort"] * sum(1 for _ in clients[0][1].shuffle_repeat_batch(batching))
    expected = (spec["parameters"], spec["client_steps"], {spec["batch"]})
    if (size, steps, batch_sizes) != expected:
        raise child.Lacks(
            f"its work is another: {(size, steps, batch_sizes)} where {expected} is asked for"
        )
    facts = {"parameters": size, "client_steps": steps, "batch": spec["batch"]}
    return {**facts, "versions": child.versions("jax", "jaxlib")}, run_round


if __name__ == "__main__":
    child.serve(prepare)
