"""Tests of robust aggregation against NumPy, with attackers, and in the contract."""

from functools import partial
from itertools import pairwise
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import transforms
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.transforms.robust import ROBUST, RULES, Aggregate, Uploads, mix, robust, tolerated
from fedjax_pfl.transforms.server_optimizer import server_optimizer
from tests import cases, rules, tiny
from tests.transforms.server_optimizer_test import SUPPORTED, builtin, toy

DATA, FEDERATION = tiny.federated()
SLOTS, SIZE, STEPS = 9, 5, 4


# Each rule once more in float64, with loops, on the uploads that arrived.


def mean_without_extremes(x: Any, f: int) -> Any:
    return np.stack([np.mean(np.sort(column)[f : len(x) - f]) for column in x.T])


def krum_sums(x: Any, f: int) -> list[float]:
    sums = []
    for i in range(len(x)):
        others = sorted(float(np.sum((x[i] - x[j]) ** 2)) for j in range(len(x)) if j != i)
        sums.append(sum(others[: max(len(x) - f - 2, 1)]))
    return sums


def best(x: Any, f: int, count: int) -> Any:
    return np.mean(x[np.argsort(krum_sums(x, f))[:count]], 0)


def weiszfeld(x: Any) -> Any:
    value = np.median(x, 0)
    for _ in range(STEPS):
        weights = [1 / max(np.linalg.norm(row - value), 1e-6) for row in x]
        value = sum(w * row for w, row in zip(weights, x, strict=True)) / sum(weights)
    return value


def clipped(x: Any, start: Any, norm: float | None, steps: int) -> Any:
    for _ in range(steps):
        norms = [np.linalg.norm(row - start) for row in x]
        limit = np.median(norms) if norm is None else norm
        factors = [limit / n if n > limit else 1 for n in norms]
        start = start + np.mean([(r - start) * c for r, c in zip(x, factors, strict=True)], 0)
    return start


def neighbours(x: Any, f: int) -> Any:
    order = [np.argsort([np.linalg.norm(row - other) for other in x]) for row in x]
    return np.stack([np.mean(x[o[: len(x) - f]], 0) for o in order])


def oracle(rule: str, x: Any, start: Any, f: int, norm: float | None) -> Any:
    return {
        "mean": lambda: np.mean(x, 0),
        "median": lambda: np.median(x, 0),
        "trimmed_mean": lambda: mean_without_extremes(x, f),
        "krum": lambda: best(x, f, 1),
        "multi_krum": lambda: best(x, f, len(x) - f),
        "geometric_median": lambda: weiszfeld(x),
        "norm_clipping": lambda: clipped(x, start, norm, 1),
        "centred_clipping": lambda: clipped(x, start, norm, STEPS),
    }[rule]()


@partial(jax.jit, static_argnames=("rule", "norm", "mixing"))
def run_rule(
    rule: str, norm: float | None, mixing: bool, x: Any, arrived: Any, start: Any, f: Any
) -> Aggregate:
    filled = jnp.where(arrived[:, None], x, start[None])
    uploads = Uploads(x=filled, arrived=arrived, start=start, f=f, norm=norm, steps=STEPS)
    return RULES[rule](mix(uploads)[0] if mixing else uploads)


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("norm", [None, 1.5])
@pytest.mark.parametrize("rule", RULES)
def test_rules_equal_numpy(rule: str, norm: float | None, mixing: bool):
    if norm and "clipping" not in rule:
        return
    rng = np.random.default_rng(3)
    for m in (1, 2, 5, 8, 9):
        for f in {0, 1, (m - 1) // 2}:
            if 2 * f >= m:
                continue
            arrived = np.isin(np.arange(SLOTS), rng.permutation(SLOTS)[:m])
            x = rng.normal(size=(SLOTS, SIZE)).astype(np.float32)
            start = rng.normal(size=SIZE).astype(np.float32)
            garbage = np.where(arrived[:, None], x, np.nan)
            value, trust = run_rule(rule, norm, mixing, garbage, arrived, start, jnp.int32(f))
            present = np.float64(x[arrived])
            expected = oracle(
                rule, neighbours(present, f) if mixing else present, np.float64(start), f, norm
            )
            np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-6, err_msg=f"{m} {f}")
            assert not np.asarray(trust)[~arrived].any()
            assert 0 < np.max(trust) <= 1
            assert np.min(trust) >= 0


