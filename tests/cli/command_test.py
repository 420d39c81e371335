"""The command line: files and keys, where a run goes, and errors in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from ml_collections import ConfigDict

from fedjax_pfl.cli import command as launch
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.presets import SYSTEMS
from fedjax_pfl.runs import interrupt
from fedjax_pfl.settings import configuration
from tests.commands import CONFIG, Forked

ROOT = Path(__file__).parents[2]


def message(function, *arguments):
    """The one line of a UsageError."""
    with pytest.raises(UsageError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_values_on_the_command_line():
    """JSON, numbers as people write them, words with quotes and without."""
    made = configuration.default()
    made.clients_per_round = 3
    pairs = [
        "momentum=.9",
        "clip_norm=10.",
        "model=mlp",
        'dataset="mnist"',
        "rounds=7",
        "fedprox.mu=1e-3",
        "augment=True",
        "evaluate_after=false",
        "clients_per_round=None",
        "learning_rate_drops=[.5]",
    ]
    assert message(launch.change, made, pairs[-1:]).startswith("--set=learning_rate_drops=[.5] is")
    launch.change(made, [*pairs[:-1], "learning_rate_drops=[0.5]"])
    assert (made.momentum, made.clip_norm, made.rounds) == (0.9, 10.0, 7)
    assert (made.model, made.dataset) == ("mlp", "mnist")
    assert (made.augment, made.evaluate_after, made.clients_per_round) == (True, False, None)
    assert (made.fedprox.mu, tuple(made.learning_rate_drops)) == (1e-3, (0.5,))
    for pair in ("momentum=much", "momentum", "lenet=mlp", "rounds=.5", "augment=yes"):
        line = message(launch.change, made, [pair])
        assert line == f"--set={pair} is no KEY=VALUE of this configuration"


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
        line = message(launch.resolve_config, arguments, "fedmn")
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
    made = launch.resolve_config([*given, "--config.rounds=2"], "fedmn")
    assert made[-1] == "--config.rounds=2"
    assert made[-2].endswith(f"{SYSTEMS[name].__file__}{rest}")


@pytest.mark.parametrize(
    "given",
    [["--config=own.py:x"], ["--config", "./own.py"], ["--workdir=pfedla", "config=pfedla"], []],
)
def test_a_users_own_file_and_other_arguments_stay(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").touch()
    assert launch.resolve_config(given, "fedmn") == given


# Keys, directories, and errors of one line.


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
    assert words in message(launch.check_keys, ["--config.rounds=2", argument])


def test_check_keys_lets_all_settings_pass():
    plain = [f"--config.{key}=1" for key in configuration.default()]
    launch.check_keys([*plain, "--config.mlp.hidden=(3,)", "--config=x.py:y", "--workdir=x", "z"])


def test_in_one_line_passes_nothing_else(monkeypatch):
    def raised(error):
        with launch.in_one_line():
            raise error

    assert message(raised, UsageError("as it is")) == "as it is"
    assert message(raised, ValueError("first\nlast")) == "last"
    assert message(raised, KeyError()) == "KeyError"
    monkeypatch.setattr(sys, "argv", ["a_command_without_flags"])
    assert message(raised, flags.UnrecognizedFlagError("rounds")) == (
        "there is no flag --rounds; there are --config.KEY"
    )
    text = "Traceback ...\nfedjax_pfl.core.errors.UsageError: what is wrong"
    assert message(raised, RuntimeError(text)) == "what is wrong"
    with pytest.raises(KeyboardInterrupt):
        raised(KeyboardInterrupt())


def test_fail_is_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        launch.fail(UsageError("what\n  is wrong"))
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", "error: what is wrong\n")


@pytest.mark.parametrize("written", ["x", "x" * 100_000], ids=["kept back", "at once"])
def test_a_reader_that_has_read_enough_is_no_error(written, monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with launch.ending(), launch.in_one_line():
            print(written)
        print("more")  # as Python does when it ends
        out.flush()
    assert capfd.readouterr().err == ""


def test_a_command_may_have_no_output_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with launch.ending():
        print("to nobody")


def test_all_commands_end_alike():
    for path in (ROOT / "experiments").rglob("*.py"):
        if path != Path(launch.__file__):
            assert "app.run(" not in path.read_text(), path


def test_how_a_command_ends(capsys):
    def code(error):
        with pytest.raises(SystemExit) as caught, launch.ending():
            raise error
        return caught.value.code

    assert code(UsageError("wrong")) == 2
    assert code(interrupt.Stopped(3, 15)) == interrupt.Stopped(3, 15).code
    assert code(SystemExit(7)) == 7
    assert capsys.readouterr().err.splitlines()[0] == "error: wrong"


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
    assert launch.default_workdir("baseline", arguments) == wanted


def test_a_directorys_name_stays_short_and_inside_runs():
    name = launch.default_workdir(
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
    launch.replace_length(settings, arguments)
    assert (settings.local_epochs, settings.local_steps) == wanted


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (
            "flag --config.fedprox.mu=a: could not convert string to float: 'a'",
            "fedprox.mu is 'a'; it must be a number",
        ),
        (
            "flag --config.keep_head=maybe: ('Non-boolean argument to boolean flag', 'maybe')",
            "keep_head is 'maybe'; it must be true or false",
        ),
        ("flag --wait=0: value should be positive", "flag --wait=0: value should be positive"),
    ],
)
def test_a_value_of_another_kind_is_named_in_words(line, wanted):
    with pytest.raises(UsageError) as caught, launch.in_one_line():
        raise flags.IllegalFlagValueError(line)
    assert str(caught.value) == wanted


# Real commands: all at once, as each spends its time on starting.

_WRONG = {
    "unknown key": (["--config.clientz=3"], "did you mean clients?"),
    "unknown preset": (
        ["--config=baseline:fedagv"],
        "'fedagv' is no word of one; did you mean fedavg?",
    ),
    "no config file": (
        ["--config=nowhere.py"],
        "nowhere.py'; --config takes SYSTEM:PRESET or ",
    ),
    "bad value": (["--config.batch_size=0"], "batch_size is 0; it must be at least 1"),
    "no number": (["--config.rounds=ten"], "rounds is 'ten'; it must be a whole number"),
    "unknown flag": (["--out=x"], "there is no flag --out; there are --config, --coordinator, "),
    "stray argument": (["digits"], "'digits' is no flag"),
    "what is not selected": (
        ["--config.dirichlet.alpha=.1"],
        "dirichlet.alpha counts with partition=dirichlet only, and partition is classes",
    ),
    "no run beside": (["--config.beside=nowhere"], "nowhere is not a run directory"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What each of the commands has left."""
    commands = {name: arguments for name, (arguments, _) in _WRONG.items()} | {"help": ["--help"]}
    started = {
        name: Forked("experiments.baseline", *given, place=tmp_path_factory.mktemp("launch"))
        for name, given in commands.items()
    }
    return {name: command.ended() for name, command in started.items()}


