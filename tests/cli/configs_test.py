"""The flag --config: presets, files, settings, and the directory of a run."""

from pathlib import Path

import pytest
from ml_collections import ConfigDict

from fedjax_pfl.cli import configs, main
from fedjax_pfl.cli.command import define
from fedjax_pfl.cli.errors import in_one_line
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
def test_missing_configurations_get_a_suggestion(value, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/tuned.py").touch()
    for arguments in (["--seed=1", "--config", value], [f"--config={value}"]):
        line = message(configs.resolve_config, arguments, "fedmn")
        name = value.partition(":")[0]
        usage = "--config takes SYSTEM:PRESET or FILE.py:PRESET"
        assert line.startswith(f"there is no configuration {name!r}; {usage}; {hint}")


@pytest.mark.parametrize(
    ("arguments", "name", "preset"),
    [
        (["--config=pfedla:digits-k1"], "pfedla", ":digits-k1"),
        (["--config=baseline"], "baseline", ""),
        (["-config=fedmn:digits"], "fedmn", ":digits"),
        (["--config", "pfedla:digits-k1"], "pfedla", ":digits-k1"),
    ],
)
def test_a_system_name_becomes_its_preset_file(arguments, name, preset):
    resolved = configs.resolve_config([*arguments, "--config.rounds=2"], "fedmn")
    assert resolved[-1] == "--config.rounds=2"
    assert resolved[-2].endswith(f"{SYSTEMS[name].__file__}{preset}")


@pytest.mark.parametrize(
    "arguments",
    [["--config=own.py:x"], ["--config", "./own.py"], ["--workdir=pfedla", "config=pfedla"], []],
)
def test_user_files_and_other_arguments_stay(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").touch()
    assert configs.resolve_config(arguments, "fedmn") == arguments


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("--config.clientz=3", "there is no setting clientz; did you mean clients?"),
        ("-config.clientz=3", "there is no setting clientz; did you mean clients?"),
        ("--config.pfedla.rat=1", "there is no setting pfedla.rat; did you mean pfedla.rate?"),
        ("--config.lr=0.1", "there is no setting lr; did you mean learning_rate?"),
        ("--config.clients.x=3", "there is no setting clients.x"),
        ("--config.phase[0].rounds=3", "there is no setting phase; did you mean phases?"),
        ("--config.zzzzzzz", "there is no setting zzzzzzz; the nearest of "),
    ],
)
def test_unknown_settings_get_a_suggestion(argument, line):
    assert line in message(configs.check_keys, ["--config.rounds=2", argument])


def test_all_settings_are_accepted():
    flags = [f"--config.{key}=1" for key in configuration.default()]
    configs.check_keys([*flags, "--config.mlp.hidden=(3,)", "--config=x.py:y", "--workdir=x", "z"])


def read(command, *arguments):
    """Returns the settings that a command reads from its arguments."""
    options, resolved = define(main.load(command), arguments)
    options([command, *resolved])
    return configs.read_settings(options, resolved)


LOADED = pytest.mark.filterwarnings("ignore:the load_module")  # of configuration files


@LOADED
def test_settings_of_a_component_of_ones_own():
    """They follow the component's name. Values are Python literals or texts."""
    own = ["--config.algorithm=mine:own", "--config.own.beta=0.5", "--config.own.sizes", "(1, 2)"]
    own.append("--config.own.form={[]: 1}")  # no dict, because a list cannot be a key
    arguments = [*own, "--config.own.kind=fast", "--config.rounds=3"]
    configs.check_keys(arguments)
    settings = read("baseline", *arguments)
    values = {"beta": 0.5, "sizes": (1, 2), "kind": "fast", "form": "{[]: 1}"}
    assert settings.own.to_dict() == values
    assert (settings.algorithm, settings.rounds) == ("mine:own", 3)
    line = message(configs.check_keys, ["--config.algorithm=mine:own", "--config.other.beta=1"])
    assert line.startswith("there is no setting other")
    assert configs.own_settings(["--config.algorithm=mine:fedprox", "--config.fedprox.mu=1"]) == {}


@LOADED
def test_a_setting_of_one_phase_of_a_preset():
    settings = read("fedmn", "--config=fedmn:digits", "--config.phases[0].rounds=2")
    assert [phase.get("rounds") for phase in settings.phases] == [2, None]


@LOADED
@pytest.mark.parametrize(
    ("key", "start"),
    [("phases[1].rounds", "KeyError: 'rounds'; "), ("phases[2].rounds", "IndexError: tuple ")],
)
def test_a_setting_that_a_phase_of_a_preset_does_not_change(key, start):
    def call():
        with in_one_line():
            read("fedmn", "--config=fedmn:digits", f"--config.{key}=2")

    line = message(call)
    assert line.startswith(start)
    assert line.endswith("changes only a KEY that this phase has in the configuration")


