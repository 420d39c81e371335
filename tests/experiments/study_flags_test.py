"""Command line of the studies of the papers."""

import copy
import re
from functools import partial

import pytest
from absl import flags

from experiments.papers import study as common
from experiments.papers.factorized_fl import gradient_distances
from experiments.papers.factorized_fl import studies as factorized_fl
from experiments.papers.fedmn import studies as fedmn
from experiments.papers.pfedhn import studies as pfedhn
from experiments.papers.pfedla import studies as pfedla
from fedjax_pfl.settings import configuration
from tests.commands import message


@pytest.fixture
def parse(monkeypatch):
    """Parses flags into a copy of them, for one test."""

    def parse(*arguments):
        monkeypatch.setattr(flags, "FLAGS", copy.deepcopy(flags.FLAGS))
        names = ("rounds", "paper", "methods", "out", "seeds", "set", "dataset", "clients")
        for flag in (*(getattr(common, name.upper()) for name in names), factorized_fl.SETTING):
            monkeypatch.setattr(flag, "_flagvalues", flags.FLAGS)
        flags.FLAGS(["studies", *arguments])

    return parse


@pytest.mark.parametrize("system", [pfedla, pfedhn, fedmn, factorized_fl], ids=lambda s: s.__name__)
def test_without_a_name_all_studies_are_listed(system, capsys):
    common.main(system.STUDIES, system.__doc__, ["x"], "pfedla", system.LENGTHS)
    text = capsys.readouterr().out
    for name in system.STUDIES:
        assert re.search(rf"^(\w+, )*{name}\b[\w, ]* \S", text, re.M), name


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["figure66"], "there is no study 'figure66'; did you mean figure6?"),
        (["figure6", "digits"], "name one study; 'digits' is one word too many"),
    ],
)
def test_wrong_names_of_studies_are_refused(arguments, expected):
    line = message(common.main, pfedla.STUDIES, "", ["x", *arguments], "pfedla", pfedla.LENGTHS)
    assert line == expected


@pytest.mark.parametrize(
    ("system", "name", "flag", "has"),
    [
        (pfedla, "figure6", "--clients=20", False),
        (pfedla, "figure6", "--methods=fedavg", False),
        (pfedhn, "spectral", "--clients=20", True),
        (pfedhn, "spectral", "--methods=fedavg", False),
        (pfedhn, "novel", "--clients=20", False),
        (pfedhn, "novel", "--methods=fedavg", True),
        (fedmn, "figure2", "--methods=fedavg", False),
        (fedmn, "conflict", "--methods=fedavg", True),
        (factorized_fl, "figure6", "--methods=alpha", True),
        (factorized_fl, "rank", "--clients=20", True),
        (factorized_fl, "rank", "--methods=alpha", False),
    ],
)
def test_flags_that_a_study_does_not_read_are_refused(system, name, flag, has, tmp_path, parse):
    parse(f"--out={tmp_path}", flag)
    run = partial(
        common.main, {name: lambda: ({"x": 1.0}, None)}, "", ["x", name], "pfedla", system.LENGTHS
    )
    if has:
        run()
    else:
        word = flag.partition("=")[0]
        assert message(run) == f"{word} has no effect on the study {name}; leave it out"


def test_clients_of_figure_4_can_be_chosen_with_coarse_classes_only(parse):
    parse("--clients=30")
    line = "--clients has no effect on the study figure4 with --dataset=digits; leave it out"
    assert message(pfedhn.figure4) == line