def test_clients_that_arrive_determine_f():
    arrived = jnp.arange(10)[None] < jnp.array([1, 2, 3, 9, 10])[:, None]
    counts = [[int(f) for f in jax.vmap(partial(tolerated, share=s))(arrived)] for s in (0.3, 0.49)]
    assert counts == [[0, 0, 1, 3, 3], [0, 0, 1, 4, 4]]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "mean"])
@pytest.mark.parametrize("huge", [1e3, -1e8, 1e20])  # squares of the last overflow
@pytest.mark.parametrize("attackers", [[4, 7], [4]])  # alone, all its distances overflow
@pytest.mark.parametrize("absent", [[], [0, 1, 2]])
def test_huge_uploads_of_tolerated_attackers_have_little_effect(
    rule: str, huge: float, attackers: list[int], absent: list[int]
):
    x = np.random.default_rng(1).normal(size=(SLOTS, SIZE)).astype(np.float32)
    x[attackers] = huge
    honest = np.delete(x, attackers + absent, 0)
    arrived = ~np.isin(np.arange(SLOTS), absent)
    for mixing in (False, True) if "clipping" not in rule else (False,):
        value, trust = run_rule(rule, None, mixing, x, arrived, jnp.zeros(SIZE), jnp.int32(2))
        width = 1 if "clipping" in rule or rule == "geometric_median" else 0
        assert (value >= honest.min(0) - width).all()
        assert (value <= honest.max(0) + width).all()
        if not mixing:
            assert trust[4] <= 0.5 * np.max(trust)
    assert np.isfinite(value).all()


def test_a_client_that_uploads_its_download_does_not_stop_the_geometric_median():
    x = np.random.default_rng(5).normal(1, 0.3, (SLOTS, SIZE)).astype(np.float32)
    start = np.zeros(SIZE, np.float32)
    x[0] = start
    everyone = jnp.ones(SLOTS, bool)
    value, trust = run_rule("geometric_median", None, False, x, everyone, start, jnp.int32(2))

    def sum_of_distances(point: Any) -> Any:
        return np.sum(np.linalg.norm(x - np.asarray(point), axis=1))

    assert sum_of_distances(value) < min(map(sum_of_distances, (x.mean(0), start)))
    assert trust[0] < 0.5 * np.max(trust)


