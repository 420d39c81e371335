"""Tests that private data stays with its client, and that nothing is unpickled."""

import ast
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, State
from fedjax_pfl.core.examples import FederatedData, client_data
from fedjax_pfl.runs import checkpoints
from fedjax_pfl.simulation import ledger, summaries
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, tiny

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

ROOT = Path(__file__).parents[2]
PICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "_pickle"}
LOADERS = {f"{module}.load" for module in ("np", "numpy", "jnp", "jax.numpy")}
CLIENT = 3  # the client with marked values
DATA, LAYERS = 7654.25, 54321.5  # marks of its first training example and its private layers


def test_no_module_unpickles_but_the_reader_of_plain_values():
    """tests/data/foreign_partitions_test.py tests that this reader refuses all other pickles."""
    paths = [p for part in ("fedjax_pfl", "experiments") for p in (ROOT / part).rglob("*.py")]
    paths.remove(ROOT / "fedjax_pfl/data/plain_pickle.py")
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not PICKLERS & {alias.name.partition(".")[0] for alias in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in PICKLERS, path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in LOADERS:
                arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert arguments.get("allow_pickle") == "False", path


def contains(tree: Any, value: float) -> bool:
    """Returns True if a leaf contains the value or a number close to it."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return any(
        bool((np.abs(np.asarray(leaf, np.float64) / value - 1) < 1e-4).any())
        for leaf in leaves
        if leaf.size and leaf.dtype != bool
    )


def marked(name: str) -> tuple[Algorithm, FederatedData, State]:
    """Returns a method, data and an initial state with marked values of one client.

    Equal values in all outputs of a head do not change the softmax. There is no weight decay.
    """
    data, federation = tiny.federated()
    data = data._replace(x=data.x.at[data.train.rows[CLIENT, 0], 2].set(DATA))
    algorithm = cases.make(name, federation, weight_decay=0.0)
    state = jax.jit(algorithm.init)(jax.random.key(0))
    layers = jax.tree.map(lambda leaf: leaf.at[CLIENT].set(LAYERS), state.clients.personal)
    return algorithm, data, state._replace(clients=state.clients._replace(personal=layers))


def assert_unmarked(shared: Any) -> None:
    assert not contains(shared, DATA)
    assert not contains(shared, LAYERS)


@pytest.mark.parametrize("name", ["fedper", "fedbn", "pfedhn_pc"])
def test_private_data_and_layers_stay_with_their_client(name: str, tmp_path: Path):
    """Checks payloads, uploads, metrics, diagnostics and the shared parts of a checkpoint."""
    algorithm, data, state = marked(name)
    assert contains(client_data(data, CLIENT).x, DATA)
    ids, key = jnp.arange(tiny.CLIENTS), jax.random.key(1)

    def train(state: State, i: jax.Array, t: jax.Array) -> Any:
        payload = algorithm.send(state, ClientContext(i, None, t, key))
        ctx = ClientContext(i, client_data(data, i), t, key)
        return payload, *algorithm.train(payload, trees.row(state.clients, i), ctx)

    @jax.jit
    def run_round(state: State, t: jax.Array) -> tuple[State, Any]:
        outcome = jax.vmap(train, (None, 0, None))(state, ids, t)
        payloads, uploads, _, clients, _ = outcome
        arrived = jnp.ones(tiny.CLIENTS, bool)
        cohort = tiny.cohort(tiny.TRAIN, ids, arrived, payloads, uploads, t)
        return State(*algorithm.receive(state, cohort), clients), outcome

    for t in range(2):
        state, (payloads, uploads, models, clients, metrics) = run_round(state, jnp.int32(t))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((payloads, uploads)))
        assert contains(trees.row((models, clients), CLIENT), LAYERS)
        assert_unmarked((payloads, uploads, metrics, state.server, state.rows))
        assert_unmarked(trees.row((clients, models), jnp.delete(ids, CLIENT)))
    assert_unmarked(algorithm.observe(state))

    store = checkpoints.open_store(tmp_path)
    store.save(1, {"state": state}, {"round": 1})
    saved = store.restore(1, {"state": jax.eval_shape(lambda: state)})["state"]
    assert contains(saved.clients, LAYERS)
    assert_unmarked((saved.server, saved.rows))
    text = (tmp_path / "1" / "meta" / "metadata").read_text()
    assert not any(str(int(mark)) in text for mark in (DATA, LAYERS))


def test_logs_and_messages_contain_no_private_data():
    algorithm, data, state = marked("fedper")
    federation = tiny.federated()[1]
    rounds = make_rounds(algorithm, federation, cohort=6, max_update_norm=1e-6)
    state, logs = rounds.run(jax.random.key(0), state, data, jnp.int32(0), jnp.int32(1))
    logs = jax.device_get(logs)
    assert_unmarked(logs)
    book = ledger.add(ledger.empty(tiny.CLIENTS), logs, 1)
    texts = [
        *summaries.rejections(logs, 0, 1),
        json.dumps(
            [
                book,
                summaries.means(summaries.gather({}, logs, 1, np.zeros(tiny.CLIENTS, bool))),
            ]
        ),
    ]
    assert (
        f"the update of client {CLIENT} was rejected because it is not finite or too large"
        in texts[CLIENT]
    )
    assert not any(str(int(mark)) in text for text in texts for mark in (DATA, LAYERS))
