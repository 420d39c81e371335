"""pFedHN of linear networks finds their principal components (Proposition 1)."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.simulation.rounds import make_rounds
from tests.algorithms import linear

KEY = jax.random.key(5)
T = jnp.int32(0)


def test_proposition_1():
    """θ_i = W v_i on clients with XᵀX = m·I: W spans the first components of uncentred PCA."""
    rng = np.random.default_rng(4)
    d, k, clients, m = 5, 2, 6, 8
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    solutions = rng.normal(size=(clients, d)) * [3.0, 2.0, 0.6, 0.4, 0.2] @ basis.T + 0.5
    xs = [np.linalg.qr(rng.normal(size=(m, d)))[0] * m**0.5 for _ in range(clients)]
    data, federation = linear.federated(xs, [x @ w for x, w in zip(xs, solutions, strict=True)])
    training = local_training.sgd(learning_rate=0.5, batch_size=m, steps=1)
    algorithm = algorithms.pfedhn(
        linear.Linear(),
        training,
        federation,
        width=0,
        embedding=k,
        rate=0.02,
        weight_decay=0.0,
        clip_norm=1e9,
    )
    calls = 1500
    rounds = make_rounds(algorithm, federation, cohort=clients, max_rounds=calls)
    state, _ = rounds.run(KEY, rounds.init(KEY), data, T, jnp.int32(calls))
    (head,) = state.server.phi.values()
    assert set(head) == {"kernel"}
    spanned = np.linalg.qr(np.asarray(head["kernel"], np.float64).T)[0]
    generated = np.asarray(state.rows.v) @ np.asarray(head["kernel"])

    def distance(points: np.ndarray) -> float:
        components = np.linalg.svd(points)[2][:k].T
        return float(np.linalg.norm(spanned @ spanned.T - components @ components.T, 2))

    assert distance(solutions) < 1e-3
    assert distance(solutions - solutions.mean(0)) > 0.05  # not the centred one
    left, sigma, right = np.linalg.svd(solutions, full_matrices=False)
    np.testing.assert_allclose(generated, left[:, :k] * sigma[:k] @ right[:k], atol=5e-3)
