"""Command line of the studies of the papers."""

import copy
import fnmatch
import json
import re
from functools import partial

import pytest
from absl import flags
from absl.flags import FlagHolder

from experiments.papers import study as common
from experiments.papers.factorized_fl import gradient_distances
from experiments.papers.factorized_fl import studies as factorized_fl
from experiments.papers.fedmn import studies as fedmn
from experiments.papers.methods import studies as methods
from experiments.papers.pfedhn import studies as pfedhn
from experiments.papers.pfedla import studies as pfedla
from experiments.papers.table import readable
from fedjax_pfl.report.html_page import flatten
from fedjax_pfl.settings import configuration
from tests.commands import message

SYSTEMS = (pfedla, pfedhn, fedmn, factorized_fl, methods)


@pytest.fixture
def parse(monkeypatch):
    """Parses flags into a copy of them, which other tests do not see."""
    all_flags = flags.FLAGS

    def parse(*arguments):
        monkeypatch.setattr(flags, "FLAGS", copy.deepcopy(all_flags))
        common_flags = (flag for flag in vars(common).values() if isinstance(flag, FlagHolder))
        for flag in (*common_flags, factorized_fl.SETTING, fedmn.LABELS, fedmn.BLOCKS):
            monkeypatch.setattr(flag, "_flagvalues", flags.FLAGS)
        flags.FLAGS(["studies", *arguments])

    return parse


@pytest.fixture
def run_study(parse, tmp_path):
    """Runs the command line of a study that trains nothing, and returns what it writes."""

    def run_study(system, name, *arguments, study=lambda: ({"x": 1.0}, None)):
        parse(f"--out={tmp_path}", *arguments)
        paper = system.__name__.split(".")[-2]
        common.main({name: study}, "", ["x", name], paper, system.OPTIONS)
        (path,) = tmp_path.glob("*.json")
        facts = json.loads(path.read_text())
        path.unlink()
        return path.stem, facts

    return run_study


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: s.__name__)
def test_without_a_name_all_studies_are_listed(system, capsys):
    common.main(system.STUDIES, system.__doc__, ["x"], "pfedla", system.OPTIONS)
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
    line = message(common.main, pfedla.STUDIES, "", ["x", *arguments], "pfedla", pfedla.OPTIONS)
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
        (factorized_fl, "rank", "--setting=iid", True),
        (factorized_fl, "distance", "--clients=20", False),
        (factorized_fl, "distance", "--setting=iid", False),
        (fedmn, "conflict", "--labels=next", True),
        (fedmn, "conflict", "--blocks=9", False),
        (fedmn, "figure2", "--blocks=9", True),
        (fedmn, "figure2", "--labels=next", False),
        (fedmn, "paths", "--labels=next", False),
    ],
)
def test_flags_that_a_study_does_not_read_are_refused(system, name, flag, has, run_study):
    word, _, value = flag.removeprefix("--").partition("=")
    if has:
        stem, facts = run_study(system, name, flag)
        assert stem == f"{name}-digits-{word}={value}"
        assert facts[word] in (value, [value], 20)
    else:
        line = message(run_study, system, name, flag)
        assert line == f"--{word} has no effect on the study {name}; leave it out"


def test_results_of_different_settings_have_different_names(run_study):
    def compare():
        common.select_methods(["local", "fedavg", "beta"], ["local", "beta"])
        return {"x": 1.0}, None

    def figure6(*arguments):
        study = factorized_fl.as_published("figure6", compare)
        return run_study(factorized_fl, "figure6", *arguments, study=study)

    stem, facts = figure6()
    assert stem == "figure6-digits"
    own_facts = (facts["clients"], facts["setting"], facts["methods"])
    assert own_facts == (10, "permuted-noniid", ["local", "beta"])
    assert figure6("--clients=10", "--rounds=20", "--methods=local,beta")[0] == stem
    given = ("--methods=beta,local", "--rounds=5", "--seeds=3", "--set=momentum=0.5")
    assert figure6(*given)[0] == "figure6-digits-methods=beta-local-momentum=0.5"
    stem, facts = figure6("--paper")
    assert stem == "figure6-cifar10"
    assert (facts["clients"], facts["methods"]) == (20, ["local", "fedavg", "beta"])
    assert figure6("--paper", "--clients=10")[0] == "figure6-cifar10-clients=10"


def test_the_blocks_of_the_paper_are_in_the_facts(run_study):
    def count_blocks():
        return {"x": fedmn._block_counts()}, None

    for paper, blocks in (([], ["8"]), (["--paper"], ["8", "9", "10"])):
        stem, facts = run_study(fedmn, "figure2", *paper, study=count_blocks)
        assert (stem, facts["blocks"]) == ("figure2-digits", blocks)


def test_a_study_prints_the_published_numbers(run_study, capsys):
    _, facts = run_study(pfedhn, "figure6", "--paper")
    assert "88.42" in capsys.readouterr().out
    assert facts["published"] == readable("pfedhn", "figure6")
    assert (facts["x"], facts["rounds"]) == (1.0, 5000)
    assert "published" not in run_study(pfedhn, "figure5", "--paper")[1]


