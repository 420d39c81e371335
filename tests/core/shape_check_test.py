"""Every mistake in a user-defined method gives a one-line error."""

import jax
import jax.numpy as jnp
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core.algorithm import ClientResult, State, Traffic
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.core.shape_check import check_shapes
from tests import cases, tiny
from tests.commands import message

DATA, FEDERATION = tiny.federated()
TRAINING = cases.training(keep_optimizer=True)
BASE = algorithms.fedavg(tiny.Net(), TRAINING, FEDERATION)


def line(method=BASE, **changes):
    """Returns the message about a method with these changes."""
    return message(check_shapes, "mine", method._replace(**changes), FEDERATION, DATA)


def train(**changes):
    """Returns local training whose result has other fields."""
    return lambda payload, client, ctx: BASE.train(payload, client, ctx)._replace(**changes)


@pytest.mark.slow("traces the functions of many methods")
def test_correct_methods_pass():
    check_shapes("mine", BASE, FEDERATION, DATA)
    check_shapes("mine", by_group((BASE, BASE)), FEDERATION, DATA)
    for name in ("pfedla", "fedmn", "pfedhn", "clustered_fl", "factorized_fl", "fedfomo"):
        check_shapes(name, cases.make(name, FEDERATION), FEDERATION, DATA)


AMP = cases.make("fedamp", FEDERATION)


def test_offloaded_rows_are_read_only_by_offload_functions():
    def send_with_sum(state, ctx):
        """Adds a sum over all rows, which `jax.tree` does not see if they are offloaded."""
        total = sum(jnp.sum(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(state.rows))
        return jax.tree.map(lambda leaf: leaf + total, AMP.send(state, ctx))

    wrong = "reads offloaded rows; use trees.row, offload.weighted_sum or offload.map_clients"
    assert line(AMP, send=send_with_sum) == f"mine: send {wrong}"
    assert (
        line(AMP, observe=lambda state: {"rows": state.rows["params"]}) == f"mine: observe {wrong}"
    )
    replaced = "mine: receive replaces offloaded rows; write them with cohort.put"
    initial_rows = AMP.init(jax.random.key(0)).rows
    assert line(AMP, receive=lambda state, cohort: (state.server, initial_rows)) == replaced
    assert line(AMP, offload=("models",)) == "mine: offload names models, and rows have params"
    check_shapes("mine", AMP._replace(send=send_with_sum, offload=()), FEDERATION, DATA)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"train": lambda payload, client, ctx: tuple(BASE.train(payload, client, ctx))[:3]},
            "mine: train returns a tuple of 3; it must return "
            "ClientResult(upload, variables, client, metrics)",
        ),
        ({"train": train(client=())}, "mine: train returns nothing for client/"),
        ({"train": train(client=jnp.zeros(5))}, "shapes and dtypes must not change"),
        (
            {"train": train(metrics={"cost": jnp.zeros(())})},
            "mine: train returns the metrics {cost}; they must be a dict of scalars with loss",
        ),
        (
            {"train": train(metrics={"loss": jnp.zeros(3)})},
            "float32[3] for loss of the metrics; it must be a scalar",
        ),
        (
            {"train": train(metrics={"loss": jnp.zeros(()), "parts": {"a": jnp.zeros(())}})},
            "mine: train returns a dict for parts of the metrics; it must be a scalar",
        ),
        (
            {"train": train(metrics={1: jnp.zeros(())})},
            "mine: train returns the metrics {1}; they must be a dict of scalars with loss",
        ),
        (
            {"receive": lambda state, cohort: BASE.receive(state, cohort)[0]},
            "mine: receive returns a dict; it must return a tuple (server, rows)",
        ),
        (
            {"receive": lambda state, cohort: (cohort.uploads, state.rows)},
            "mine: receive returns float32[2, 8] for server/",
        ),
        (
            {"receive": lambda state, cohort: (state.server, (jnp.zeros(6),))},
            "mine: receive returns float32[6] for rows/0, but init returned nothing",
        ),
        (
            {"init": lambda key, start=None: tuple(BASE.init(key))},
            "mine: init returns a tuple of 3; it must return State(server, rows, clients)",
        ),
        (
            {"init": lambda key, start=None: State(BASE.init(key).server, jnp.zeros(5), ())},
            "mine: init returns float32[5] for rows; its first axis must be the 6 clients",
        ),
        (
            {"init": lambda key, start=None: BASE.init(key)._replace(server={"key": key})},
            "mine: init returns a random key at server/key, which can be neither sent nor saved",
        ),
        (
            {"init": lambda key: BASE.init(key)},
            "mine: init takes (key); it must take (key, start=None)",
        ),
        (
            {"send": lambda server, rows, i, t, key: server},
            "mine: send takes (server, rows, i, t, key); it must take (state, ctx)",
        ),
        (
            {"predict": lambda variables, x: jnp.zeros(2)},
            "mine: predict returns an array float32[2] for 2 examples; it must return [2, 3]",
        ),
        (
            {"send": lambda state, ctx: {"key": ctx.key}},
            "mine: send returns a random key at key, which can be neither sent nor saved; use jax.",
        ),
        (
            {"traffic": lambda payload, upload: {"w": 4}},
            "mine: traffic returns a dict; it must return Traffic(down, up)",
        ),
        (
            {"traffic": lambda payload, upload: Traffic(down=4, up={})},
            "mine: traffic returns an array int32[] for the layers of down; it must be a dict",
        ),
        (
            {"traffic": lambda payload, upload: Traffic(down={}, up={"w": jnp.zeros(2)})},
            "mine: traffic returns an array float32[2] for w of the layers of up",
        ),
        (
            {"observe": lambda state: jnp.zeros(3)},
            "mine: observe returns an array float32[3]; it must return a dict of arrays by name",
        ),
        (
            {"observe": lambda state: {"models": [jnp.zeros(3)]}},
            "mine: observe returns a list for models of the arrays; it must be an array",
        ),
        (
            {"observe": lambda state: {1: jnp.zeros(3)}},
            "mine: observe returns a dict for the arrays; it must be a dict whose keys are text",
        ),
    ],
)
def test_a_mistake_is_one_line(changes, expected):
    assert expected in line(**changes)


def test_exceptions_get_a_note_with_the_function():
    broken = BASE._replace(send=lambda state, ctx: state.rows[ctx.i])
    with pytest.raises(Exception, match="__index__") as caught:
        check_shapes("mine", broken, FEDERATION, DATA)
    assert not isinstance(caught.value, UsageError)
    assert caught.value.__notes__[-1] == "raised in send of mine"
    assert ClientResult._fields == ("upload", "variables", "client", "metrics")