def test_settings_select_the_transform():
    defaults = {name: s.default_value for name, s in ROBUST.settings.items()}
    context = transforms.TransformContext(tiny.Net(), FEDERATION, DATA, {})

    def make(**settings: Any) -> Any:
        return ROBUST.make({**defaults, **settings}.__getitem__, context)

    assert make() is None
    assert make(robust_share=0.4) is None
    for settings in ({"robust_rule": "krum"}, {"robust_mixing": True}):
        assert set(make(**settings)(toy()).observe(State(_record(), (), ()))) == {
            "w",
            "client_trust",
        }


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"rule": "foo"}, "rule is 'foo'; choose mean, "),
        ({"share": 0.9}, "share is 0.9; it must be at least 0 and below 0.5"),
        ({"norm": 0}, "norm is 0; it must be above 0"),
        ({"steps": 0}, "steps is 0; it must be an integer, at least 1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], line: str):
    with pytest.raises(UsageError, match=line):
        robust(FEDERATION, DATA, **{"rule": "krum", **arguments})


def _record() -> Any:
    return robust(FEDERATION, DATA, "krum")(toy()).init(jax.random.key(0)).server


@pytest.mark.slow("builds every method")
@pytest.mark.parametrize("name", cases.NAMES)
def test_unsupported_methods_are_refused(name: str):
    transform = robust(FEDERATION, DATA, "median")
    if name in SUPPORTED:
        transform(cases.make(name, FEDERATION))
        return
    with pytest.raises(UsageError, match=r"^robust_rule is for methods whose server [^\n]+$"):
        transform(cases.make(name, FEDERATION))
    with pytest.raises(UsageError, match="robust_rule is for one architecture"):
        transform(by_group((toy(), toy())))


def test_the_server_gets_the_aggregate_and_counts_what_was_used():
    algorithm = robust(FEDERATION, DATA, "krum", share=0.4)(toy())
    state = algorithm.init(jax.random.key(0))
    assert np.isnan(algorithm.observe(state)["client_trust"]).all()
    payload = algorithm.send(state, None)
    changes = np.float32([0.0, 5.0, 0.1, 99.0, -0.3])
    uploads = jax.tree.map(lambda w: np.asarray(w) + changes.reshape(5, *(1,) * w.ndim), payload)
    payloads = jax.tree.map(lambda w: jnp.stack([w] * 5), payload)
    ids, arrived = jnp.array([0, 1, 2, 6, 4]), jnp.array([1, 1, 1, 0, 1], bool)
    cohort = tiny.cohort(tiny.TRAIN, ids, arrived, payloads, uploads, 0)
    for _ in range(2):
        server, rows = algorithm.receive(state, cohort)
        state = State(server, rows, ())
    chex.assert_trees_all_equal(server.method, jax.tree.map(lambda leaf: leaf[0], uploads))
    trust = algorithm.observe(state)["client_trust"]
    np.testing.assert_array_equal(trust, [1, 0, 0, np.nan, 0, np.nan])


@pytest.mark.slow("a program for each server")
@pytest.mark.parametrize("rule", RULES)
def test_models_in_bfloat16_are_aggregated_in_float32(rule: str):
    changes = np.float32([[1, 0, 0.5], [3, 1, -2], [0, 2, 1.5], [9, -8, 4], [2, 1, 1]])

    def aggregated(dtype: Any) -> jax.Array:
        first = {"params": {"w": jnp.zeros(3, dtype)}}
        method = toy()._replace(init=lambda key, start=None: State(first, (), ()))
        algorithm = robust(FEDERATION, DATA, rule, mixing=rule == "mean")(method)
        state, ids = algorithm.init(jax.random.key(0)), jnp.arange(5)
        payloads, uploads = trees.repeat(first, 5), {"params": {"w": jnp.asarray(changes, dtype)}}
        cohort = tiny.cohort(tiny.TRAIN, ids, ids >= 0, payloads, uploads, 0)
        return algorithm.receive(state, cohort)[0].method["params"]["w"]

    expected = aggregated(jnp.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(aggregated(jnp.bfloat16), expected)


# Around FedPer, with other transforms, in the contract


@pytest.fixture(scope="module", params=["median", "multi_krum"])
def around_fedper(request: Any) -> rules.Subject:
    def make(federation: Any, settings: Any = cases.NOTHING) -> Algorithm:
        return transforms.chain(
            cases.make("fedper", federation, settings),
            transforms.compression(federation, DATA, bits=8),
            server_optimizer(DATA, builtin("adam", server_learning_rate=0.05)),
            robust(federation, DATA, request.param, mixing=request.param == "multi_krum"),
        )

    def fired(first: State, last: State) -> bool:
        pairs = pairwise((first.server.trust, last.server.trust))
        return all(bool((a != b).any()) for a, b in pairs)

    return rules.make_subject("fedper", cases.Case({}, fired, lambda _: (0, 0)), make)


@pytest.mark.slow("the contract once more, around several methods")
@pytest.mark.parametrize("rule", [rule.__name__ for rule in rules.RULES])
def test_robust_rules_satisfy_the_contract(rule: str, around_fedper: rules.Subject):
    if rule != "bytes_match_the_closed_formula":
        rules.BY_NAME[rule](around_fedper)
