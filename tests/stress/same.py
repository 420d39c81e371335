"""The same twice: python -m tests.stress.same

A configuration run again gives the same metrics, tables and states, all bits of them; with other
chunks of clients it gives the same to 1e-5 after a round, relative to the largest value of a leaf,
in float32 with full precision in products.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.runs.build import build
from fedjax_pfl.settings import configuration
from tests.stress.common import CONFIG, Row, finish, progress, scratch, undisturbed

METHODS = ("fedavg", "fedper", "pfedla")
CLOSE = 1e-5


def after_a_round(changes: dict[str, Any]) -> Any:
    """The state after one round, of a network that is wide enough for rounding to be seen."""
    wide = {"mlp": {"hidden": (64, 32)}, "local_epochs": 3}
    made = build(configuration.complete({**CONFIG, **wide, **changes}))
    rounds = made.phases[0].rounds
    key, data = rounds.place((jax.random.key(0), made.data))
    t, n = rounds.place((jnp.int32(0), jnp.int32(1)))
    return jax.device_get(rounds.run(key, rounds.init(key), data, t, n)[0])


def distance(a: Any, b: Any) -> float:
    """The largest difference, relative to the largest value of its leaf."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    apart = [
        np.max(np.abs(x - y), initial=0) / max(1e-6, np.max(np.abs(x), initial=0)) for x, y in pairs
    ]
    return float(max(apart))


def same(methods: tuple[str, ...] = METHODS, rounds: int = 12) -> list[Row]:
    """Each method twice, and with one, two and all clients at a time."""
    rows, worst, off = [], 0.0, 0
    with scratch() as place, jax.default_matmul_precision("highest"):
        different = 0
        for name in methods:
            wanted = {**CONFIG, "algorithm": name, "rounds": rounds}
            progress(f"{name} twice")
            one, other = (undisturbed(place / f"{name}{i}", wanted)[:2] for i in "ab")
            different += one != other
        number = len(methods)
        rows.append(Row("the same again", number, number - different, different, "bit for bit"))
        for name in methods:
            first = after_a_round({"algorithm": name, "chunk": 1})
            for chunk in (2, 4):
                progress(f"{name} in chunks of {chunk}")
                apart = distance(first, after_a_round({"algorithm": name, "chunk": chunk}))
                worst, off = max(worst, apart), off + (apart > CLOSE)
        note = f"largest relative difference after a round {worst:.1e}"
        rows.append(Row("other chunks", 2 * number, 2 * number - off, off, note))
    return rows


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    finish(same())
