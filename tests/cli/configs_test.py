"""The flag --config: presets, files, settings, and the directory of a run."""

from pathlib import Path

import pytest
from ml_collections import ConfigDict

from fedjax_pfl.cli import configs
from fedjax_pfl.presets import SYSTEMS
from fedjax_pfl.settings import configuration
from tests.commands import message


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("experiments/configs/pfedla.py:n3", "did you mean pfedla:n3?"),
        ("pfedla.py:n3", "did you mean pfedla:n3?"),
        ("pfedal:n3", "did you mean pfedla:n3?"),
        ("pfedal", "did you mean pfedla?"),
        ("digits-k1", "did you mean fedmn:digits-k1?"),
        ("own/tund.py:fedavg", "did you mean own/tuned.py:fedavg?"),
        ("zzzz.py", "systems are baseline, factorized_fl, fedmn, pfedhn, pfedla"),
        ("", "systems are baseline, "),
    ],
)
def test_a_configuration_that_does_not_exist_gets_the_nearest(value, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/tuned.py").touch()
    for arguments in (["--seed=1", "--config", value], [f"--config={value}"]):
        line = message(configs.resolve_config, arguments, "fedmn")
        name = value.partition(":")[0]
        takes = "--config takes SYSTEM:PRESET or FILE.py:PRESET"
        assert line.startswith(f"there is no configuration {name!r}; {takes}; {hint}")


@pytest.mark.parametrize(
    ("given", "name", "rest"),
    [
        (["--config=pfedla:digits-k1"], "pfedla", ":digits-k1"),
        (["--config=baseline"], "baseline", ""),
        (["-config=fedmn:digits"], "fedmn", ":digits"),
        (["--config", "pfedla:digits-k1"], "pfedla", ":digits-k1"),
    ],
)
def test_a_system_stands_for_the_file_of_its_presets(given, name, rest):
    made = configs.resolve_config([*given, "--config.rounds=2"], "fedmn")
    assert made[-1] == "--config.rounds=2"
    assert made[-2].endswith(f"{SYSTEMS[name].__file__}{rest}")


@pytest.mark.parametrize(
    "given",
    [["--config=own.py:x"], ["--config", "./own.py"], ["--workdir=pfedla", "config=pfedla"], []],
)
def test_a_users_own_file_and_other_arguments_stay(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").touch()
    assert configs.resolve_config(given, "fedmn") == given


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config.clientz=3", "there is no setting clientz; did you mean clients?"),
        ("-config.clientz=3", "there is no setting clientz; did you mean clients?"),
        ("--config.pfedla.rat=1", "there is no setting pfedla.rat; did you mean pfedla.rate?"),
        ("--config.classes.per_clent=3", "classes.per_clent; did you mean classes.per_client?"),
        ("--config.clients.x=3", "there is no setting clients.x"),
        ("--config.phase[0].rounds=3", "there is no setting phase; did you mean phases?"),
        ("--config.zzzzzzz", "there is no setting zzzzzzz; the nearest of "),
    ],
)
def test_check_keys_names_the_nearest(argument, words):
    assert words in message(configs.check_keys, ["--config.rounds=2", argument])


def test_check_keys_lets_all_settings_pass():
    plain = [f"--config.{key}=1" for key in configuration.default()]
    configs.check_keys([*plain, "--config.mlp.hidden=(3,)", "--config=x.py:y", "--workdir=x", "z"])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "runs/baseline"),
        (["--config=a/b.py:fedavg-digits"], "runs/baseline-fedavg-digits"),
        (["--config", "a/b.py:fedavg-digits"], "runs/baseline-fedavg-digits"),
        (["--config=a/b.py"], "runs/baseline"),
        (["--config.seed=3"], "runs/baseline-seed=3"),
        (["--config.seed", "3"], "runs/baseline-seed=3"),
        (["--config.seed=3", "--config=a.py:local"], "runs/baseline-local-seed=3"),
        (["--config.tensorboard"], "runs/baseline-tensorboard"),
        (["--noconfig.tensorboard", "--config.seed=3"], "runs/baseline-notensorboard-seed=3"),
        (["--config.data_dir=/a/b"], "runs/baseline-data_dir=_a_b"),
        (["--config.mlp.hidden=(3, 4)"], "runs/baseline-mlp.hidden=_3,_4_"),
        (["--data_dir=/x", "--workdir=y"], "runs/baseline"),
    ],
)
def test_every_command_has_a_directory_of_its_own(arguments, wanted):
    assert configs.default_workdir("baseline", arguments) == wanted


def test_a_directorys_name_stays_short_and_inside_runs():
    name = configs.default_workdir(
        "baseline", ["--config=../../x.py:../..", f"--config.a={'b' * 999}"]
    )
    assert Path(name).parent == Path("runs")
    assert len(Path(name).name) <= 150


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--config.local_steps=3"], (None, 7)),
        (["--config.local_epochs=3"], (5, None)),
        (["--config.local_steps=3", "--config.local_epochs", "2"], (5, 7)),
        (["--config.rounds=3"], (5, 7)),
    ],
)
def test_the_command_line_says_whether_steps_or_epochs(arguments, wanted):
    settings = ConfigDict({"local_epochs": 5, "local_steps": 7})
    configs.replace_length(settings, arguments)
    assert (settings.local_epochs, settings.local_steps) == wanted
