"""The split of `personalize`: results of both parts, and the values that are sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import split_personalize

ROWS = jnp.arange(12.0).reshape(4, 3)
STATE = State(jnp.float32(2.0), ROWS, ())
CLIENT = jnp.ones(3)


def ctx(i):
    return ClientContext(jnp.int32(i), {"x": jnp.arange(5.0)}, jnp.int32(7), jax.random.key(3))


def run_both(personalize, i=2):
    """Runs both parts, each with shapes for the other's data; returns sent values and result."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), CLIENT)
    data = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), ctx(i).data)
    crossed = split_personalize.server_part(personalize, STATE, shapes, ctx(i)._replace(data=data))
    nothing = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), STATE)
    return crossed, split_personalize.client_part(personalize, crossed, nothing, CLIENT, ctx(i))


def mixed(state, client, ctx):
    """Uses the client's row, a broadcast scalar, a random number, and a loop over the data."""
    mine = jnp.tanh(state.rows @ jnp.ones((3, 3)))[ctx.i]
    noise = jax.random.normal(ctx.key, (3,))

    def step(n, so_far):
        return so_far + mine * ctx.data["x"][n]

    total = jax.lax.fori_loop(0, 5, step, client)
    return {"w": total + noise, "b": jnp.full((50,), state.server) * ctx.data["x"][0]}


def test_both_parts_equal_personalize_and_only_a_row_and_a_number_are_sent():
    crossed, variables = run_both(mixed)
    expected = mixed(STATE, CLIENT, ctx(2))
    for name in expected:
        np.testing.assert_allclose(variables[name], expected[name], rtol=1e-6)
    assert sum(map(trees.leaf_bytes, crossed)) <= 4 * (3 + 2)


def test_client_operations_need_no_server_values():
    assert run_both(lambda state, client, ctx: client * ctx.data["x"][1])[0] == []


def test_the_result_of_a_server_operation_is_sent():
    crossed, variables = run_both(lambda state, client, ctx: state.rows[ctx.i] * 2)
    assert [value.shape for value in crossed] == [(3,)]
    np.testing.assert_array_equal(variables, ROWS[2] * 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, i: rows,
        lambda rows, i: rows * 1.0,
        lambda rows, i: rows.reshape(-1, 1).reshape(rows.shape),
        lambda rows, i: jax.jit(jnp.transpose)(rows).T,
        lambda rows, i: rows - rows[i][None],
    ],
)
def test_rows_of_other_clients_are_never_sent(change):
    def greedy(state, client, ctx):
        return jnp.where(client[0] > 0, change(state.rows, ctx.i), 0.0).sum(0)

    with pytest.raises(UsageError, match="all clients' rows"):
        run_both(greedy)
