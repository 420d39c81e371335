"""Tests of attacks against formulas, in the contract, and in runs."""

from itertools import pairwise
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from fedjax_pfl import transforms
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, State
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.core.groups import by_group
from fedjax_pfl.runs import build, runner
from fedjax_pfl.settings import configuration
from fedjax_pfl.transforms.attacks import (
    ATTACK,
    ATTACKS,
    attack_uploads,
    attackers,
    joint_attack,
)
from fedjax_pfl.transforms.poisoning import poison, triggered
from tests import cases, rules, tiny
from tests.transforms.privacy.local_level_test import DOWN, UP, scripted

DATA, FEDERATION = tiny.federated()
IS_ATTACKER = np.isin(np.arange(tiny.CLIENTS), [1, 4])
KEY = jax.random.key(2)


def test_attackers_are_a_fixed_part_of_the_active_clients():
    federation = FEDERATION._replace(
        counts=np.ones(40), active=np.arange(40) < 30, groups=np.zeros(40, int)
    )
    masks = [attackers(federation, share, seed=3) for share in (0, 0.1, 0.3, 0.5)]
    assert [int(mask.sum()) for mask in masks] == [0, 3, 9, 15]
    for smaller, larger in pairwise(masks):
        assert (smaller <= larger).all()
    assert not masks[-1][30:].any()
    np.testing.assert_array_equal(masks[2], attackers(federation, 0.3, seed=3))
    assert (masks[2] != attackers(federation, 0.3, seed=4)).any()


def sent(kind: str, client: int, strength: float | None = None, upload: Any = UP) -> Any:
    algorithm = attack_uploads(IS_ATTACKER, kind, strength)(scripted(upload))
    return algorithm.train(DOWN, (), ClientContext(jnp.int32(client), (), 0, KEY)).upload


def test_attacks_on_one_upload_equal_their_formulas():
    """The download is (1, 1) and 2, the change (3, 0) and −4."""
    expected = {("sign_flip", None): [-2, 1, 6], ("sign_flip", 2.0): [-5, 1, 10]}
    expected |= {("scaled_update", None): [31, 1, -38], ("scaled_update", 0.5): [2.5, 1, 0]}
    for (kind, strength), values in expected.items():
        numbers = np.concatenate(jax.tree.leaves(sent(kind, 4, strength)))
        np.testing.assert_allclose(numbers, values, rtol=1e-6)
    for kind in ("sign_flip", "scaled_update", "gaussian"):
        chex.assert_trees_all_equal(sent(kind, 2), UP)  # an honest client
    wide = {"w": jnp.zeros(20_000), "mask": jnp.array([True])}
    noise = sent("gaussian", 1, 3.0, wide)
    np.testing.assert_allclose([noise["w"].std(), noise["w"].mean()], [3, 0], atol=0.06)
    assert noise["mask"].all()
    pair = by_group((scripted(UP), scripted(UP)))
    for train in attack_uploads(IS_ATTACKER, "sign_flip")(pair).train:
        assert train(DOWN, (), ClientContext(jnp.int32(1), (), 0, KEY)).upload["params"]["b"] == 6


def test_joint_attacks_equal_their_formulas():
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    attacks, honest = np.arange(12) < 4, (np.arange(12) >= 4) & (np.arange(12) < 11)
    honest_x = np.float64(x[honest])
    mean, deviation = honest_x.mean(0), honest_x.std(0, ddof=1)
    run = jax.jit(joint_attack, static_argnums=(0, 1))
    # 11 clients arrived, 4 of them attackers: 6 − 4 = 2 helpers among 7 honest clients.
    for strength, z in ((None, norm.ppf(5 / 7)), (1.5, 1.5)):
        value = run("little_is_enough", strength, x, honest, attacks)
        np.testing.assert_allclose(value, mean - z * deviation, rtol=1e-5, atol=1e-6)
    # One attacker of 8 would need 4 helpers among 7: z = Φ⁻¹(3/7) is negative.
    single = run("little_is_enough", None, x, honest, attacks & (np.arange(12) < 1))
    np.testing.assert_allclose(single, mean, atol=1e-6)
    # Four attackers of six are the majority: h = 0.
    few = honest & (np.arange(12) < 6)
    majority = run("little_is_enough", None, x, few, attacks)
    expected = x[few].mean(0) - 4.753 * x[few].std(0, ddof=1)
    np.testing.assert_allclose(majority, expected, rtol=1e-3, atol=1e-3)
    value = np.float64(run("min_max", None, x, honest, attacks))
    largest = max(np.linalg.norm(a - b) for a in honest_x for b in honest_x)
    np.testing.assert_allclose(max(np.linalg.norm(value - a) for a in honest_x), largest, rtol=1e-5)
    factors = (mean - value) / deviation
    np.testing.assert_allclose(factors, factors[0], rtol=1e-4)
    assert factors[0] > 0


