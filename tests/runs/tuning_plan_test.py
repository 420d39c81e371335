"""Settings chosen on validation examples: what is planned, before anything is computed."""

from pathlib import Path

import pytest

from fedjax_pfl.cli import tune
from fedjax_pfl.presets import pfedhn
from fedjax_pfl.runs.tuning import search, show, trials
from fedjax_pfl.runs.tuning.trials import Job
from fedjax_pfl.settings import configuration
from tests.commands import message
from tests.experiments.tune_test import plain
from tests.runs.common import BASE

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")
ROOT = Path(__file__).parents[2]
SMALL = {
    **BASE,
    "synthetic": {"shape": (4, 4, 1), "classes": 3, "examples": 240, "test_examples": 0},
    "clients_per_round": None,
    "rounds": 2,
    "eval_every": 1,
    "dropout": 0.0,
    "local_epochs": 3,
    "evaluate_after": False,
}
RATES = ["learning_rate=1e-6,.1"]


def test_a_method_has_the_settings_of_its_word_and_the_command_line():
    source = str(ROOT / "fedjax_pfl/presets/pfedhn.py") + ":digits-n5"
    config = pfedhn.get_config("digits-n5")
    config.batch_size = 9
    methods = ["pfedhn", "per_fedavg", "pfedme"]
    made = tune.configure_methods(source, config, {"batch_size": 9}, methods)
    assert [one.algorithm for one in made.values()] == methods
    assert {(one.clients, one.batch_size) for one in made.values()} == {(5, 9)}
    assert [one.momentum for one in made.values()] == [0.9, 0.0, 0.0]
    assert made["pfedme"].pfedme.inner_steps == 3
    assert [one.clients_per_round for one in made.values()] == [1, 5, 5]


