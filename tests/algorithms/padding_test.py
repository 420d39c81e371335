"""Padding of batches reaches no gradient of a network that has none at 0."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training, trees
from tests.algorithms import linear
from tests.algorithms.linear import KEY, context, train_client


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fedala", {"layers": 2, "share": 1.0, "first_passes": 1}), ("fedas", {})],
)
def test_an_update_is_finite_despite_padding(name: str, settings: dict[str, Any]):
    """A batch of three of the four examples is full, the next one has two rows of padding."""
    data, federation = linear.federated([linear.X], [linear.Y])
    data = data._replace(y=jnp.asarray(linear.Y, jnp.int32))
    federation = federation._replace(outputs=3, task=linear.CLASSES)
    training = local_training.sgd(learning_rate=0.1, batch_size=3, epochs=1)
    network = linear.Deep(3, 2, unit=True)
    algorithm = getattr(algorithms, name)(network, training, federation, **settings)
    state = jax.jit(algorithm.init)(KEY)
    payload = algorithm.send(state, context(data))
    result = train_client(algorithm, payload, trees.row(state.clients, 0), data)
    assert bool(trees.all_finite((result.upload, result.client)))
