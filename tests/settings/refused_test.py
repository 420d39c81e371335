"""Tests of the messages about invalid settings."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import fedjax_pfl
from fedjax_pfl.settings.general import SETTINGS
from tests import commands
from tests.settings.configuration_test import TINY, built, message

LOCAL = {"privacy": "local", "privacy_clip_norm": 1.0, "privacy_noise": 1.0}
BANDS = {
    **LOCAL,
    "privacy": "client",
    "privacy_bands": 3,
    "sampling": "cyclic",
    "clients_per_round": 1,
}
RANDOM = {**LOCAL, "privacy": "client", "clients_per_round": 1}


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        # Unknown names get a suggestion.
        ({"learning_rte": 0.1}, ["learning_rte", "did you mean learning_rate?"]),
        ({"synthetic": {"noize": 0.1}}, ["synthetic.noize", "did you mean synthetic.noise?"]),
        ({"phases": [{"roundz": 3}]}, ["roundz", "did you mean rounds?"]),
        ({"phases": [{"clients": 3}]}, ["phase cannot change clients"]),
        ({"phases": [{"synthetic": {"noise": 2.0}}]}, ["phase cannot change synthetic"]),
        (
            {"phases": [{"mlp": {"hiden": (2,)}}]},
            ["phases[0].mlp.hiden", "did you mean phases[0].mlp.hidden?"],
        ),
        ({"phases": [3]}, ["phases[0]", "rounds=10"]),
        ({"groups": [{"rounds": 3}]}, ["groups[0]", "model"]),
        ({"groups": None}, ["groups is None; it must be"]),
        ({"phases": None}, ["phases is None; it must be"]),
        ({"groups": [{}, {"model": "mpl"}]}, ["'mpl'", "did you mean mlp?"]),
        ({"algorithm": "fedagv"}, ["'fedagv'", "did you mean fedavg?"]),
        ({"algorithm": "LG-FedAvg"}, ["'LG-FedAvg'", "did you mean lg_fedavg?"]),
        ({"algorithm": "zzzzz"}, ["'zzzzz'", "the nearest of"]),
        ({"lr": 1}, ["no setting lr; did you mean learning_rate?"]),
        ({"num_clients": 1}, ["no setting num_clients; did you mean clients?"]),
        (
            {"partition": "dirichlet", "alpha": 0.3},
            ["clusters, dirichlet,", "write dirichlet.alpha", "{'dirichlet': {'alpha': VALUE}}"],
        ),
        ({77: 2}, ["there is no setting 77; the nearest of"]),
        ({"conv": "blobs"}, ["'blobs'", "did you mean blocks?"]),
        # Wrong types.
        ({"rounds": "many"}, ["rounds is 'many'", "int"]),
        ({"rounds": True}, ["rounds is True", "int"]),
        ({"rounds": None}, ["rounds is None", "int"]),
        ({"learning_rate": "fast"}, ["learning_rate is 'fast'", "float"]),
        ({"keep_optimizer": "yes"}, ["keep_optimizer is 'yes'", "bool"]),
        ({"algorithm": None}, ["algorithm"]),
        ({"clients_per_round": 1.5}, ["clients_per_round is 1.5", "int"]),
        ({"synthetic": 3}, ["synthetic is a group of settings", "{'synthetic': {NAME: VALUE}}"]),
        ({"synthetic.noise": 3.0}, ["synthetic.noise; write {'synthetic': {'noise': 3.0}}"]),
        ({"synthetic": {"noise": "loud"}}, ["synthetic.noise is 'loud'", "float"]),
        ({"synthetic": {"noise": float("nan")}}, ["synthetic.noise is nan", "finite"]),
        ({"fedmn": {"temperatures": (float("nan"), 0.1)}}, ["(nan, 0.1)", "finite"]),
        ({"synthetic": {"shape": ("a",)}}, ["synthetic.shape is ('a',)"]),
        ({"phases": [{"rounds": "x"}]}, ["phases[0].rounds is 'x'"]),
        ({"groups": [{"mlp": {"hidden": None}}]}, ["groups[0].mlp.hidden is None"]),
        ({"groups": 2}, ["groups is 2", "tuple"]),
        # Values outside their range, and settings that contradict each other.
        ({"clients_per_round": 4}, ["clients_per_round is 4", "3 clients", "1 to 3"]),
        ({"clients_per_round": 3, "held_out": 1}, ["there are 2 clients", "1 to 2"]),
        ({"learning_rate": 0.0}, ["learning_rate is 0.0", "above 0"]),
        ({"learning_rate": float("inf")}, ["learning_rate is inf", "finite"]),
        ({"learning_rate": 10**400}, ["learning_rate is too large"]),
        ({"batch_size": 0}, ["batch_size is 0", "at least 1"]),
        ({"rounds": 0}, ["rounds is 0"]),
        ({"clients": 0}, ["clients is 0"]),
        ({"eval_every": 0}, ["eval_every is 0"]),
        ({"held_out": 3}, ["held_out is 3 of 3"]),
        ({"participants": "novel"}, ["participants is 'novel'", "active, held_out"]),
        ({"participants": "held_out"}, ["participants is held_out", "held_out is 0"]),
        (
            {"held_out": 1, "clients_per_round": 2, "phases": [{}, {"participants": "held_out"}]},
            ["phases[1].clients_per_round is 2", "there are 1 clients"],
        ),
        ({"held_out": -1}, ["held_out is -1"]),
        ({"momentum": 1.0}, ["momentum is 1.0", "below 1"]),
        ({"momentum": -0.5}, ["momentum is -0.5", "at least 0"]),
        ({"max_update_norm": -1.0}, ["max_update_norm is -1.0"]),
        ({"seed": -1}, ["seed is -1"]),
        ({"seed": 2**31}, ["seed is 2147483648", "at most"]),
        ({"mlp": {"hidden": (2**31,)}}, ["mlp.hidden is (2147483648,)", "at most 2147483647"]),
        ({"mlp": {"hidden": (2**30,)}}, ["mlp.hidden is (1073741824,); it must be from 1 to"]),
        ({"model": "lstm", "lstm": {"vocabulary": 0}}, ["lstm.vocabulary is 0", "from 1"]),
        ({"model": "mobilenet", "mobilenet": {"width": -1.0}}, ["mobilenet.width", "above 0"]),
        (
            {"model": "mobilenet", "mobilenet": {"width": np.float64(-1)}},
            ["mobilenet.width is -1.0", "above 0"],
        ),
        (
            {"model": "dropout_cnn", "dropout_cnn": {"dropout": (0.5, -0.5)}},
            ["dropout_cnn.dropout is (0.5, -0.5)", "at least 0"],
        ),
        (
            {"model": "mobilenet", "mobilenet": {"norm": "layer"}},
            ["mobilenet.norm is layer; it must be batch or group"],
        ),
        ({"model": "cnn1d", "cnn1d": {"kernel_size": 2**20}}, ["is 1048576", "from 1 to 1,000"]),
        ({"model": "mobilenet", "mobilenet": {"width": 1e30}}, ["is 1e+30", "at most 1,000"]),
        ({"phases": [{"rounds": 2**30}] * 2}, ["2147483648 rounds", "at most 2147483647"]),
        ({"upload_top_k": 1.5}, ["upload_top_k is 1.5", "at most 1"]),
        ({"optimizer": "adamm"}, ["no optimizer 'adamm'", "did you mean adam?"]),
        ({"server_momentum": 1.0}, ["server_momentum is 1.0", "below 1"]),
        ({"b1": 1.0}, ["b1 is 1.0", "below 1"]),
        ({"learning_rate_schedule": "cosine"}, ["'cosine'", "did you mean cosine_decay?"]),
        ({"schedule_end": 1.5}, ["schedule_end is 1.5", "at most 1"]),
        ({"test_fraction": 0.6, "validation_fraction": 0.4}, ["nothing to train on"]),
        (
            {"validate_after": True, "evaluate_after": False},
            ["validate_after needs evaluate_after", "both"],
        ),
        ({"local_epochs": 1, "local_steps": 1}, ["local_epochs and local_steps", "choose one"]),
        ({"learning_rate_drops": (1.5,)}, ["learning_rate_drops", "between 0 and 1"]),
        ({"phases": [{}, {"batch_size": 0}]}, ["phases[1].batch_size is 0"]),
        ({"evaluate_clients": 99}, ["evaluate_clients is 99", "there are 3 clients", "1 to 3"]),
    ],
)
def test_invalid_settings_are_refused(changes, fragments):
    line = message(changes)
    assert all(fragment in line for fragment in fragments), line


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        (
            {
                "dataset": "digits",
                "partition": "classes",
                "classes": {"per_client": 4, "examples": 600},
                "clients": 500,
            },
            ["500 clients x 4 classes x 600 examples", "1,797 examples", "at most 449 clients"],
        ),
        ({"clients": 60}, ["60 clients", "60 examples", "at most 59 clients"]),
        ({"split": "official"}, ["synthetic", "no test set", "split=pooled"]),
        ({"groups": [{}] * 4}, ["groups=4"]),
        ({"model": "lenet"}, ["lenet", "does not suit examples (2, 2, 1)"]),
        ({"devices": 1000}, ["devices is 1000"]),
        ({"algorithm": "fedmn", "fedmn": {"width": 0}}, ["fedmn.width is 0", "at least 1"]),
        ({"algorithm": "pfedla", "pfedla": {"hidden": 0}}, ["pfedla.hidden is 0", "at least 1"]),
        ({"algorithm": "pfedla", "pfedla": {"depth": -1}}, ["pfedla.depth is -1", "0 to 1000"]),
        ({"algorithm": "pfedhn", "pfedhn": {"width": -1}}, ["pfedhn.width is -1", "at least 0"]),
        (
            {"phases": [{"algorithm": "fedavg"}, {"mlp": {"hidden": (5,)}}]},
            ["phase", "global model of the same network"],
        ),
        ({"phases": [{"algorithm": "local"}, {}]}, ["phase", "global model"]),
        ({**LOCAL, "privacy_noise": None}, ["exactly one of privacy_noise and privacy_epsilon"]),
        ({**LOCAL, "privacy_clip_norm": None}, ["privacy_clip_norm is unset"]),
        ({**LOCAL, "privacy_noise": 1e20}, ["privacy_noise is 1e+20", "at most 1000000"]),
        ({**LOCAL, "privacy_delta": 0.4}, ["privacy_delta is 0.4", "with 3 clients", "0.333"]),
        ({**LOCAL, "max_update_norm": 1.0}, ["max_update_norm", "leave it out"]),
        ({**LOCAL, "phases": [{}, {}]}, ["privacy is for runs without phases"]),
        ({**LOCAL, "algorithm": "fedmn"}, ["local privacy is not possible here: uploads have"]),
        ({**BANDS, "sampling": "random"}, ["privacy_bands is 3", "set sampling=cyclic"]),
        ({**BANDS, "privacy_bands": 4}, ["1 of 3 clients a round", "at most 3"]),
        ({**BANDS, "privacy_quantile": 0.5}, ["privacy_quantile changes the norm", "leave one"]),
        ({**BANDS, "attack": "min_max"}, ["attack=min_max copies", "choose another attack"]),
        ({**RANDOM, "algorithm": "fedper"}, ["without state on clients", "set sampling=cyclic"]),
        ({**RANDOM, "upload_bits": 4}, ["compression keeps its errors", "set sampling=cyclic"]),
        (
            {"learning_rate_schedule": "exponential_decay", "schedule_end": 0.0},
            ["schedule_end is 0", "never reaches"],
        ),
        (
            {"attack": "sign_flip", "attack_share": 0.9},
            ["attack_share is 0.9", "attackers of all 3 clients; lower it"],
        ),
        (
            {"attack": "label_flip", "attack_share": 0.1},
            ["attack_share is 0.1", "an attacker of no client; raise it"],
        ),
        (
            {"algorithm": "local", "server_optimizer": "adam"},
            ["server_optimizer is for methods", "leave it off"],
        ),
        (
            {"algorithm": "pfedla", "robust_rule": "krum"},
            ["robust_rule is for methods", "leave it off"],
        ),
    ],
)
def test_building_refuses_invalid_settings(changes, fragments):
    line = message(changes, built)
    assert all(fragment in line for fragment in fragments), line


def test_none_is_refused_for_settings_that_are_never_unset():
    """Checks whole runs: other checks come before that of the whole configuration."""
    for name, setting in SETTINGS.items():
        if setting.default_value is not None:
            line = commands.message(fedjax_pfl.run, {**TINY, name: None})
            assert re.match(f"{name} (is None; it must be of type|.* must be a name, got)", line)


@pytest.mark.parametrize("name", ["algorithm", "model", "rounds", "learning_rate_drops"])
def test_none_is_refused_in_phases(name):
    line = commands.message(fedjax_pfl.run, {**TINY, "phases": [{}, {name: None}]})
    assert "None" in line


def test_missing_dataset_says_how_to_get_it(tmp_path):
    line = message({"dataset": "cifar10", "data_dir": str(tmp_path)}, built)
    expected = ["-m pip install tensorflow", "download_and_prepare", "162 MiB", str(tmp_path)]
    assert all(word in line for word in expected), line


def test_library_messages_name_no_flags():
    """Only commands have flags; Python callers have none."""
    for path in Path(fedjax_pfl.__file__).parent.rglob("*.py"):
        strings = (
            n.value
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        )
        flagged = [text for text in strings if re.search(r"--[a-z]+[.=]|--(workdir|config)", text)]
        if path.name != "listing.py" and path.parent.name not in ("tuning", "presets", "cli"):
            assert flagged == [], path