@pytest.mark.parametrize(
    ("system", "name", "changes"),
    [
        (pfedla, "retained", ["pfedla.k=0", 'pfedla={"k": 0}', "evaluate_after=false"]),
        (pfedla, "rates", ["pfedla.rate=1", "partition=iid", "partition_seed=1"]),
        (pfedla, "compression", ["upload_bits=2", "upload_top_k=0.5"]),
        (pfedla, "calibration", ["classes.examples=50", "lenet.batch_norm=true"]),
        (pfedla, "figure6", ["clients=20", "algorithm=fedavg", "sweep=learning_rate=1,2"]),
        (pfedhn, "novel", ["clients=20", "held_out=3", "dirichlet_classes.novel_alpha=1"]),
        (pfedhn, "figure5", ["local_steps=3"]),
        (pfedhn, "figure6", ["pfedhn.depth=1", "pfedhn.embedding=3"]),
        (fedmn, "figure2", ["fedmn.layout=[1,2,2]", "mlp.hidden=[3]", "phases=[]"]),
        (fedmn, "gates", ["fedmn.layout=[1,2,2]"]),
        (fedmn, "grouping", ["clients=20"]),
        (factorized_fl, "rank", ["factorized_fl.rank=4", "evaluate_after=false"]),
        (factorized_fl, "tau", ["factorized_fl.tau=0", "factorized_fl.minimum=2"]),
        (factorized_fl, "similarity", ["eval_every=2"]),
        (factorized_fl, "architectures", ["lenet.batch_norm=true"]),
        (methods, "leakage", ["privacy=none", "privacy_epsilon=3"]),
        (methods, "epsilon", ["seed=7", "learning_rate=1", "privacy_clip_norm=2"]),
    ],
)
def test_settings_that_a_study_chooses_are_refused(system, name, changes, run_study):
    """The file would say k=3 of runs with k=0."""
    for change in changes:
        key = change.partition("=")[0]
        line = message(run_study, system, name, f"--set={change}")
        assert line == f"the study {name} chooses {key} itself; leave --set={change} out"


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: s.__name__)
def test_every_study_has_options_and_chooses_settings_that_exist(system):
    assert "" in system.OPTIONS or {*system.STUDIES} == {*system.OPTIONS}
    assert {*system.OPTIONS} <= {*system.STUDIES, ""}
    keys = [key for key, _ in flatten(configuration.default().to_dict())]
    for options in system.OPTIONS.values():
        for pattern in options.own_settings:
            assert fnmatch.filter(keys, pattern), pattern


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--set=metrics=macro_f1", "which metrics=macro_f1 leaves out; "),
        ("--dataset=diabetes", "and 'diabetes' has none: "),
    ],
)
def test_runs_without_accuracy_are_refused(argument, reason, run_study, monkeypatch):
    monkeypatch.setattr(common.runner, "run", lambda *_: pytest.fail("a run has started"))
    line = message(partial(run_study, pfedla, "retained", argument, study=pfedla.retained))
    assert line.startswith(f"tables and studies show accuracy, {reason}")


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
    common.main(studies, "", ["x", name], "factorized_fl", factorized_fl.OPTIONS)
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

    options = common.StudyOptions(20, 50, ("methods",), "cifar10", 75, 3)
    common.main({"study": study}, "", ["x", "study"], "pfedla", {"": options})
    assert calls == [expected]
    assert "97.25" in capsys.readouterr().out


def test_one_seed_for_several_runs_is_refused(tmp_path, parse, capsys):
    options = common.StudyOptions(20, 50)
    arguments = ({"study": lambda: ({"x": 1.0}, None)}, "", ["x", "study"], "pfedla", {"": options})
    parse("--set=seed=7", f"--out={tmp_path}")
    common.main(*arguments)
    parse("--set=seed=7", "--seeds=3", f"--out={tmp_path / 'new'}")
    line = message(common.main, *arguments)
    assert line == "--set=seed=7 gives all 3 runs one seed; leave it out, or give --seeds=1"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change", ["rounds=7", "dataset=mnist", "seeds=3", "clients=4"])
def test_changes_that_labels_do_not_show_are_refused(change, run_study):
    """The file would say 20 rounds on digits, with one seed and 10 clients."""
    arguments = ("--set=momentum=0.5", f"--set={change}")
    line = message(run_study, factorized_fl, "similarity", *arguments)
    assert line == (
        f"--set={change} would not be in the names and labels of the results; give --{change}"
    )


def test_a_folder_that_cannot_be_made_is_told_before_training(tmp_path, parse):
    (tmp_path / "file").touch()
    parse(f"--out={tmp_path / 'file'}")
    study = {"study": lambda: pytest.fail("it trains")}
    line = message(
        common.main, study, "", ["x", "study"], "pfedla", {"": common.StudyOptions(20, 50)}
    )
    assert line == f"--out={tmp_path / 'file'} cannot be written (File exists)"


def test_changes_of_settings_are_refused_where_there_are_none(monkeypatch, parse):
    """The study of distances trains without a configuration."""
    parse("--set=learning_rate=0.5")
    monkeypatch.setattr(gradient_distances, "_one_seed", lambda *_: pytest.fail("it trains"))
    assert message(gradient_distances.study) == (
        "distance has no settings to change; leave --set=learning_rate=0.5 out"
    )
