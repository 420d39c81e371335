"""What is one client's own stays there, and nothing that is read can be a program."""

import ast
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import ClientContext, State
from fedjax_pfl.core.examples import client_data
from fedjax_pfl.runs import checkpoints
from fedjax_pfl.simulation import ledger, metrics
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, tiny

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

ROOT = Path(__file__).parents[2]
PICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "_pickle"}
LOADERS = {f"{module}.load" for module in ("np", "numpy", "jnp", "jax.numpy")}
WHO = 3  # the client that is marked
DATA, LAYERS = 7654.25, 54321.5  # what marks its first training example, and its own layers


def sources() -> list[Path]:
    return sorted(p for part in ("fedjax_pfl", "experiments") for p in (ROOT / part).rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_imports_pickle_and_numpy_refuses_it(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not PICKLERS & {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in PICKLERS
        if isinstance(node, ast.Call) and ast.unparse(node.func) in LOADERS:
            said = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert said.get("allow_pickle") == "False"


def near(value: float, tree: Any) -> bool:
    """Whether a value, or nearly that, is anywhere in a tree."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return any(
        bool((np.abs(np.asarray(leaf, np.float64) / value - 1) < 1e-4).any())
        for leaf in leaves
        if leaf.size and leaf.dtype != bool
    )


def marked(name: str) -> tuple[Any, Any, State]:
    """An algorithm, data and a first state in which one client's are marked."""
    data, federation = tiny.federated()
    data = data._replace(x=data.x.at[data.train.rows[WHO, 0], 2].set(DATA))
    made = cases.make(name, federation, weight_decay=0.0)  # which would move what is marked
    state = jax.jit(made.init)(jax.random.key(0))
    # Equal in all outputs of a head, these change no softmax; the momentum is not theirs.

    def put(leaf):
        return leaf.at[WHO].set(LAYERS)

    clients = state.clients._replace(personal=jax.tree.map(put, state.clients.personal))
    return made, data, state._replace(clients=clients)


def assert_at_home(shared: Any) -> None:
    assert not near(DATA, shared)
    assert not near(LAYERS, shared)


@pytest.mark.parametrize("name", ["fedper", "fedbn", "pfedhn_pc"])
def test_a_mark_in_a_clients_data_and_layers_stays_with_it(name: str, tmp_path: Path):
    """Payloads, uploads, metrics, what is observed, and the shared part of a checkpoint."""
    made, data, state = marked(name)
    assert near(DATA, client_data(data, WHO).x)
    ids, key = jnp.arange(tiny.CLIENTS), jax.random.key(1)

    def ctx(state: State, i: jax.Array, t: jax.Array) -> Any:
        payload = made.send(state, ClientContext(i, None, t, key))
        client = trees.row(state.clients, i)
        upload, trained, client, seen = made.train(
            payload, client, ClientContext(i, client_data(data, i), t, key)
        )
        return payload, upload, client, seen, trained

    @jax.jit
    def one_round(state: State, t: jax.Array) -> tuple[State, Any]:
        met = jax.vmap(ctx, (None, 0, None))(state, ids, t)
        arrived = jnp.ones(tiny.CLIENTS, bool)
        cohort = tiny.cohort(tiny.TRAIN, ids, arrived, *met[:2], t)
        server, rows = made.receive(state, cohort)
        return State(server, rows, met[2]), met

    for t in range(2):
        state, (payloads, uploads, clients, seen, trained) = one_round(state, jnp.int32(t))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((payloads, uploads)))
        assert near(LAYERS, trees.row((trained, clients), WHO))  # it is seen where it may be
        assert_at_home((payloads, uploads, seen, state.server, state.rows))
        assert_at_home(trees.row((clients, trained), jnp.delete(ids, WHO)))
    assert_at_home(made.observe(state))

    store = checkpoints.open_store(tmp_path)
    store.save(1, {"state": state}, {"round": 1})
    saved = store.restore(1, {"state": jax.eval_shape(lambda: state)})["state"]
    assert near(LAYERS, saved.clients)
    assert_at_home((saved.server, saved.rows))
    text = (tmp_path / "1" / "meta" / "metadata").read_text()
    assert str(int(DATA)) not in text
    assert str(int(LAYERS)) not in text


def test_logs_and_messages_name_a_client_and_show_nothing_of_it():
    made, data, state = marked("fedper")
    federation = tiny.federated()[1]
    rounds = make_rounds(made, federation, cohort=6, max_update_norm=1e-6)
    state, logs = rounds.run(jax.random.key(0), state, data, jnp.int32(0), jnp.int32(1))
    logs = jax.device_get(logs)
    assert_at_home(logs)
    book = ledger.add(ledger.empty(tiny.CLIENTS), logs, 1)
    texts = [
        *metrics.rejections(logs, 0, 1),
        json.dumps([book, metrics.means(metrics.gather(({}, 0), logs, 1))]),
    ]
    assert (
        f"the update of client {WHO} was rejected because it is not finite or too large"
        in texts[WHO]
    )
    assert not any(str(int(mark)) in text for text in texts for mark in (DATA, LAYERS))
