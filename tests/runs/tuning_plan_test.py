"""Tests of the plan of a grid search: settings, budgets and programs."""

from pathlib import Path

import pytest

from fedjax_pfl.cli import tune
from fedjax_pfl.presets import factorized_fl, pfedhn
from fedjax_pfl.runs.tuning import search, show, trials
from fedjax_pfl.runs.tuning.trials import Job
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import settings_with
from tests.commands import message
from tests.runs.common import BASE

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")
PRESETS = Path(__file__).parents[2] / "fedjax_pfl/presets/pfedhn.py"
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


def plan(texts=RATES, methods=("fedavg",), rounds=None, **settings):
    configs = {m: configuration.complete({**SMALL, "algorithm": m, **settings}) for m in methods}
    return search.plan(configs, texts, rounds, None)


def results_settings(config):
    """Returns the settings that affect results."""
    resumable = settings_with("resumable")
    return {k: v for k, v in configuration.resolve(config).items() if k not in resumable}


def test_methods_have_the_settings_of_their_preset_and_the_command_line():
    config = pfedhn.get_config("digits-n5")
    config.batch_size = 9
    methods = ["pfedhn", "per_fedavg", "pfedme"]
    configs = tune.configure_methods(f"{PRESETS}:digits-n5", config, {"batch_size": 9}, methods)
    expected = (["pfedhn", 0.9, 1], ["per_fedavg", 0.0, 5], ["pfedme", 0.0, 5])
    for config, (method, momentum, cohort) in zip(configs.values(), expected, strict=True):
        assert (config.algorithm, config.clients, config.batch_size) == (method, 5, 9)
        assert (config.momentum, config.clients_per_round) == (momentum, cohort)
    assert configs["pfedme"].pfedme.inner_steps == 3


def test_a_word_for_another_method_is_left_out():
    """The head of every method stays on its clients; Local trains all clients in fewer rounds."""
    preset, methods = "digits-permuted-alpha", ["factorized_fl", "fedavg"]
    source = f"{factorized_fl.__file__}:{preset}"
    base = factorized_fl.get_config(preset)
    configs = tune.configure_methods(source, base, {}, methods)
    assert (configs["fedavg"].keep_head, configs["fedavg"].permute_labels) == (True, True)
    source = f"{factorized_fl.__file__}:digits-permuted-alpha-factorized_fl_moved"
    assert tune.configure_methods(source, base, {}, methods[1:])["fedavg"].keep_head
    source, base = f"{PRESETS}:digits-k5", pfedhn.get_config("digits-k5")
    config = tune.configure_methods(source, base, {}, ["pfedhn", "local"])["local"]
    assert (config.clients_per_round, config.rounds) == (None, 4)
    line = message(lambda: tune.configure_methods(f"{PRESETS}:digts-k0", base, {}, ["local"]))
    assert "there is no preset 'digts-k0-local': 'digts' is no word of one" in line


def test_values_that_every_phase_overrides_are_refused():
    phases = ({"batch_size": 8}, {"batch_size": 8, "algorithm": "local"})
    line = message(lambda: plan(["batch_size=4,64"], phases=phases))
    assert line.startswith(
        "the grid of fedavg: batch_size has no effect, because every phase sets it"
    )


def test_loggers_are_checked_before_training(tmp_path):
    planned = plan(log_to="foo")
    line = message(lambda: search.run_search(planned, seeds=1, out=tmp_path))
    assert line.startswith("log_to has no 'foo'")
    assert not list(tmp_path.iterdir())


def test_a_file_without_presets_changes_the_algorithm_only(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def get_config():\n    raise RuntimeError\n")
    base = configuration.complete({"clients": 3})
    configs = tune.configure_methods(str(file), base, {}, ["fedavg", "local"])
    expected = {**results_settings(base), "algorithm": "local"}
    assert results_settings(configs["local"]) == expected


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ((), [20]),
        (({"algorithm": "fedavg", "rounds": 50}, {}), [7, 13]),  # of 150
        (({"rounds": 10}, {"rounds": 10}), [10, 10]),
    ],
)
def test_phases_keep_their_share_of_the_rounds(phases, expected):
    config = configuration.complete({"phases": phases, "rounds": 100})
    trials.shorten({"fedavg": config}, 20)
    assert [phase.rounds for phase in configuration.phases(config)] == expected
    assert trials.total_rounds(config) == 20
    config.rounds = 200  # as --config.rounds=200 does in the command with the tuned settings
    assert configuration.phases(config)[-1].rounds == 200
    config.rounds = expected[-1]
    if phases:
        assert "too few for 2 phases" in message(trials.shorten, {"fedavg": config}, 1)


@pytest.fixture
def configs():
    """Methods of the preset, with equal numbers of client updates in different rounds."""
    methods = ["pfedhn", "fedavg", "lg_fedavg", "local"]
    return tune.configure_methods(f"{PRESETS}:digits", pfedhn.get_config("digits"), {}, methods)


def values(function, configs):
    return [function(config) for config in configs.values()]


def test_presets_keep_their_ratio_of_client_updates(configs):
    """Checks 500 rounds of one client for pFedHN and 100 rounds of five for FedAvg."""
    assert values(trials.client_updates, configs) == [500, 500, 600, 40]
    search.plan(configs, ["learning_rate=.1"], None, None, as_preset=True)
    assert values(trials.client_updates, configs) == [500, 500, 600, 40]
    assert values(trials.evaluations, configs) == [4, 4, 4, 4]  # Local has four rounds
    search.plan(configs, ["learning_rate=.1"], 100, None, as_preset=True)
    cohorts = [[(100, 1)], [(20, 5)], [(20, 5), (4, 5)], [(1, 10)]]
    assert values(trials.cohorts, configs) == cohorts
    assert len(set(values(trials.evaluations, configs))) == 1
    assert show.head({"pfedhn": [], "fedavg": []}, 1, configs).endswith(
        "Client updates of a run: pfedhn 100 (100 rounds of 1); fedavg 100 (20 rounds of 5); "
        "lg_fedavg 120 (20 rounds of 5 and 4 rounds of 5); local 10 (1 round of 10)."
    )


