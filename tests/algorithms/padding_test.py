"""Padding of batches reaches no result of a network without a value or gradient at 0."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.algorithms.shared.class_features import example_features
from fedjax_pfl.core import batches, local_training, trees
from fedjax_pfl.core.examples import Batch, Split
from fedjax_pfl.networks import features
from tests.algorithms import linear
from tests.algorithms.linear import KEY, context, train_client


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedala", {"layers": 2, "share": 1.0, "first_passes": 1}),
        ("fedas", {}),
        ("fedproto", {}),
    ],
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


def test_sums_over_batches_and_features_are_finite_despite_padding():
    """The last batch of four examples, three at a time, has two rows of padding."""
    data, _ = linear.federated([linear.X], [linear.Y])
    client = context(data).data
    network = linear.Deep(3, 2, unit=True)
    variables = network.init(KEY, client.x[:1])

    def lengths(batch: Batch) -> jax.Array:
        z = features.WithFeatures(network).apply(variables, batch.x)[1]
        return jnp.sum(jnp.where(batch.mask, 1.0, 0.0) * jnp.sum(jnp.square(z), -1))

    total = batches.sum_batches(lengths, client, client.train, 3)
    np.testing.assert_allclose(total, 4.0, rtol=1e-6)
    longer = client._replace(train=Split(jnp.pad(client.train.rows, (0, 2)), client.train.size))
    z, _, is_example = example_features(network, variables, longer)
    assert is_example.tolist() == [True] * 4 + [False] * 2
    np.testing.assert_allclose(jnp.sum(jnp.square(z), -1), [1.0] * 4 + [0.0] * 2, rtol=1e-6)