@pytest.mark.parametrize("unit", [1e-12, 1e12])
def test_min_max_does_not_depend_on_the_unit(unit: float):
    """In float32, the fourth powers of such numbers are 0 or infinite."""
    x = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    honest = np.arange(5) < 4
    expected = joint_attack("min_max", None, jnp.asarray(x), honest, ~honest)
    value = joint_attack("min_max", None, jnp.asarray(unit * x), honest, ~honest)
    np.testing.assert_allclose(value / unit, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow("programs of every attack")
def test_joint_attacks_replace_the_uploads_of_attackers_that_arrived():
    received = []

    def receive(state: State, cohort: Any) -> Any:
        received.append(cohort.uploads)
        return state.server, state.rows

    base = scripted(UP)._replace(receive=receive)
    ids, arrived = jnp.array([0, 1, 2, 4, 6]), jnp.array([1, 1, 1, 1, 0], bool)
    uploads = {"a": jnp.float32([[1, 2], [9, 9], [3, 2], [8, 8], [7, 7]]), "n": jnp.arange(5)}
    cohort = tiny.cohort(tiny.TRAIN, ids, arrived, (), uploads, 0)
    attack_uploads(IS_ATTACKER, "little_is_enough", 1.0)(base).receive(State((), (), ()), cohort)
    root = np.sqrt(2.0)
    expected = [[1, 2], [2 - root, 2], [3, 2], [2 - root, 2], [7, 7]]
    np.testing.assert_allclose(received[0]["a"], expected, rtol=1e-6)
    np.testing.assert_array_equal(received[0]["n"], np.arange(5))
    only_attackers = cohort._replace(arrived=jnp.array([0, 1, 0, 1, 0], bool))
    attack_uploads(IS_ATTACKER, "min_max")(base).receive(State((), (), ()), only_attackers)
    np.testing.assert_array_equal(received[1]["a"], uploads["a"])
    for kind in ("little_is_enough", "min_max"):  # private layers stay, and change nothing
        attack = attack_uploads(IS_ATTACKER, kind, private={"head"})(base)
        for head in (0.0, 50.0):
            layers = {"a": uploads["a"], "head": -head * jnp.arange(5.0)}
            attack.receive(State((), (), ()), cohort._replace(uploads=layers))
            np.testing.assert_array_equal(received[-1]["head"], layers["head"])
        np.testing.assert_array_equal(received[-1]["a"], received[-2]["a"])
        assert (received[-1]["a"] != uploads["a"]).any()
    no_uploads = cohort._replace(uploads=())  # such as those of Local
    attack_uploads(IS_ATTACKER, "min_max")(base).receive(State((), (), ()), no_uploads)
    assert received[-1] == ()


def images() -> tuple[FederatedData, Any]:
    """Returns three clients with four training and three test images each."""
    x = np.arange(21 * 16, dtype=np.uint8).reshape(21, 4, 4, 1)
    train, test = np.arange(12).reshape(3, 4), np.arange(12, 21).reshape(3, 3)
    empty = Split(np.zeros((3, 1), np.int32), np.zeros(3, np.int32))
    data = FederatedData(
        x=x,
        y=np.arange(21, dtype=np.int32) % 3,
        train=Split(train, np.array([4, 3, 4])),
        validation=empty,
        test=Split(test, np.array([3, 3, 2])),
    )
    federation = FEDERATION._replace(
        counts=np.array([4, 3, 4]), input_shape=(4, 4, 1), outputs=3, active=np.ones(3, bool)
    )
    return data, federation


def test_attacks_on_examples_change_only_those_of_attackers():
    data, federation = images()
    is_attacker = np.array([False, True, False])
    flipped = poison(data, federation, is_attacker, "label_flip")
    expected = data.y.copy()
    expected[4:7] = [1, 0, 2]  # 2 − y of the labels 1, 2, 0
    np.testing.assert_array_equal(flipped.y, expected)
    assert flipped.x is data.x
    backdoor = poison(data, federation, is_attacker, "backdoor", target=2)
    changed = np.flatnonzero((backdoor.x != data.x).any((1, 2, 3)))
    assert len(changed) == 2
    assert set(changed) <= {4, 5, 6}
    for row in changed:
        image, old = backdoor.x[row, ..., 0], data.x[row, ..., 0]
        assert backdoor.y[row] == 2
        assert (image[2:, 2:] == data.x.max()).all()
        np.testing.assert_array_equal(image[:2], old[:2])
        np.testing.assert_array_equal(image[2:, :2], old[2:, :2])
    other_rows = np.setdiff1d(np.arange(21), changed)
    np.testing.assert_array_equal(backdoor.y[other_rows], data.y[other_rows])


def test_triggered_examples_have_another_label_than_the_target():
    data, _ = images()
    test_data = triggered(
        data, np.zeros(3, bool), 0
    )  # labels of the test examples: 0 1 2, 0 1 2, 0 1
    assert test_data.test.size.tolist() == [2, 2, 1]
    assert [test_data.test.rows[i, : test_data.test.size[i]].tolist() for i in range(3)] == [
        [13, 14],
        [16, 17],
        [19],
    ]
    tested = np.arange(12, 20)
    assert not test_data.y[tested].any()
    assert (test_data.x[tested][:, 2:, 2:] == data.x.max()).all()
    np.testing.assert_array_equal(test_data.x[:12], data.x[:12])
    np.testing.assert_array_equal(test_data.y[:12], data.y[:12])


@pytest.mark.parametrize("kind", ["label_flip", "backdoor"])
def test_attacks_leave_examples_that_other_clients_share(kind: str):
    """Clients 0 and 1 have the same training examples; client 2 is tested on those, and on 12."""
    data, federation = images()
    rows = np.array([[0, 1, 2, 3], [3, 2, 1, 0], [8, 9, 10, 11]])
    test = Split(np.array([[13, 14, 15], [13, 14, 15], [0, 1, 12]]), np.array([3, 3, 3]))
    data = data._replace(train=Split(rows, np.array([4, 4, 4])), test=test)
    is_attacker = np.array([True, False, False])
    changed = poison(data, federation, is_attacker, kind, target=1)
    test_data = triggered(data, is_attacker, 1)
    chex.assert_trees_all_equal_shapes(changed, test_data)
    for new, split, clients in ((changed, "train", (1, 2)), (changed, "test", (0, 1, 2))):
        old_rows, new_rows = getattr(data, split).rows, getattr(new, split).rows
        for i in clients:
            np.testing.assert_array_equal(new.x[new_rows[i]], data.x[old_rows[i]])
            np.testing.assert_array_equal(new.y[new_rows[i]], data.y[old_rows[i]])
    copies = changed.train.rows[0]
    assert min(copies) >= len(data.y)
    if kind == "label_flip":
        np.testing.assert_array_equal(changed.y[copies], 2 - data.y[rows[0]])
    else:
        assert (changed.x[copies] != data.x[rows[0]]).any((1, 2, 3)).sum() == 2
    for i in range(3):  # training examples have no trigger, test examples have
        np.testing.assert_array_equal(test_data.x[test_data.train.rows[i]], data.x[rows[i]])
        assert (test_data.y[test_data.test.rows[i, : test_data.test.size[i]]] == 1).all()


def test_unsuitable_examples_are_refused():
    data, federation = images()
    mask = np.array([True, False, False])
    with pytest.raises(UsageError, match="attack_target is 3; choose a class from 0 to 2"):
        poison(data, federation, mask, "backdoor", 3)
    task = federation.task._replace(metrics=federation.task.metrics[1:])
    with pytest.raises(UsageError, match="attack=backdoor is scored by accuracy; add it to metric"):
        poison(data, federation._replace(task=task), mask, "backdoor")
    with pytest.raises(UsageError, match="attack=label_flip needs examples with one class each"):
        poison(data._replace(y=np.float32(data.y)), federation, mask, "label_flip")
    with pytest.raises(UsageError, match="attack=label_flip needs clients with the same classes"):
        poison(data._replace(classes=np.ones((3, 3), bool)), federation, mask, "label_flip")
    domains = data._replace(label_map=np.tile([0, 1, 2, 0, 1, 2], (3, 1)))
    for kind in ("label_flip", "backdoor"):
        with pytest.raises(UsageError, match=f"attack={kind} needs clients with the same classes"):
            poison(domains, federation, mask, kind)
    permuted = data._replace(label_map=np.array([[0, 1, 2], [2, 0, 1], [1, 2, 0]]))
    assert (poison(permuted, federation, mask, "label_flip").y != data.y).any()
    with pytest.raises(UsageError, match="attack=backdoor needs images"):
        poison(DATA, FEDERATION, IS_ATTACKER, "backdoor")
    with pytest.raises(UsageError, match="kind is 'label_flip'; choose sign_flip, scaled_update"):
        attack_uploads(IS_ATTACKER, "label_flip")


def test_arguments_out_of_range_are_refused():
    with pytest.raises(UsageError, match=r"share is -0.1; it must be from 0 to 1"):
        attackers(FEDERATION, -0.1)
    with pytest.raises(UsageError, match="strength is 0; it must be above 0"):
        attack_uploads(IS_ATTACKER, "sign_flip", 0)
    with pytest.raises(UsageError, match="min_max has no strength; leave it out"):
        attack_uploads(IS_ATTACKER, "min_max", 2.0)


def test_settings_select_the_transform():
    defaults = {name: s.default_value for name, s in ATTACK.settings.items()}
    context = transforms.TransformContext(tiny.Net(), FEDERATION, DATA, {})

    def make(**settings: Any) -> Any:
        return ATTACK.make(
            {"partition_seed": 0, "keep_head": False, **defaults, **settings}.__getitem__, context
        )

    assert make() is None
    for kind in ATTACKS:
        assert make(attack=kind, attack_share=0.0) is None
        assert (make(attack=kind) is None) == (kind in ("label_flip", "backdoor"))


RUN = {
    "dataset": "digits",
    "partition": "iid",
    "fraction": 0.3,
    "model": "mlp",
    "mlp": {"hidden": (8,)},
    "clients": 5,
    "rounds": 4,
    "eval_every": 2,
    "learning_rate": 0.3,
    "chunk": 5,
}


def test_attackers_of_each_phase_are_those_whose_examples_are_changed():
    """Held-out clients that take part in a later phase have attackers of their own."""
    phases = ({"rounds": 1}, {"rounds": 1, "participants": "held_out"})
    config = {**RUN, "clients": 10, "held_out": 4, "phases": phases, "algorithm": "fedavg"}
    honest, attacked = (
        build.build(configuration.complete({**config, **settings}))
        for settings in ({}, {"attack": "label_flip", "attack_share": 0.5})
    )
    y = np.asarray(honest.data.y)
    for phase, expected in zip(attacked.phases, (3, 2), strict=True):
        arrays = phase.inputs.arrays
        changed = [
            np.any(np.asarray(arrays.y)[rows[:size]] != y[rows[:size]])
            for rows, size in zip(arrays.train.rows, arrays.train.size, strict=True)
        ]
        np.testing.assert_array_equal(phase.inputs.is_attacker, changed)
        assert sum(phase.federation.active & changed) == expected


@pytest.mark.slow("several runs")
def test_runs_report_honest_clients_and_the_success_of_a_backdoor(tmp_path):
    reference = runner.run(RUN)
    no_attackers = runner.run({**RUN, "attack": "gaussian", "attack_share": 0.0})
    chex.assert_trees_all_equal(reference.state, no_attackers.state)
    assert reference.clients == no_attackers.clients
    settings = {"attack": "gaussian", "attack_share": 0.4, "attack_strength": 1e3}
    weak = runner.run({**RUN, **settings})
    strong = runner.run({**RUN, **settings, "robust_rule": "krum", "robust_share": 0.4}, tmp_path)
    scores = [run.metrics[-1]["before"]["accuracy_mean"] for run in (weak, strong)]
    assert scores[0] < 0.3 < 0.4 < scores[1]
    assert strong.metrics[-1]["before"]["clients"] == 3
    rows = strong.clients
    assert [row["attacker"] for row in rows].count(1) == 2
    assert all(row["trust"] == 0 for row in rows if row["attacker"])
    assert sum(row["trust"] for row in rows) == pytest.approx(1)
    honest = [row["before_accuracy"] for row in rows if not row["attacker"]]
    assert np.mean(honest) == pytest.approx(scores[1])
    report = (tmp_path / "report.html").read_text()
    assert "Attackers, left out of all means: 2." in report


@pytest.mark.slow("several runs")
@pytest.mark.parametrize("store", ["device", "host"])
def test_the_success_of_a_backdoor(store: str):
    settings = {"attack": "backdoor", "attack_target": 3, "attack_share": 0.4, "store": store}
    run = runner.run({**RUN, **settings, "rounds": 16, "eval_every": 16, "mlp": {"hidden": (32,)}})
    last = run.metrics[-1]
    assert last["before"]["accuracy_mean"] > 0.7
    assert last["attack_success"]["before"] > 0.5
    assert {"before_attack_success", "after_attack_success"} <= set(run.clients[0])
    same = [row["before_attack_success"] for row in run.clients if not row["attacker"]]
    assert np.mean(same) == pytest.approx(last["attack_success"]["before"])


@pytest.fixture(scope="module", params=["sign_flip", "min_max"])
def around_fedavg(request: Any) -> rules.Subject:
    def make(federation: Any, settings: Any = cases.NOTHING) -> Algorithm:
        return transforms.chain(
            cases.make("fedavg", federation, settings),
            transforms.robust(federation, DATA, "median"),
            attack_uploads(IS_ATTACKER, request.param),
        )

    return rules.make_subject("fedavg", cases.CASES["fedavg"], make)


@pytest.mark.slow("the contract once more, around several methods")
@pytest.mark.parametrize("rule", [rule.__name__ for rule in rules.rules.RULES])
def test_attacks_satisfy_the_contract(rule: str, around_fedavg: rules.Subject):
    rules.BY_NAME[rule](around_fedavg)