def test_a_file_without_such_words_gives_another_algorithm(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def get_config():\n    raise RuntimeError\n")
    base = configuration.complete({"clients": 3})
    made = tune.configure_methods(str(file), base, {}, ["fedavg", "local"])
    assert plain(made["local"]) == {**plain(base), "algorithm": "local"}


@pytest.mark.parametrize(
    ("phases", "wanted"),
    [
        ((), [20]),
        (({"algorithm": "fedavg", "rounds": 50}, {}), [7, 13]),  # of 150
        (({"rounds": 10}, {"rounds": 10}), [10, 10]),
    ],
)
def test_phases_keep_their_shares_of_fewer_rounds(phases, wanted):
    config = configuration.complete({"phases": phases, "rounds": 100})
    trials.shorten({"fedavg": config}, 20)
    assert [one.rounds for one in configuration.phases(config)] == wanted
    assert trials.total_rounds(config) == 20
    if phases:
        assert "too few for 2 phases" in message(trials.shorten, {"fedavg": config}, 1)


@pytest.fixture
def hypernetworks():
    """The methods of the preset, as they are tuned: equal visits in rounds of other sizes."""
    source = str(ROOT / "fedjax_pfl/presets/pfedhn.py") + ":digits"
    methods = ["pfedhn", "fedavg", "lg_fedavg", "local"]
    return tune.configure_methods(source, pfedhn.get_config("digits"), {}, methods)


def each_of(function, made):
    return [function(config) for config in made.values()]


def test_presets_keep_their_ratio_of_client_visits(hypernetworks):
    """pFedHN has 500 rounds of one client, FedAvg 100 of five, on purpose."""
    made = hypernetworks
    assert each_of(trials.client_updates, made) == [500, 500, 600, 40]
    search.plan(made, ["learning_rate=.1"], None, None, as_preset=True)
    assert each_of(trials.client_updates, made) == [500, 500, 600, 40]
    assert each_of(trials.evaluations, made) == [4, 4, 4, 4]  # as many as Local's four rounds allow
    search.plan(made, ["learning_rate=.1"], 100, None, as_preset=True)
    assert each_of(trials.cohorts, made) == [[(100, 1)], [(20, 5)], [(20, 5), (4, 5)], [(1, 10)]]
    assert len(set(each_of(trials.evaluations, made))) == 1
    assert show.head({"pfedhn": [], "fedavg": []}, 1, made).endswith(
        "Client updates of a run: pfedhn 100 (100 rounds of 1); fedavg 100 (20 rounds of 5); "
        "lg_fedavg 120 (20 rounds of 5 and 4 rounds of 5); local 10 (1 round of 10)."
    )


def test_rounds_that_would_make_equal_visits_unequal_are_refused(hypernetworks):
    given = hypernetworks, ["learning_rate=.1"], 17, None
    assert message(lambda: search.plan(*given, as_preset=True)) == (
        "17 rounds would give pfedhn 17 client updates and fedavg 15, which are equal "
        "otherwise; give a multiple of 5"
    )


def test_a_length_for_all_methods_alike_does_not_make_budgets_equal(hypernetworks):
    """What --config.rounds=100 does: 100 client updates, and 500, and 600, and 1,000."""
    for config in hypernetworks.values():
        config.update(rounds=100, phases=())
    line = message(search.plan, hypernetworks, ["learning_rate=.1"], None, None)
    assert line.startswith(
        "the methods' runs have different client updates (pfedhn 100, fedavg 500, lg_fedavg 500, "
        "local 1000), and budgets are equal; leave config.clients_per_round and config.rounds to "
        "the presets"
    )


@pytest.mark.parametrize(
    ("rounds", "every", "wanted"),
    [
        ((10, 20), (5, 5), 2),
        ((10, 20), (1, 1), 10),
        ((10, 7), (2, 1), 4),  # of ten rounds five, of seven as many as four
        ((20, 20), (9, 9), 3),
        ((500, 3), (50, 1), 3),
    ],
)
def test_all_methods_have_as_many_evaluations_to_be_best_in(rounds, every, wanted):
    made = {
        str(i): configuration.complete({"rounds": n, "eval_every": e})
        for i, (n, e) in enumerate(zip(rounds, every, strict=True))
    }
    trials.equalize_evaluations(made)
    assert each_of(trials.evaluations, made) == [wanted, wanted]
    if len(set(rounds)) == 1:
        assert [one.eval_every for one in made.values()] == list(every)  # as it was


def planned(texts=RATES, methods=("fedavg",), rounds=None, budget=None, **given):
    made = {m: configuration.complete({**SMALL, "algorithm": m, **given}) for m in methods}
    return search.plan(made, texts, rounds, budget)


def test_what_cannot_be_compared_is_refused():
    line = message(lambda: planned(validation_fraction=0.0))
    assert line == (
        "there are no validation examples, by which to choose; set validation_fraction to 0.2"
    )
    assert "learning_rate is -1.0; it must be above 0" in message(planned, ["learning_rate=-1"])
    assert "(fedavg 1, pfedla 2)" in message(planned, ["pfedla.rate=1,2"], ["fedavg", "pfedla"])
    each = {m: configuration.complete({**SMALL, "algorithm": m}) for m in ("fedavg", "local")}
    each["local"].rounds = 7
    for rounds in (None, 2):
        line = message(search.plan, each, RATES, rounds, None)
        assert line.startswith(
            "the methods' runs have different client updates (fedavg 6, local 21), and budgets are "
        )
    each["local"].update(rounds=2, partition_seed=1)
    assert "the preset gives local other examples than fedavg" in message(
        search.plan, each, RATES, None, None
    )


def test_what_only_shows_when_it_is_built_is_said_before_anything_is_written(tmp_path):
    made = planned(["pfedla.normalise=softmax,nothing"], ["pfedla"])
    assert message(trials.run, made, 1, tmp_path, None).startswith("pfedla: ")
    made = planned(validation_fraction=1e-9)
    assert "no client has validation examples" in message(trials.run, made, 1, tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_programs_are_as_few_as_the_method_allows():
    """Whether there is momentum is a choice; both rates, and the seeds, are numbers."""
    (one,) = planned(["momentum=0,.9; learning_rate=.1,.2; batch_size=4,8"])
    jobs = [
        Job(one.method, point, config, "", frozenset())
        for point, each in trials.configs(one, 1)
        for config in each
    ]
    alike = trials._group_compatible(jobs)
    assert [len(group) for group in alike] == [4, 4]
    found = trials._programs(alike[0])
    assert [[job.point["momentum"] for job in program] for program in found] == [[0, 0], [0.9, 0.9]]
    assert [job.point["learning_rate"] for job in found[0]] == [0.1, 0.2]
    assert [len(part) for part in trials._split_evenly(jobs, 3)] == [3, 3, 2]
    assert [len(part) for part in trials._split_evenly(jobs, None)] == [8]


def test_a_number_that_shapes_the_program_makes_several():
    (one,) = planned(["learning_rate=.1,.2; pfedpara.gamma=.1,.9"], ["pfedpara"])
    jobs = [
        Job(one.method, point, config, "", frozenset())
        for point, each in trials.configs(one, 1)
        for config in each
    ]
    (alike,) = trials._group_compatible(jobs)
    found = [[tuple(job.point.values()) for job in program] for program in trials._programs(alike)]
    assert found == [[(0.1, 0.1), (0.2, 0.1)], [(0.1, 0.9), (0.2, 0.9)]]


def test_what_stands_at_other_rounds_goes_on_in_a_program_of_its_own():
    saved = {"a": (1, 2), "b": (), "c": (2, 3), "d": (5,), "e": (), "f": (3,)}
    point = {"learning_rate": 0.1}
    jobs = [Job("fedavg", point, None, name, frozenset(at)) for name, at in saved.items()]
    found = [[job.name for job in group] for group in trials._group_compatible(jobs)]
    assert found == [["a", "c"], ["b", "e"], ["d"], ["f"]]
