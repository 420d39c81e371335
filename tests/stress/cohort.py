"""Clients that are missing and clients that send rubbish, for every algorithm.

python -m tests.stress.cohort --rounds=50

Missing: 30 % of the clients that were asked never answer. What they keep and what the server keeps
of them stays as it was, bit for bit; what they did not send is not billed; a round in which nobody
answers changes nothing.

Rubbish: one client's upload is NaN, infinite or of norm 1e30 (`max_update_norm` is 1e6). It alone
is rejected, and the round ends the same whatever it was.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientContext, ClientResult, State
from fedjax_pfl.core.randomness import TRAIN, stage_key
from fedjax_pfl.simulation.records import CompiledRounds
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, tiny
from tests.stress.common import Row, finish, progress

KEY = jax.random.key(5)
SHARE = 0.3
BAD = 3  # the client whose upload is rubbish
RUBBISH = {"NaN": np.nan, "infinite": np.inf, "of norm 1e30": 1e30}
NAMES = tuple(cases.NAMES)


def _same(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y, equal_nan=True) for x, y in pairs)


def absent(name: str, rounds: int) -> tuple[int, int, str]:
    """Clients that were missing, rounds in which nobody answered, and what went wrong."""
    data, federation = tiny.federated()
    made = make_rounds(
        cases.make(name, federation), federation, cohort=3, max_rounds=1, dropout=SHARE
    )
    state, missing, empty, wrong = made.init(KEY), 0, 0, []
    for t in range(rounds):
        before = jax.device_get(state)
        state, (log,) = made.run(KEY, state, data, jnp.int32(t), jnp.int32(1))
        now, log = jax.device_get((state, log))
        answered = (log.present & ~log.dropped & ~log.rejected)[0]
        away = np.setdiff1d(np.arange(tiny.CLIENTS), log.ids[0, answered])
        missing += int(log.dropped.sum())
        parts = (lambda s: s.clients) if cases.CASES[name].rows_of_absent_move else _of_clients
        if not _same(*(trees.row(parts(one), away) for one in (before, now))):
            wrong.append(f"{name}, round {t}: a missing client's part moved")
        if any(np.asarray(bill)[0, log.dropped[0]].any() for bill in log.up.values()):
            wrong.append(f"{name}, round {t}: an upload that never came was billed")
        if not answered.any():
            empty += 1
            if not _same(before, now):
                wrong.append(f"{name}, round {t}: nobody answered, and the state moved")
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(now)):
            wrong.append(f"{name}, round {t}: not finite")
    return missing, empty, "; ".join(wrong[:1])


def _of_clients(state: State) -> tuple[Any, Any]:
    return state.rows, state.clients


def rubbish(name: str) -> dict[str, str]:
    """For each kind of upload what went wrong, if anything."""
    data, federation = tiny.federated()
    made = cases.make(name, federation)
    number = data.x.shape[0]  # one more row, which nobody owns, holds the rubbish
    t, n = jnp.int32(0), jnp.int32(1)
    bad_key = jax.random.key_data(stage_key(KEY, TRAIN, t, BAD))

    def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
        trained = made.train(payload, client, ctx)
        bad = jnp.all(jax.random.key_data(ctx.key) == bad_key)

        def spoilt(leaf: jax.Array) -> jax.Array:
            floats = jnp.issubdtype(leaf.dtype, jnp.floating)
            return jnp.where(bad, leaf + ctx.data.x[number, 0], leaf) if floats else leaf

        return trained._replace(upload=jax.tree.map(spoilt, trained.upload))

    rounds: CompiledRounds = make_rounds(
        made._replace(train=train), federation, cohort=6, max_update_norm=1e6
    )

    def ended(value: float) -> tuple[Any, np.ndarray]:
        row = jnp.full((1, tiny.FEATURES), value, jnp.float32)
        there = data._replace(
            x=jnp.concatenate([data.x, row]), y=jnp.concatenate([data.y, data.y[:1]])
        )
        state, (log,) = rounds.run(KEY, rounds.init(KEY), there, t, n)
        return jax.device_get(state), np.asarray(log.rejected)[0]

    fine, nobody = ended(0.0)
    wanted, found = ended(np.nan)[0], {}
    for kind, value in RUBBISH.items():
        state, rejected = ended(value)
        alone = rejected.sum() == 1 and rejected[BAD] and not nobody.any()
        if not alone:
            found[kind] = f"{name}: rejected {np.flatnonzero(rejected).tolist()}"
        elif not _same(state, wanted) or _same(state, fine):
            found[kind] = f"{name}: another end than with that client absent"
    return found


def missing(rounds: int = 50, names: tuple[str, ...] = NAMES) -> list[Row]:
    """A row for all algorithms."""
    seen = []
    for name in names:
        progress(f"{name}: {rounds} rounds with clients missing")
        seen.append(absent(name, rounds))
    gone, empty, wrong = (list(part) for part in zip(*seen, strict=True))
    lost = sum(map(bool, wrong))
    note = f"{rounds} rounds each, {sum(gone)} clients missing, {sum(empty)} rounds without any; "
    note += next(filter(None, wrong), "all as they were")
    return [Row("clients missing", len(names), len(names) - lost, lost, note)]


def spoilt(names: tuple[str, ...] = NAMES) -> list[Row]:
    """A row for each kind of upload; Local sends none."""
    sending = [name for name in names if name != "local"]
    seen = {}
    for name in sending:
        progress(f"{name}: uploads that are rubbish")
        seen[name] = rubbish(name)
    rows = []
    for kind in RUBBISH:
        wrong = [found[kind] for found in seen.values() if kind in found]
        note = wrong[0] if wrong else "rejected alone; one and the same end for all kinds"
        rows.append(
            Row(f"upload {kind}", len(sending), len(sending) - len(wrong), len(wrong), note)
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    finish([*missing(parser.parse_args().rounds), *spoilt()])