def test_figure_6_has_settings_for_all_methods(monkeypatch, parse):
    parse()
    monkeypatch.setattr(factorized_fl, "runs", lambda settings, name: settings)
    for name in factorized_fl.METHODS:
        configuration.specify(factorized_fl._method(name))
    assert factorized_fl._method("factorized_fl_moved").algorithm == "factorized_fl_moved"
    assert factorized_fl._method("fedfomo").fedfomo.peers == 5


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("single", [], ("cifar10", "iid", 20, 20)),
        ("figure6", [], ("cifar10", "permuted-noniid", 20, 50)),
        ("figure6", ["--setting=domains", "--dataset=cifar100"], ("cifar100", "domains", 20, 100)),
        ("architectures", ["--rounds=7", "--clients=8"], ("cifar100", "domains", 8, 7)),
    ],
)
def test_paper_sets_data_clients_and_rounds(name, arguments, expected, tmp_path, parse):
    parse("--paper", f"--out={tmp_path}", *arguments)
    calls = []

    def study():
        settings = (common.DATASET, factorized_fl.SETTING, common.CLIENTS, common.ROUNDS)
        calls.append(tuple(flag.value for flag in settings))
        return {"x": 1.0}, None

    studies = {name: factorized_fl.as_published(name, study)}
    common.main(studies, "", ["x", name], "factorized_fl", factorized_fl.LENGTHS)
    assert calls == [expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (20, "digits", 10, 1, ["beta"])),
        (["--paper"], (50, "cifar10", 75, 3, ["beta", "alpha"])),
        (["--paper", "--dataset=mnist", "--seeds=2"], (50, "mnist", 75, 2, ["beta", "alpha"])),
        (["--rounds=3"], (3, "digits", 10, 1, ["beta"])),
    ],
)
def test_a_study_is_short_without_the_flag_paper(arguments, expected, tmp_path, capsys, parse):
    parse(f"--out={tmp_path}", *arguments)
    calls = []

    def study():
        settings = (common.ROUNDS, common.DATASET, common.CLIENTS, common.SEEDS)
        methods = common.select_methods(["beta", "alpha"], ["beta"])
        calls.append((*(flag.value for flag in settings), methods))
        return {"accuracy": 97.25}, None

    length = common.Length(20, 50, ("methods",), "cifar10", 75, 3)
    common.main({"study": study}, "", ["x", "study"], "pfedla", {"": length})
    assert calls == [expected]
    assert "97.25" in capsys.readouterr().out


def test_one_seed_for_several_runs_is_refused(tmp_path, parse, capsys):
    length = common.Length(20, 50)
    arguments = ({"study": lambda: ({"x": 1.0}, None)}, "", ["x", "study"], "pfedla", {"": length})
    parse("--set=seed=7", f"--out={tmp_path}")
    common.main(*arguments)
    parse("--seeds=3", f"--out={tmp_path / 'new'}")  # the other flags stay
    line = message(common.main, *arguments)
    assert line == "--set=seed=7 gives all 3 runs one seed; leave it out, or give --seeds=1"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change", ["rounds=7", "dataset=mnist"])
def test_changes_that_labels_do_not_show_are_refused(change, tmp_path, parse):
    """The file would say 20 rounds on digits."""
    parse("--set=momentum=0.5", f"--set={change}", f"--out={tmp_path}")
    study = {"study": lambda: pytest.fail("a run has started")}
    line = message(common.main, study, "", ["x", "study"], "pfedla", {"": common.Length(20, 50)})
    assert line == (
        f"--set={change} would not be in the names and labels of the results; give --{change}"
    )


def test_a_folder_that_cannot_be_made_is_told_before_training(tmp_path, parse):
    (tmp_path / "file").touch()
    parse(f"--out={tmp_path / 'file'}")
    study = {"study": lambda: pytest.fail("it trains")}
    line = message(common.main, study, "", ["x", "study"], "pfedla", {"": common.Length(20, 50)})
    assert line == f"--out={tmp_path / 'file'} cannot be written (File exists)"


def test_changes_of_settings_are_refused_where_there_are_none(monkeypatch, parse):
    """The study of distances trains without a configuration."""
    parse("--set=learning_rate=0.5")
    monkeypatch.setattr(gradient_distances, "_one_seed", lambda *_: pytest.fail("it trains"))
    assert message(gradient_distances.study) == (
        "distance has no settings to change; leave --set=learning_rate=0.5 out"
    )
