from typing import Any, NamedTuple

import jax


class State(NamedTuple):
    params: Any


class federated_averaging:
    def __init__(self, gradient, client, server, hparams):
        self.gradient, self.rate, self.spec = jax.jit(gradient), client, hparams
        assert server == 1.0

    def init(self, params):
        return State(params)

    def apply(self, state, clients):
        ends = []
        for _, data, key in clients:
            params = state.params
            for batch in data.shuffle_repeat_batch(self.spec):
                grads = self.gradient(params, batch, key)
                params = jax.tree.map(lambda p, g: p - self.rate * g, params, grads)
            ends.append(params)
        mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *ends)
        return State(mean), {}
