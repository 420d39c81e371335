"""Ten mistakes that a method's author makes, each caught by a rule of the contract."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    State,
    Traffic,
    full_traffic,
)
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import take
from fedjax_pfl.testing import rules as contract
from tests import cases, rules, tiny


def total(uploads: jax.Array) -> jax.Array:
    """[K]: one number for each row."""
    return jnp.sum(uploads, 1)


def init(key: jax.Array, start: Any = None) -> State:
    n = tiny.CLIENTS
    return State(jax.random.normal(key, (tiny.FEATURES,)), jnp.zeros(n), jnp.zeros((n, 5)))


def mean_example(data: Any) -> jax.Array:
    """Of the training examples."""
    longest = data.train.rows.shape[0]
    batch = take(data, data.train.rows, jnp.arange(longest) < data.train.size)
    return jnp.sum(batch.x, 0) / data.train.size.astype(jnp.float32)


def step(payload: Any, client: Any, g: jax.Array, noise: Any) -> ClientResult:
    w, row = payload
    client = 0.5 * client + g
    new = w - 0.1 * (w - client) + 0.01 * noise + 0.001 * row
    return ClientResult(new, new, client, {"loss": jnp.sum(jnp.square(w - g))})


def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    noise = jax.random.normal(ctx.key, (tiny.FEATURES,))
    return step(payload, client, mean_example(ctx.data), noise)


def receive(state: State, cohort: Cohort) -> tuple[Any, Any]:
    rows = cohort.put(state.rows, total(cohort.uploads))
    return cohort.mean(cohort.uploads, state.server), rows


HONEST = Algorithm(
    init=init,
    send=lambda state, ctx: (state.server, state.rows[ctx.i]),
    train=train,
    receive=receive,
    personalize=lambda state, client, ctx: state.server + client,
    predict=lambda variables, x: jnp.outer(x @ variables, jnp.arange(1.0, 4.0)),
)


def subject(**changes: Any) -> rules.Subject:
    def make(federation: Federation, own: Any = cases.NOTHING) -> Algorithm:
        return HONEST._replace(**changes)

    def fired(first: State, last: State) -> bool:
        return bool((first.rows != last.rows).all())

    return rules.make_subject("mine", cases.Case({}, fired, lambda model: (24, 20)), make)


def test_the_honest_method_keeps_all_rules():
    one = subject()
    for rule in rules.RULES:
        rule(one)


def absent_as_zero(state: State, cohort: Cohort) -> Any:
    return cohort.uploads.mean(0), receive(state, cohort)[1]


def stale_row_read(state: State, cohort: Cohort) -> Any:
    """The id of an empty seat is out of range, where a gather reads the last row."""
    server, rows = receive(state, cohort)
    return server + 0.01 * jnp.sum(state.rows[cohort.ids]), rows


def wrong_dtype(state: State, cohort: Cohort) -> Any:
    server, rows = receive(state, cohort)
    return server.astype(jnp.bfloat16), rows


def order_of_clients(state: State, cohort: Cohort) -> Any:
    """A seat's number is no client's id."""
    server, _ = receive(state, cohort)
    return server, state.rows.at[jnp.arange(len(cohort.ids))].set(total(cohort.uploads))


def test_data_touched(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    return step(payload, client, jnp.mean(ctx.data.x, 0), jnp.zeros(5))


test_data_touched.__test__ = False  # type: ignore[attr-defined]


def unseeded_randomness(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    noise = np.random.default_rng().normal(size=5).astype(np.float32)
    return step(payload, client, mean_example(ctx.data), jnp.asarray(noise))


visits = itertools.count()


def state_in_a_closure(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    """It counts how often it was traced, not visits."""
    return step(payload, client, mean_example(ctx.data), jnp.full(5, float(next(visits))))


def padding_read(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    return step(payload, client, jnp.mean(ctx.data.x[ctx.data.train.rows], 0), jnp.zeros(5))


def shape_by_count(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    """The length of the table is the longest client's, not this one's."""
    data = ctx.data
    size = data.train.size.astype(jnp.float32)
    g = mean_example(data) * (size / data.train.rows.shape[0])
    return step(payload, client, g, jnp.zeros(5))


def traffic_forgotten(payload: Any, upload: Any) -> Traffic:
    return full_traffic(payload[0], upload)


@pytest.mark.parametrize(
    ("function", "mistake", "rule"),
    [
        ("receive", absent_as_zero, contract.empty_slots_may_hold_anything),
        ("receive", stale_row_read, contract.equals_a_plain_loop),
        ("train", test_data_touched, contract.training_reads_no_test_examples),
        ("train", unseeded_randomness, contract.equals_a_plain_loop),
        ("train", state_in_a_closure, contract.equals_a_plain_loop),
        ("traffic", traffic_forgotten, rules.bytes_match_the_closed_formula),
        ("receive", wrong_dtype, contract.shapes_are_right),
        ("train", padding_read, contract.padding_is_invisible),
        ("receive", order_of_clients, contract.absent_clients_are_untouched),
        ("train", shape_by_count, contract.equals_a_plain_loop),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_mistake_is_caught(function: str, mistake: Any, rule: Any):
    with pytest.raises(UsageError if mistake is wrong_dtype else AssertionError):
        rule(subject(**{function: mistake}))
