"""Tests that settings without effect are refused."""

import numpy as np
import pytest

import fedjax_pfl
from fedjax_pfl.runs.tuning.search import plan, tune
from fedjax_pfl.settings import configuration, selection
from tests.commands import message

SMALL_MLP = {"mlp": {"hidden": (3,)}}


def check(settings):
    selection.check_used(settings, [configuration.complete(settings)])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"dirichlet": {"alpha": 0.1}},
            "dirichlet.alpha counts with partition=dirichlet only, and partition is classes; set "
            "partition to dirichlet, or leave dirichlet.alpha out",
        ),
        ({"fedprox": {"mu": 0.1}}, "fedprox.mu counts with algorithm=fedprox only"),  # the default
        ({"mlp": {"hidden": (3,)}}, "mlp.hidden counts with model=mlp only, and model is small"),
        (
            {"fedprox": {"mu": 0.7}, "phases": [{}, {"algorithm": "local"}]},
            "algorithm=fedprox only, and algorithm is fedavg or local",
        ),
        (
            {"phases": [{"algorithm": "fedprox"}, {"fedprox": {"mu": 0.7}}]},
            "phases[1].fedprox.mu counts with algorithm=fedprox only, and algorithm is fedavg; set "
            "phases[1].algorithm to fedprox",
        ),
        (
            {"groups": [{"model": "mlp"}, {"mlp": {"hidden": (3,)}}]},
            "groups[1].mlp.hidden counts with model=mlp only, and model is small",
        ),
        (
            {"optimizer": "adam", "weight_decay": 0.1},
            "weight_decay counts with optimizer=sgd or adamw only, and optimizer is adam; change "
            "optimizer, or leave weight_decay out",
        ),
        ({"b1": 0.5}, "b1 counts with optimizer=adam or adamw only, and optimizer is sgd"),
        (
            {"privacy": "local", "privacy_bands": 2},
            "privacy_bands counts with privacy=client only, and privacy is local; change privacy",
        ),
        (
            {"optimizer": "adamw", "phases": [{}, {"momentum": 0.5}]},
            "phases[1].momentum counts with optimizer=sgd or rmsprop only, and optimizer is adamw",
        ),
        (
            {"local_steps": 5, "drop_last": True},
            "drop_last counts with local_steps=unset only, and local_steps is 5; change "
            "local_steps, or leave drop_last out",
        ),
        ({"server_learning_rate": 0.5}, "and server_optimizer is mean; change server_optimizer"),
        (
            {"robust_share": 0.3, "robust_rule": "median"},
            "robust_share counts with robust_rule=trimmed_mean or krum or multi_krum or "
            "robust_mixing=True only, and robust_rule is median; change robust_rule",
        ),
        (
            {"learning_rate": 0.2, "phases": [{"learning_rate": 0.1}, {"learning_rate": 0.3}]},
            "learning_rate has no effect, because every phase sets it; set it in the phases, or",
        ),
        (
            {"algorithm": "fedprox", "fedprox": {"mu": 0.2}, "phases": [{"fedprox": {"mu": 0.1}}]},
            "fedprox.mu has no effect, because every phase sets it; set it in the phases, or",
        ),
        (
            {"model": "mlp", "mlp": {"hidden": (9,)}, "groups": [SMALL_MLP, SMALL_MLP]},
            "mlp.hidden has no effect, because every group sets it; set it in the groups, or",
        ),
    ],
)
def test_settings_without_effect_are_refused(settings, line):
    assert line in message(check, settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"fedprox": {}},
        {"optimizer": "adam", "weight_decay": 0.0},  # the default of a setting that counts with sgd
        {"algorithm": "fedprox", "fedprox": {"mu": 0.7}},
        {"fedprox": {"mu": 0.7}, "phases": [{"rounds": 2}, {"algorithm": "fedprox"}]},
        {"phases": [{"rounds": 2}, {"algorithm": "fedprox", "fedprox": {"mu": 0.7}}]},
        {"groups": [{}, {"model": "mlp", "mlp": {"hidden": (3,)}}]},
        {"mlp": {"hidden": (3,)}, "groups": [{}, {"model": "mlp"}]},
        {"robust_share": 0.3, "robust_rule": "krum"},
        {"robust_share": 0.3, "robust_mixing": True},
        {"weight_decay": 0.1, "b1": 0.5, "phases": [{}, {"optimizer": "adam"}]},
        {"server_optimizer": "yogi", "server_b2": 0.5},
        {"learning_rate": 0.2, "phases": [{"learning_rate": 0.1}, {}]},
        {"model": "mlp", "mlp": {"hidden": (9,)}, "groups": [SMALL_MLP, {}]},
        {"model": "mlp", "mlp": {"hidden": [200]}, "groups": [SMALL_MLP, SMALL_MLP]},  # the default
    ],
)
def test_settings_with_effect_pass(settings):
    check(settings)


