"""Tests of evaluation: models that are mixed on the server are computed for blocks of clients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import offload
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    Federation,
    State,
)
from fedjax_pfl.core.examples import FederatedData, Split, take
from fedjax_pfl.simulation import map_clients
from fedjax_pfl.simulation.offloaded_rows import PartSource
from fedjax_pfl.simulation.on_device import DeviceProgram
from fedjax_pfl.simulation.rounds import make_rounds, round_functions
from fedjax_pfl.simulation.streamed import StreamedProgram
from fedjax_pfl.testing import rules as contract
from tests import cases, tiny

pytestmark = pytest.mark.slow("programs with and without blocks")

N = 7
SHARES = (1 + np.add.outer(np.arange(N), 2 * np.arange(N)) % 4) / 4  # dyadic, like all numbers
ROWS = np.arange(N) - 2.0
CLIENTS = np.arange(N) % 3 + 0.5
X = np.arange(N) % 4 + 0.25


def mixing(is_tuned: bool) -> Algorithm:
    """Returns a method whose sums are exact in float32, in any order.

    Its models are one weight: a mixture of all rows, and an example of the client if `is_tuned`.
    """

    def example(ctx: ClientContext) -> jax.Array:
        return take(ctx.data, ctx.data.train.rows, jnp.ones(1, bool)).x[0, 0]

    def init(key: jax.Array, start: State | None = None) -> State:
        return State((), jnp.asarray(ROWS, jnp.float32), jnp.asarray(CLIENTS, jnp.float32))

    def send(state: State, ctx: ClientContext) -> jax.Array:
        return jnp.asarray(SHARES, jnp.float32)[ctx.i] @ state.rows

    def train(payload: jax.Array, client: jax.Array, ctx: ClientContext) -> ClientResult:
        weight = payload + client * example(ctx)
        return ClientResult(weight, weight, client, {"loss": weight})

    def receive(state: State, cohort: Cohort) -> tuple[Any, jax.Array]:
        return state.server, cohort.put(state.rows, cohort.uploads)

    def personalize(state: State, client: jax.Array, ctx: ClientContext) -> jax.Array:
        model = send(state, ctx) + client
        return model + example(ctx) if is_tuned else model

    return Algorithm(
        init=init,
        send=send,
        train=train,
        receive=receive,
        personalize=personalize,
        predict=lambda variables, x: x * variables,
    )


@pytest.mark.parametrize("is_tuned", [False, True], ids=["mixed", "tuned"])
@pytest.mark.parametrize(
    ("devices", "by_client"), [(1, False), (2, False), (2, True)], ids=["one", "two", "spread"]
)
@pytest.mark.parametrize("chunk", [1, 2])
def test_losses_equal_numpy(monkeypatch, is_tuned: bool, devices: int, by_client: bool, chunk: int):
    """Seven clients in blocks of at most three; exact, because all sums are."""
    monkeypatch.setattr(map_clients, "_BLOCK_CLIENTS", 3)
    split = Split(np.arange(N, dtype=np.int32)[:, None], np.ones(N, np.int32))
    x = X.astype(np.float32)[:, None]
    data = FederatedData(x, 2 * x, split, split, split)
    federation = Federation(
        np.ones(N, int), (1,), 1, np.ones(N, bool), np.zeros(N, int), task=tiny.HALF_SQUARES
    )
    axis = (jax.sharding.AxisType.Auto,)
    used = jax.devices()[:devices]
    mesh = jax.make_mesh((devices,), ("clients",), axis, devices=used) if devices > 1 else None
    options = {"cohort": N, "chunk": chunk, "mesh": mesh, "by_client": by_client}
    rounds = make_rounds(mixing(is_tuned), federation, **options)
    program = DeviceProgram(rounds, contract.make_key(), data)
    scores = program.evaluate(program.init(), 0)
    mixed = SHARES @ ROWS
    before = mixed + CLIENTS + (X if is_tuned else 0)
    after = mixed + CLIENTS * X
    np.testing.assert_array_equal(scores.before.loss, 0.5 * (X * (before - 2)) ** 2)
    np.testing.assert_array_equal(scores.validation.loss, scores.before.loss)
    np.testing.assert_array_equal(scores.after.loss, 0.5 * (X * (after - 2)) ** 2)


@pytest.mark.parametrize(
    ("name", "of_evaluation", "of_round"),
    [("pfedla", 2 * 2, 2 + 1), ("fedamp", 2 * 2, 2 * 2), ("factorized_fl", 2 * 4, 2 * 2)],
)
def test_a_block_of_clients_reads_all_models_once(
    monkeypatch, name: str, of_evaluation: int, of_round: int
):
    """Passes over stored models with six clients in two blocks, one at a time.

    An evaluation mixes a client's served model and its download, except for FedAMP, whose clients
    are served their own. FedAMP and Factorized-FL compare models before they mix them. pFedLA
    reads all models once more to update the hypernetworks. XLA may share a pass between blocks.
    """
    monkeypatch.setattr(map_clients, "_BLOCK_CLIENTS", 3)
    monkeypatch.setattr(offload, "_BLOCK", 1)  # a pass reads one row at a time
    data, federation = tiny.federated()
    options: dict[str, Any] = {"cohort": tiny.CLIENTS, "chunk": 1}
    functions = round_functions(cases.make(name, federation), federation, **options)
    program = StreamedProgram(functions, contract.make_key(), data)
    state = program.enter(program.init())
    rows_read = 0
    read = PartSource.read

    def count_rows(source: PartSource, leaves: Any, ids: Any) -> Any:
        nonlocal rows_read
        rows_read += ids.shape == (1,)
        return read(source, leaves, ids)

    monkeypatch.setattr(PartSource, "read", count_rows)
    program.evaluate(state, 0)
    assert 0 < rows_read <= of_evaluation * tiny.CLIENTS
    rows_read = 0
    program.run(state, 0, 1)
    assert 0 < rows_read <= of_round * tiny.CLIENTS
