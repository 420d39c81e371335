"""Rounds of a method with many clients, whose examples are from a shared pool, to measure."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Federation
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.networks import LeNet
from fedjax_pfl.networks.mlp import MLP
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation.records import RoundFunctions
from fedjax_pfl.simulation.rounds import round_functions

POOL = 20_000  # examples of all clients together
TRAIN, TEST, BATCH = 40, 10, 20  # examples of a client to train and to test, and of a step
CALL = 5  # most rounds in a call
# Network and shape of its images, by name.
MODELS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "lenet": (LeNet, (32, 32, 3)),
    "mlp": (MLP, (8, 8, 1)),
}


def make_functions(
    method: str,
    clients: int,
    cohort: int,
    model: str = "lenet",
    *,
    settings: Mapping[str, Any] | None = None,
    train: int = TRAIN,
    batch: int = BATCH,
    epochs: int = 1,
    change: Callable[[Algorithm], Algorithm] = lambda algorithm: algorithm,
    mesh: Mesh | None = None,
    by_client: bool = False,
) -> tuple[RoundFunctions, FederatedData]:
    """Returns the rounds of a method, and the clients' examples.

    Args:
      method: Name of the method.
      clients: Number of clients.
      cohort: Number of clients in a round, if there are as many.
      model: Name in `MODELS`.
      settings: Settings of the method.
      train: Training examples of a client.
      batch: Examples of a step.
      epochs: Passes over the training examples in a round.
      change: Changes the method before its rounds are made.
      mesh: Devices. Default: one.
      by_client: Whether the state is spread over the mesh.
    """
    rng, (network, shape) = np.random.default_rng(0), MODELS[model]
    images = rng.integers(0, 256, (POOL, *shape), np.uint8)
    labels = rng.integers(0, 10, POOL, np.int32)

    def split(examples: int) -> Split:
        rows = rng.integers(0, POOL, (clients, max(1, examples)), np.int32)
        return Split(rows, np.full(clients, examples, np.int32))

    scale, shift = (np.full((1, 1, 1, 1), value, np.float32) for value in (1 / 64, -2.0))
    data = FederatedData(images, labels, split(train), split(0), split(TEST), scale, shift)
    all_active, zeros = np.ones(clients, bool), np.zeros(clients, np.int32)
    federation = Federation(np.full(clients, train, np.int32), shape, 10, all_active, zeros)
    algorithm = configuration.ALGORITHMS[method](
        network(outputs=10),
        local_training.sgd(epochs=epochs, batch_size=batch),
        federation,
        **(settings or {}),
    )
    cohort = min(cohort, clients)
    count = min(clients, max(1, cohort * CALL // 2))
    evaluated = np.sort(rng.choice(clients, count, replace=False)).astype(np.int32)
    functions = round_functions(
        change(algorithm),
        federation,
        cohort=cohort,
        max_rounds=CALL,
        evaluated_ids=evaluated,
        mesh=mesh,
        by_client=by_client,
    )
    return functions, data