@LOADED
@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("pfedla.rate=1.0", "pfedla"),
        ("learning_rate=0.2", "learning_rate"),
        ("local_steps=3", "local_steps"),  # the file has a similar key
    ],
)
def test_a_setting_that_a_file_leaves_out_is_set_in_the_file(tmp_path, setting, key):
    path = tmp_path / "mine.py"
    path.write_text(
        "from ml_collections import ConfigDict\n\n"
        "def get_config(preset=''):\n    return ConfigDict({'local_epochs': 2})\n"
    )

    def call():
        with in_one_line():
            read("pfedla", f"--config={path}", f"--config.{setting}")

    assert message(call) == (
        f"the configuration file sets no {key}, and --config.KEY changes only what it sets"
    )


def written(path, value):
    """Writes a configuration file that returns `value`; returns the flag that reads it."""
    path.write_text(
        f"from ml_collections import ConfigDict\n\n\ndef get_config():\n    return {value}\n"
    )
    return f"--config={path}"


@LOADED
@pytest.mark.parametrize("command", ["baseline", "tune", "deploy"])
def test_a_file_may_leave_settings_out(command, tmp_path):
    flag = written(tmp_path / "own.py", "ConfigDict({'local_steps': 2, 'pfedla': {'k': 1}})")
    settings = read(command, flag, "--config.local_steps=3", "--data_dir=/data")
    expected = configuration.default()
    expected.update(local_steps=3, data_dir="/data")
    expected.pfedla.k = 1
    assert settings.to_dict() == expected.to_dict()
    flags = "--config=baseline:digits", "--config.data_dir=/a", "--data_dir=/data"
    line = message(read, command, *flags)
    assert line == "--data_dir and --config.data_dir name the same folder; give one"
    settings.clients_per_round = 4  # is unset by default
    assert settings.get_type("clients_per_round") is int


@LOADED
def test_a_file_must_return_a_config_dict(tmp_path):
    line = message(read, "baseline", written(tmp_path / "own.py", "{'rounds': 3}"))
    assert line.endswith("own.py returns dict; it must return a ConfigDict")


@LOADED
def test_a_missing_key_in_a_file_is_named(tmp_path):
    def call():
        with in_one_line():
            read("baseline", written(tmp_path / "own.py", "{'rounds': 3}['clients']"))

    assert message(call) == "KeyError: 'clients'"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "runs/baseline"),
        (["--config=a/b.py:fedavg-digits"], "runs/baseline-fedavg-digits"),
        (["--config", "a/b.py:fedavg-digits"], "runs/baseline-fedavg-digits"),
        (["--config=a/b.py"], "runs/baseline"),
        (["--config.seed=3"], "runs/baseline-seed=3"),
        (["--config.seed", "3"], "runs/baseline-seed=3"),
        (["--config.seed=3", "--config=a.py:local"], "runs/baseline-local-seed=3"),
        (["--config.keep_head"], "runs/baseline-keep_head"),
        (["--noconfig.evaluate_after", "--config.seed=3"], "runs/baseline-noevaluate_after-seed=3"),
        (["--config.csv.label=/a/b"], "runs/baseline-csv.label=_a_b"),
        # Settings with which a run resumes in the same directory.
        (["--config.chunk=1", "--config.seed=3", "--config.store", "disk"], "runs/baseline-seed=3"),
        (["--config.reference", "--noconfig.reference", "--config.data_dir=/a"], "runs/baseline"),
        (["--config.mlp.hidden=(3, 4)"], "runs/baseline-mlp.hidden=_3,_4_"),
        (["--data_dir=/x", "--workdir=y"], "runs/baseline"),
    ],
)
def test_default_directory_of_a_command(arguments, expected):
    assert configs.default_workdir("baseline", arguments) == expected


def test_directory_names_are_short_and_inside_runs():
    name = configs.default_workdir(
        "baseline", ["--config=../../x.py:../..", f"--config.a={'b' * 999}"]
    )
    assert Path(name).parent == Path("runs")
    assert len(Path(name).name) <= 150


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config.local_steps=3"], (None, 7)),
        (["--config.local_epochs=3"], (5, None)),
        (["--config.local_steps=3", "--config.local_epochs", "2"], (5, 7)),
        (["--config.rounds=3"], (5, 7)),
    ],
)
def test_flags_choose_between_steps_and_epochs(arguments, expected):
    settings = ConfigDict({"local_epochs": 5, "local_steps": 7})
    configs.replace_alternatives(settings, arguments)
    assert (settings.local_epochs, settings.local_steps) == expected


def test_a_fraction_replaces_a_presets_number_of_validation_examples():
    settings = ConfigDict({"validation_fraction": 0.0, "validation_examples": 10_000})
    configs.replace_alternatives(settings, ["--config.rounds=3"])
    assert settings.validation_examples == 10_000
    configs.replace_alternatives(settings, ["--config.validation_fraction=0.2"])
    assert settings.validation_examples is None
    settings.validation_fraction = 0.2
    configs.replace_alternatives(settings, ["--config.validation_examples=50"])
    assert settings.validation_fraction == 0.0
