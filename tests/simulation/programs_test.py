"""The compiled programs of a training loop."""

import numpy as np

import fedjax_pfl as pfl


def test_calls_of_different_lengths_share_the_examples():
    """Each length has a program of its own, and a GPU has no room for several copies."""
    dataset = pfl.arrays(np.zeros((30, 4), np.float32), np.arange(30) % 3)
    data = pfl.partition(dataset, "iid", clients=3)
    training = pfl.local_sgd(learning_rate=0.05, steps=1)
    network = pfl.networks.MLP(outputs=3, hidden=(4,))
    for devices in (1, 2):
        method = pfl.fedavg(network, training, data.federation)
        simulation = pfl.Simulation(method, data, devices=devices)
        placed = [simulation._program(n).data.x.addressable_shards for n in (1, 5, 3)]
        for shards in zip(*placed, strict=True):
            assert len(shards) == 3
            assert len({shard.data.unsafe_buffer_pointer() for shard in shards}) == 1