def test_unequal_client_updates_are_refused(configs):
    """Refuses 17 rounds for all presets, and 100 rounds for all methods."""
    line = message(lambda: search.plan(configs, RATES, 17, None, as_preset=True))
    assert line == (
        "17 rounds would give pfedhn 17 client updates and fedavg 15, which are equal "
        "otherwise; give a multiple of 5"
    )
    for config in configs.values():
        config.update(rounds=100, phases=())
    assert message(search.plan, configs, RATES, None, None).startswith(
        "the methods' runs have different client updates (pfedhn 100, fedavg 500, lg_fedavg 500, "
        "local 1000), and budgets are equal; leave config.clients_per_round and config.rounds to "
        "the presets"
    )


@pytest.mark.parametrize(
    ("rounds", "every", "expected"),
    [
        ((10, 20), (5, 5), 2),
        ((10, 20), (1, 1), 10),
        ((10, 7), (2, 1), 4),  # five of ten rounds, and at most four of seven
        ((20, 20), (9, 9), 3),
        ((500, 3), (50, 1), 3),
    ],
)
def test_all_methods_have_the_same_number_of_evaluations(rounds, every, expected):
    configs = {
        str(i): configuration.complete({"rounds": n, "eval_every": e})
        for i, (n, e) in enumerate(zip(rounds, every, strict=True))
    }
    trials.equalize_evaluations(configs)
    assert values(trials.evaluations, configs) == [expected, expected]
    if len(set(rounds)) == 1:
        assert [config.eval_every for config in configs.values()] == list(every)


def test_searches_that_cannot_be_compared_are_refused():
    assert message(lambda: plan(validation_fraction=0.0)) == (
        "there are no validation examples, by which to choose; set validation_fraction to 0.2"
    )
    assert "learning_rate is -1.0; it must be above 0" in message(plan, ["learning_rate=-1"])
    phases = ({"algorithm": "fedavg"}, {"algorithm": "fedper"})
    configs = {m: configuration.complete({**SMALL, "phases": phases}) for m in ("ditto", "local")}
    assert "every phase of ditto names its algorithm" in message(
        search.plan, configs, RATES, 2, None
    )
    assert "(fedavg 1, pfedla 2)" in message(plan, ["pfedla.rate=1,2"], ["fedavg", "pfedla"])
    methods = ("fedavg", "local")
    configs = {m: configuration.complete({**SMALL, "algorithm": m}) for m in methods}
    configs["local"].rounds = 7
    for rounds in (None, 2):
        assert message(search.plan, configs, RATES, rounds, None).startswith(
            "the methods' runs have different client updates (fedavg 6, local 21), and budgets are "
        )
    configs["local"].update(rounds=2, partition_seed=1)
    line = message(search.plan, configs, RATES, None, None)
    assert "the preset gives local other examples than fedavg" in line


def test_errors_of_building_come_before_anything_is_written(tmp_path):
    invalid = plan(["pfedla.normalise=softmax,nothing"], ["pfedla"])
    assert message(trials.run, invalid, 1, tmp_path, None).startswith("pfedla: ")
    unvalidated = plan(validation_fraction=1e-9)
    line = message(trials.run, unvalidated, 1, tmp_path, None)
    assert "no client has validation examples" in line
    assert list(tmp_path.iterdir()) == []


# Programs.


def jobs_of(texts, method):
    (trial,) = plan(texts, [method])
    return [
        Job(method, point, config, "", frozenset())
        for point, configs in trials.configs(trial, 1)
        for config in configs
    ]


def test_programs_share_settings_that_can_be_swept():
    """Shares learning rates; zero and nonzero momentum need two programs."""
    jobs = jobs_of(["momentum=0,.9; learning_rate=.1,.2; batch_size=4,8"], "fedavg")
    groups = trials._group_compatible(jobs)
    assert [len(group) for group in groups] == [4, 4]
    points = [[job.point for job in program] for program in trials._programs(groups[0])]
    assert [[p["momentum"] for p in program] for program in points] == [[0, 0], [0.9, 0.9]]
    assert [p["learning_rate"] for p in points[0]] == [0.1, 0.2]
    assert [len(part) for part in trials._split_evenly(jobs, 3)] == [3, 3, 2]
    assert [len(part) for part in trials._split_evenly(jobs, None)] == [8]


def test_a_number_that_shapes_the_program_needs_several_programs():
    jobs = jobs_of(["learning_rate=.1,.2; pfedpara.gamma=.1,.9"], "pfedpara")
    (group,) = trials._group_compatible(jobs)
    programs = [[tuple(job.point.values()) for job in p] for p in trials._programs(group)]
    assert programs == [[(0.1, 0.1), (0.2, 0.1)], [(0.1, 0.9), (0.2, 0.9)]]


def test_runs_with_different_checkpoints_resume_in_different_programs():
    saved = {"a": (1, 2), "b": (), "c": (2, 3), "d": (5,), "e": (), "f": (3,)}
    point = {"learning_rate": 0.1}
    jobs = [Job("fedavg", point, None, name, frozenset(steps)) for name, steps in saved.items()]
    names = [[job.name for job in group] for group in trials._group_compatible(jobs)]
    assert names == [["a", "c"], ["b", "e"], ["d"], ["f"]]
