"""The rules that the engine keeps for every algorithm; one is covered by being exported."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, State, Visit
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.core.randomness import SEND, TRAIN, stage_key
from fedjax_pfl.engine import ledger, memory_estimate, sweep
from fedjax_pfl.engine.rounds import Rounds, make_rounds, plain_rounds
from fedjax_pfl.runs import checkpoints
from tests import cases, programs, tiny
from tests.cases import CASES, NAMES, TASK

KEY = jax.random.key(7)
ROUNDS = 4
FULL = {"cohort": 6, "calls": ROUNDS, "chunk": 3}
SOME = 3  # clients in the cohort of a run with partial participation
pytestmark = pytest.mark.parametrize("name", NAMES)


class Counted(NamedTuple):
    """Compiled rounds, and how often `train` has been traced so far."""

    rounds: Rounds
    traces: list[int]


@cache
def full(name: str) -> Rounds:
    """Everybody takes part, in chunks of three clients."""
    return make_rounds(algorithm(name), TASK, tiny.federated()[1], **FULL)


@cache
def partial(name: str) -> Counted:
    """Three of six take part, one after the other, and some of them drop out."""
    made, traces = algorithm(name), []

    def train(*arguments: Any) -> Any:
        traces.append(1)
        return made.train(*arguments)

    rounds = make_rounds(
        made._replace(train=train),
        TASK,
        tiny.federated()[1],
        cohort=SOME,
        calls=ROUNDS,
        dropout=0.4,
    )
    return Counted(rounds, traces)


@cache
def algorithm(name: str) -> Algorithm:
    return cases.make(name, tiny.federated()[1])


@cache
def one_client(name: str) -> Any:
    """`send` and `train` for one client, compiled once for all of them."""
    made = algorithm(name)

    def work(state: State, data: Any, i: jax.Array, t: jax.Array) -> Any:
        payload = made.send(state, Visit(i, None, t, stage_key(KEY, SEND, t, i)))
        upload, _, client, _ = made.train(
            payload,
            trees.row(state.clients, i),
            Visit(i, client_data(data, i), t, stage_key(KEY, TRAIN, t, i)),
        )
        return payload, upload, client

    return jax.jit(work)


def looped(name: str, state: State, data: Any, arrived: list[bool]) -> State:
    """One round as a plain loop over clients."""
    ids = jnp.arange(tiny.CLIENTS)
    met = [one_client(name)(state, data, i, jnp.int32(0)) for i in ids]
    payloads, uploads, clients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *met)
    here = jnp.asarray(arrived)
    uploads = trees.where(here, uploads, jax.tree.map(jnp.zeros_like, uploads))
    safe = jnp.where(here, ids, tiny.CLIENTS)
    cohort = tiny.cohort(tiny.TRAIN, safe, here, payloads, uploads, jnp.int32(0))
    server, rows = jax.jit(algorithm(name).receive)(state, cohort)
    return State(server, rows, trees.where(here, clients, state.clients))


def train(rounds: Rounds, data: Any, n: int = ROUNDS, t: int = 0, state: Any = None) -> Any:
    state = rounds.init(KEY) if state is None else state
    return rounds.run(KEY, state, data, jnp.int32(t), jnp.int32(n))


def test_the_interesting_branch_fires(name: str):
    rounds, (data, _) = full(name), tiny.federated()
    last, _ = train(rounds, data)
    assert CASES[name].fired(rounds.init(KEY), last)


def test_compiled_equals_a_plain_loop(name: str):
    data, _ = tiny.federated()
    got, _ = train(full(name), data, 1)
    wanted = looped(name, full(name).init(KEY), data, [True] * tiny.CLIENTS)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_vmap_and_devices_do_not_matter(name: str, mesh: jax.sharding.Mesh):
    """Chunks of three clients, and a client on each of eight devices, of which two are idle."""
    data, federation = tiny.federated()
    spread = make_rounds(algorithm(name), TASK, federation, cohort=6, calls=ROUNDS, mesh=mesh)
    key, there = spread.place(KEY), spread.place(data)
    t, n = spread.place(jnp.int32(0)), spread.place(jnp.int32(1))
    first = spread.init(key)
    most = memory_estimate.gathered(spread.run, key, first, there, t, n)
    run = spread.run.lower(key, first, there, t, n).compile()
    assert programs.collectives(run.as_text()) == {"all-gather"}
    assert 0 < programs.all_gathered(run.as_text()) <= most
    state, _ = run(key, first, there, t, n)
    wanted, _ = train(full(name), data, 1)
    close = {"rtol": 1e-5, "atol": 1e-6}
    chex.assert_trees_all_close(jax.device_get(state), jax.device_get(wanted), **close)
    scores = jax.device_get(spread.evaluate(key, state, there, n))
    expected = jax.device_get(full(name).evaluate(KEY, wanted, data, jnp.int32(1)))
    chex.assert_trees_all_close(scores, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(scores.before.examples, tiny.TEST)
    np.testing.assert_array_equal(scores.validation.examples, tiny.VALIDATION)


def test_as_a_point_of_a_sweep(name: str):
    """The second of two, with a seed and in all real-valued settings numbers of their own."""
    data, federation = tiny.federated()
    points = sweep.Points(jnp.stack([jax.random.key(8), KEY]), jnp.arange(2))
    make = lambda now: plain_rounds(cases.make(name, federation, now), TASK, federation, **FULL)
    real = {key: (value / 2, value) for key, value in cases.real(name).items()}
    rounds = sweep.make_rounds(make, real, None, width=1)
    t, n = jnp.int32(0), jnp.int32(1)
    states, _ = rounds.run(points, rounds.init(points), data, t, n)
    wanted, _ = train(full(name), data, 1)
    close = {"rtol": 1e-5, "atol": 1e-6}
    chex.assert_trees_all_close(trees.row(states, 1), wanted, **close)
    if real:  # and not those of the first
        first, second = (jax.tree.leaves(trees.row(states, i)) for i in (0, 1))
        assert any((a != b).any() for a, b in zip(first, second, strict=True))


def test_padding_is_invisible(name: str):
    base, _ = train(full(name), tiny.federated()[0], 1)
    refilled, _ = train(full(name), tiny.federated(filler=11)[0], 1)
    chex.assert_trees_all_equal(base, refilled)


def test_longer_padding_is_invisible(name: str):
    """Nine more rows of padding for every client, which are other shapes to compile for."""
    state, t = full(name).init(KEY), jnp.int32(0)
    base, wide = tiny.federated()[0], tiny.federated(extra=9)[0]
    for i in jnp.arange(tiny.CLIENTS):
        met, again = (one_client(name)(state, data, i, t) for data in (base, wide))
        chex.assert_trees_all_close(met, again, rtol=1e-6, atol=1e-6)


def test_calls_do_not_matter_and_compile_once(name: str):
    """Four rounds in one call, and in three calls of other lengths, bit for bit."""
    (rounds, traces), (data, _) = partial(name), tiny.federated()
    whole, _ = train(rounds, data)
    first = len(traces)
    state = None
    for t, n in ((0, 1), (1, 2), (3, 1)):
        state, _ = train(rounds, data, n, t, state)
    chex.assert_trees_all_equal(whole, state)
    assert len(traces) == first > 0


def test_a_checkpoint_holds_all_of_the_state(name: str, tmp_path: Path):
    """Two rounds, saved and restored, and two more equal four rounds, bit for bit."""
    (rounds, _), (data, _) = partial(name), tiny.federated()
    whole, _ = train(rounds, data)
    state, _ = train(rounds, data, 2)
    store = checkpoints.open_store(tmp_path)
    store.save(2, {"state": state}, {})
    template = jax.eval_shape(rounds.init, KEY)
    restored = store.restore(2, {"state": template})["state"]
    chex.assert_trees_all_equal(restored, jax.device_get(state))
    again, _ = train(rounds, data, 2, 2, rounds.place(restored))
    chex.assert_trees_all_equal(whole, again)


def test_absent_is_untouched(name: str):
    (rounds, _), (data, _) = partial(name), tiny.federated()
    state, gone = rounds.init(KEY), 0
    for t in range(ROUNDS):
        before = jax.tree.map(np.array, state)
        state, (log,) = train(rounds, data, 1, t, state)
        here = np.asarray(log.present & ~log.dropped & ~log.rejected)[0]
        absent = np.setdiff1d(np.arange(tiny.CLIENTS), np.asarray(log.ids)[0, here])
        gone += int(np.asarray(log.dropped)[0].sum())
        parts = (lambda s: s.clients) if CASES[name].rows_of_absent_move else (lambda s: s[1:])
        rows = zip(jax.tree.leaves(parts(before)), jax.tree.leaves(parts(state)), strict=True)
        for old, new in rows:
            np.testing.assert_array_equal(old[absent], np.asarray(new)[absent])
        if not here.any():
            chex.assert_trees_all_equal(before, jax.device_get(state))
    assert gone > 0


def test_nobody_answers(name: str):
    """All uploads are bad: the state stays as it was, bit for bit."""
    data, _ = tiny.federated()
    first = jax.device_get(full(name).init(KEY))
    state, (log,) = train(full(name), data._replace(x=data.x * jnp.nan))
    assert np.asarray(log.rejected).all()
    chex.assert_trees_all_equal(first, jax.device_get(state))


def test_a_bad_upload_changes_nothing_for_the_others(name: str):
    """Client 3 computes NaN: the round ends as if it had not answered."""
    data, _ = tiny.federated()
    own = data.train.rows[3, : data.train.size[3]]
    poisoned = data._replace(x=data.x.at[own].set(jnp.nan))
    got, (log,) = train(full(name), poisoned, 1)
    others = [i != 3 for i in range(tiny.CLIENTS)]
    np.testing.assert_array_equal(np.asarray(log.rejected)[0], ~np.asarray(others))
    wanted = looped(name, full(name).init(KEY), data, others)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_every_byte_is_counted(name: str):
    rounds, (data, federation) = partial(name).rounds, tiny.federated()
    _, logs = train(rounds, data)
    book = ledger.add(ledger.empty(federation.clients), logs, ROUNDS)
    (log,) = logs
    down, up = (sum(np.asarray(b) for b in bill.values()) for bill in (log.down, log.up))
    down, up = (np.broadcast_to(total, log.ids.shape) for total in (down, up))
    may = CASES[name].bytes_per_visit(cases.model_bytes())
    may_down, may_up = (allowed if isinstance(allowed, set) else {allowed} for allowed in may)
    dropped = np.asarray(log.dropped)
    assert 0 < dropped.sum() < dropped.size
    assert set(down.ravel()) <= may_down
    assert set(up[~dropped]) <= may_up
    assert not up[dropped].any()
    assert (book.total_down, book.total_up) == (down.sum(), up.sum())
    assert (sum(book.client_down), sum(book.client_up)) == (book.total_down, book.total_up)
    free = ledger.add(ledger.empty(federation.clients), logs, ROUNDS, free_rounds=1)
    assert free.total_down == down[1:].sum()
