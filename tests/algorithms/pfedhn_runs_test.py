"""Runs of pFedHN: memory of embeddings, and held-out clients."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fedjax_pfl.core.algorithm import ClientContext
from fedjax_pfl.runs import build, checkpoints, runner
from fedjax_pfl.settings import configuration

KEY = jax.random.key(5)
T = jnp.int32(0)
SMALL = {
    "dataset": "synthetic",
    "synthetic": {"examples": 60, "test_examples": 30, "shape": (2, 2, 1), "classes": 3},
    "partition": "iid",
    "model": "mlp",
    "mlp": {"hidden": (3,)},
    "clients": 6,
    "clients_per_round": 1,
    "local_steps": 2,
    "batch_size": 4,
    "learning_rate": 0.1,
    "eval_every": 4,
    "rounds": 4,
    "devices": 1,
    "evaluate_after": False,
}


@pytest.mark.parametrize(
    ("clients", "settings", "length", "message"),
    [
        (399, {}, 100, ""),  # 1 + 99, the width of the first layer
        (400, {}, 101, "0.3 MB with their momentum; pfedhn.embedding=100 needs 0.3 MB"),
        (2000, {"width": 0}, 501, "8.0 MB with their momentum"),
        (400, {"embedding": 3}, 3, ""),
        (400, {"fixed": True}, 3, ""),  # shares of three classes
    ],
)
def test_length_of_embeddings_and_the_remark_on_their_memory(clients, settings, length, message):
    """Uses shapes only, without compilation."""
    changes = {"algorithm": "pfedhn", "clients": clients, "pfedhn": settings}
    examples = {**SMALL["synthetic"], "examples": 4000, "test_examples": 0}
    config = configuration.complete({**SMALL, **changes, "synthetic": examples})
    built = build.build(config)
    state = jax.eval_shape(built.phases[0].rounds.init, KEY)
    assert state.rows.v.shape == (clients, length)
    start = f"embeddings of {clients:,} clients have {length} numbers each, "
    assert built.remarks == ((start + message,) if message else ())


def test_clients_of_a_frozen_phase_may_have_simulated_time():
    """The steps of a round are counted from shapes, without the state of the earlier phase."""
    phases = ({}, {"participants": "held_out", "pfedhn": {"frozen": True}})
    changes = {"algorithm": "pfedhn", "held_out": 2, "phases": phases, "step_seconds": 0.1}
    config = configuration.complete({**SMALL, **changes, "pfedhn": {"width": 4, "depth": 1}})
    assert [phase.begin for phase in build.build(config).phases] == [0, 4]


@pytest.mark.slow("a run of two phases")
def test_held_out_clients_are_fitted_with_a_frozen_hypernetwork(tmp_path: Path):
    settings = {"width": 4, "depth": 1, "spectral_norm": True}
    phases = ({}, {"participants": "held_out", "pfedhn_pc": {"frozen": True}})
    run = runner.run(
        {**SMALL, "algorithm": "pfedhn_pc", "held_out": 2, "pfedhn_pc": settings, "phases": phases},
        tmp_path,
    )
    after = jax.device_get(run.state)
    template = jax.eval_shape(run.phases[0].rounds.init, KEY)
    store = checkpoints.open_store(tmp_path / "checkpoints")
    before = store.restore(SMALL["rounds"], {"state": template})["state"]
    chex.assert_trees_all_equal(before.server.phi, after.server.phi)
    chex.assert_trees_all_equal(before.server.spectral, after.server.spectral)
    parts = [jax.tree.leaves((state.rows, state.clients.personal)) for state in (before, after)]
    for old, new in zip(*parts, strict=True):
        np.testing.assert_array_equal(old[:4], new[:4])
        assert (old[4:] != new[4:]).any()
    client_updates = np.array(run.ledger.client_updates)
    assert client_updates[:4].sum() == client_updates[4:].sum() == SMALL["rounds"]
    np.testing.assert_array_equal((before.rows.v != after.rows.v).any(1)[4:], [True] * 2)
    # The spread is the distance of the sent bodies from their mean, relative to its length.
    server_state = run.state._replace(clients=())
    sent = [
        run.phases[1].algorithm.send(server_state, ClientContext(jnp.int32(i), None, T, KEY))
        for i in range(6)
    ]
    flat = np.stack([ravel_pytree(model)[0] for model in sent])
    lengths = np.linalg.norm(flat - flat.mean(0), axis=1) / np.linalg.norm(flat.mean(0))
    np.testing.assert_allclose(run.observations["spread"][1][-1], lengths, rtol=1e-5)
    assert lengths.min() > 0
    # The metrics of a phase are those of its participants.
    rows = [client["before_accuracy"] for client in run.clients]
    assert run.metrics[-1]["before"]["accuracy_mean"] == pytest.approx(np.mean(rows[4:]))
