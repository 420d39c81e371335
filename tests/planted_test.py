"""Twelve mistakes of a method's author, each caught by a rule of the contract."""

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

pytestmark = pytest.mark.slow("programs of methods with mistakes")


def init(key: jax.Array, start: Any = None) -> State:
    n = tiny.CLIENTS
    return State(jax.random.normal(key, (tiny.FEATURES,)), jnp.zeros(n), jnp.zeros((n, 5)))


def mean_example(data: Any) -> jax.Array:
    """Returns the mean of the training examples."""
    longest = data.train.rows.shape[0]
    batch = take(data, data.train.rows, jnp.arange(longest) < data.train.size)
    return jnp.sum(batch.x, 0) / data.train.size.astype(jnp.float32)


def step(payload: Any, client: Any, g: jax.Array, noise: Any = 0.0) -> ClientResult:
    w, row = payload
    client = 0.5 * client + g
    new = w - 0.1 * (w - client) + 0.01 * noise + 0.001 * row
    return ClientResult(new, new, client, {"loss": jnp.sum(jnp.square(w - g))})


def train(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    noise = jax.random.normal(ctx.key, (tiny.FEATURES,))
    return step(payload, client, mean_example(ctx.data), noise)


def receive(state: State, cohort: Cohort) -> tuple[Any, Any]:
    rows = cohort.put(state.rows, cohort.uploads.sum(1))
    return cohort.mean(cohort.uploads, state.server), rows


CORRECT = Algorithm(
    init=init,
    send=lambda state, ctx: (state.server, state.rows[ctx.i]),
    train=train,
    receive=receive,
    personalize=lambda state, client, ctx: state.server + client,
    predict=lambda variables, x: jnp.outer(x @ variables, jnp.arange(1.0, 4.0)),
)


def make_subject(**changes: Any) -> rules.Subject:
    def make(federation: Federation, settings: Any = cases.NOTHING) -> Algorithm:
        return CORRECT._replace(**changes)

    def fired(first: State, last: State) -> bool:
        return bool((first.rows != last.rows).all())

    return rules.make_subject("correct", cases.Case({}, fired, lambda model: (24, 20)), make)


def test_a_correct_method_keeps_all_rules():
    subject = make_subject()
    for rule in rules.RULES:
        rule(subject)


def absent_as_zero(state: State, cohort: Cohort) -> Any:
    return cohort.uploads.mean(0), receive(state, cohort)[1]


def stale_row_read(state: State, cohort: Cohort) -> Any:
    """Gathers with the id of an empty slot, which reads the last row."""
    server, rows = receive(state, cohort)
    return server + 0.01 * jnp.sum(state.rows[cohort.ids]), rows


def wrong_dtype(state: State, cohort: Cohort) -> Any:
    server, rows = receive(state, cohort)
    return server.astype(jnp.bfloat16), rows


def slots_for_clients(state: State, cohort: Cohort) -> Any:
    """Writes to the row of a slot's number instead of the client's."""
    server, _ = receive(state, cohort)
    return server, state.rows.at[jnp.arange(len(cohort.ids))].set(cohort.uploads.sum(1))


def all_examples_read(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    return step(payload, client, jnp.mean(ctx.data.x, 0))


def unseeded_randomness(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    noise = np.random.default_rng().normal(size=5).astype(np.float32)
    return step(payload, client, mean_example(ctx.data), jnp.asarray(noise))


traces = itertools.count()


def state_in_a_closure(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    """Counts traces instead of rounds."""
    return step(payload, client, mean_example(ctx.data), jnp.full(5, float(next(traces))))


def padding_read(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    return step(payload, client, jnp.mean(ctx.data.x[ctx.data.train.rows], 0))


def all_examples_served(state: State, client: Any, ctx: ClientContext) -> Any:
    return state.server + jnp.mean(ctx.data.x, 0)


def padding_served(state: State, client: Any, ctx: ClientContext) -> Any:
    return state.server + jnp.mean(ctx.data.x[ctx.data.train.rows], 0)


def longest_count(payload: Any, client: Any, ctx: ClientContext) -> ClientResult:
    """Divides by the largest number of examples of any client."""
    split = ctx.data.train
    share = split.size.astype(jnp.float32) / split.rows.shape[0]
    return step(payload, client, mean_example(ctx.data) * share)


def traffic_incomplete(payload: Any, upload: Any) -> Traffic:
    return full_traffic(payload[0], upload)


def traffic_without_uploads(payload: Any, upload: Any) -> Traffic:
    return full_traffic(payload, {})


@pytest.mark.parametrize(
    ("function", "mistake", "rule"),
    [
        ("traffic", traffic_without_uploads, contract.every_byte_is_counted),
        ("receive", absent_as_zero, contract.empty_slots_may_hold_anything),
        ("receive", stale_row_read, contract.equals_a_plain_loop),
        ("train", all_examples_read, contract.training_reads_no_test_examples),
        ("train", unseeded_randomness, contract.equals_a_plain_loop),
        ("train", state_in_a_closure, contract.equals_a_plain_loop),
        ("traffic", traffic_incomplete, rules.bytes_match_the_closed_formula),
        ("receive", wrong_dtype, contract.shapes_are_right),
        ("train", padding_read, contract.padding_is_invisible),
        ("receive", slots_for_clients, contract.absent_clients_are_untouched),
        ("train", longest_count, contract.equals_a_plain_loop),
        ("personalize", all_examples_served, contract.training_reads_no_test_examples),
        ("personalize", padding_served, contract.padding_is_invisible),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_mistake_is_caught(function: str, mistake: Any, rule: Any):
    with pytest.raises(UsageError if mistake is wrong_dtype else AssertionError):
        rule(make_subject(**{function: mistake}))