def test_setting_of_one_of_several_methods_passes():
    settings = {"fedprox": {"mu": 0.7}}
    configs = [configuration.complete({**settings, "algorithm": a}) for a in ("local", "fedprox")]
    selection.check_used(settings, configs)
    assert "algorithm is local;" in message(selection.check_used, settings, configs[:1])


def test_dotted_names_are_groups():
    settings = {"rounds": 3, "pfedla.rate": 0.1, "pfedla.k": 1, "phases[0].rounds": 2}
    assert selection.nested(settings) == {"rounds": 3, "pfedla": {"rate": 0.1, "k": 1}}


def test_unused_owners_are_refused():
    x, y = np.zeros((8, 2, 2, 1)), np.arange(8) % 2
    dataset = fedjax_pfl.arrays(x, y, owners=np.arange(8) // 4, name="ours")
    line = (
        "the owners of ours count with partition=natural or split_owners only, and partition is "
        "iid; set partition to natural, or leave owners out"
    )
    assert message(lambda: fedjax_pfl.run({"partition": "iid"}, dataset=dataset)) == line


def test_run_and_tune_refuse_settings_without_effect(tmp_path):
    settings = {"dirichlet": {"alpha": 0.1}}
    line = "dirichlet.alpha counts with partition=dirichlet only"
    assert message(fedjax_pfl.run, settings, tmp_path / "run").startswith(line)
    grid = {"learning_rate": [0.1]}
    assert message(tune, settings, grid, tmp_path / "tune").startswith(line)
    assert not any(tmp_path.iterdir())


def plan_grid(grid, budget=None, **settings):
    config = configuration.complete({"validation_fraction": 0.2, **settings})
    return plan({config.algorithm: config}, [grid], None, budget)


@pytest.mark.parametrize(
    ("grid", "settings", "line"),
    [
        ("b1=0.8,0.9", {}, "b1 counts with optimizer=adam or adamw only, and optimizer is sgd; "),
        ("momentum=0.9", {"optimizer": "adam"}, "momentum counts with optimizer=sgd or rmsprop"),
        ("momentum=0,.9; optimizer=adam,adamw", {}, "and optimizer is adam or adamw; "),
        ("fedavg.schedule_end=.1", {}, "schedule_end counts with learning_rate_schedule=linear"),
        ("server_b1=.5,.8; learning_rate=.1,.2", {}, "server_b1 counts with server_optimizer="),
    ],
)
def test_grids_refuse_settings_without_effect(grid, settings, line):
    text = message(lambda: plan_grid(grid, **settings))
    assert text.startswith("the grid of fedavg: ")
    assert line in text


@pytest.mark.parametrize(
    ("grid", "settings"),
    [
        ("optimizer=sgd,adam; momentum=0,.9", {}),
        ("optimizer=sgd,adam; b1=.8,.9", {"phases": [{"momentum": 0.9}, {}]}),
        ("momentum=0", {"optimizer": "adam"}),  # the default
        ("momentum=.9", {"phases": [{"optimizer": "adam"}, {}]}),
    ],
)
def test_grids_may_have_settings_with_effect_at_some_points(grid, settings):
    """The sample of one point need not be among those points."""
    (trial,) = plan_grid(grid, budget=1, **settings)
    assert len(trial.points) == 1