@pytest.mark.parametrize("name", _WRONG)
def test_a_wrong_command_ends_with_one_line(name, ended):
    status, out, err, files = ended[name]
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert _WRONG[name][1] in err
    assert files == []


def test_a_real_process_says_the_same(ended, tmp_path):
    """Of one of them; the others are forked."""
    arguments, _ = _WRONG["bad value"]
    told = subprocess.run(
        [sys.executable, "-m", "experiments.baseline", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (told.returncode, told.stdout, told.stderr) == ended["bad value"][:3]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("three commands, each a run")
def test_a_report_has_the_runs_that_a_command_asks_for_and_names(tmp_path):
    """`reference` makes those that are missing; `beside` takes those that are elsewhere."""
    small = {**CONFIG, "rounds": 2, "eval_every": 2}
    settings = [f"--config.{key}={value}" for key, value in small.items()]
    run, elsewhere = tmp_path / "runs" / "mine", tmp_path / "elsewhere"

    def page(name, asked):
        (place := tmp_path / name).mkdir()
        told = Forked("experiments.baseline", *settings, f"--workdir={run}", asked, place=place)
        status, out, err, files = told.ended()
        assert (status, files) == (0, []), err
        assert all(line.startswith("round 2 of 2: ") for line in err.splitlines()), err
        assert str(run / "report.html") in out
        return (run / "report.html").read_text()

    assert ">Local</text>" in page("asked", "--config.reference=true")
    (run / "reference").rename(elsewhere)
    (run / "report.html").unlink()
    assert ">Local</text>" not in page("alone", "--config.reference=false")
    assert ">Local</text>" in page("named", f"--config.beside={elsewhere / 'local'}")


def test_help_names_the_presets_and_the_flags(ended):
    status, out, err, files = ended["help"]
    assert status == 0
    assert "Traceback" not in out + err
    assert err == ""
    assert max(map(len, out.splitlines())) <= 100
    for word in ("fedavg-digits", "classes4", "dirichlet0.5", "n10", f"{launch.LIST} settings"):
        assert word in out
    said = " ".join(out.split())
    assert "local_epochs unset passes over a client's own examples in a round" in said
    assert "fedavg FedAvg: one global model" in said
    for flag in ("--config:", "--workdir:", "--data_dir:"):
        assert flag in out
    assert files == []
