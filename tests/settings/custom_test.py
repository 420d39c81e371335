"""Examples and methods that a caller brings for one run: names, settings, digests, errors."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import fedjax_pfl
from fedjax_pfl import algorithms
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs.build import build
from fedjax_pfl.settings import configuration, custom
from fedjax_pfl.settings.differences import differences
from tests.commands import message

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(60, 5)).astype(np.float32), DRAW.integers(0, 3, 60)
OWNERS = np.arange(60) % 4
SETTINGS = {
    "model": "mlp",
    "partition": "natural",
    "clients": 4,
    "rounds": 1,
    "eval_every": 1,
    "evaluate_after": False,
}


def examples(name="mine", x=X, **given):
    return fedjax_pfl.arrays(x, Y, owners=OWNERS, name=name, **given)


def mine(model, training, federation, *, share: float = 0.5):
    return algorithms.fedavg(model, training, federation)


@pytest.mark.slow("several runs")
def test_the_configuration_names_both_and_holds_their_settings(tmp_path):
    result = fedjax_pfl.run(
        {**SETTINGS, "mine": {"share": 0.25}},
        tmp_path,
        dataset=examples("examples"),
        algorithm=mine,
    )
    there = json.loads((tmp_path / "config.json").read_text())
    assert (there["dataset"], there["algorithm"]) == ("examples", "mine")
    assert there["mine"].pop("digest")
    assert there["mine"] == {"share": 0.25}
    assert there["examples"] == {"digest": custom.dataset_digest(examples())}
    assert result.federation.clients == 4
    # Goes on with the same, refuses others.

    def again(**given):
        return fedjax_pfl.run(
            {**SETTINGS, "mine": {"share": 0.25}},
            tmp_path,
            **{"dataset": examples("examples"), "algorithm": mine, **given},
        )

    assert again().resumed_at == 1
    line = message(lambda: again(dataset=examples("examples", -X)))
    assert "holds a run with other settings: examples.digest (" in line
    # What is kept can be given again, with the same examples.
    given = {"dataset": examples("examples"), "algorithm": mine}
    assert fedjax_pfl.run(there, tmp_path, **given).resumed_at == 1
    line = message(lambda: fedjax_pfl.run(there, **{**given, "dataset": examples("examples", -X)}))
    assert "use the examples of the configuration" in line


def test_the_library_is_as_it_was():
    before = configuration.default().to_dict()
    words, _ = custom.register({}, dataset=examples(), algorithm=mine_too)
    assert set(words.dataset) - set(configuration.DATASETS) == {"mine"}
    assert configuration.default().to_dict() == before
    assert "mine_too" not in configuration.ALGORITHMS


def mine_too(model, training, federation):
    return algorithms.local(model, training, federation)


def test_a_method_of_ones_own_in_a_phase_and_beside_ours():
    phases = ({"rounds": 2}, {"algorithm": "mine", "mine": {"share": 0.1}, "rounds": 3})
    words, given = custom.register(
        {**SETTINGS, "algorithm": "fedavg", "phases": phases},
        dataset=examples("examples"),
        algorithm=mine,
    )
    built = build(configuration.complete(given, words), registry=words)
    assert [phase.config.algorithm for phase in built.phases] == ["fedavg", "mine"]
    assert built.phases[1].config.mine.share == 0.1


def versions():
    """Two factories of one name, and the first one again."""

    def one():
        def method(model, training, federation, *, share: float = 0.5):
            return algorithms.local(model, training, federation)

        return method

    def other():
        def method(model, training, federation, *, share: float = 0.5):
            return algorithms.fedavg(model, training, federation)

        return method

    return one(), other(), one()


def test_a_directory_of_another_version_of_a_method_is_refused():
    def resolved(factory):
        words, given = custom.register(
            {**SETTINGS}, dataset=examples("examples"), algorithm=factory
        )
        config = configuration.complete(given, words)
        return configuration.resolve(config, words), words, config

    (first, words, config), (second, *_), (again, *_) = map(resolved, versions())
    assert first == again
    (line,) = differences(first, second)
    assert line.startswith("method.digest ('")
    config.method.digest = second["method"]["digest"]
    with pytest.raises(UsageError, match=r"method\.digest is \w+, but the function has"):
        build(config, registry=words)


def test_a_function_without_source_has_a_digest_too():
    made = set()
    for share in (1, 2):
        scope = {}
        exec(f"def typed(model, training, federation): return [model, {share}]", scope)
        typed = scope["typed"]
        versioned = custom._with_digest("typed", typed, custom._source_digest(typed))
        made.add(configuration.factory_settings(versioned)["digest"])
    assert len(made) == 2


def test_digests_tell_examples_apart():
    one = custom.dataset_digest(examples())
    assert custom.dataset_digest(examples("other")) == one
    assert (
        len(
            {
                one,
                custom.dataset_digest(examples(x=X + 1e-6)),
                custom.dataset_digest(examples(outputs=4)),
                custom.dataset_digest(examples(scale=2.0)),
                custom.dataset_digest(fedjax_pfl.arrays(X, Y, owners=OWNERS[::-1])),
            }
        )
        == 5
    )


def named(name):
    def factory(model, training, federation):
        return None

    factory.__name__ = name
    return factory


def without_type(model, training, federation, *, beta=0.9):
    return None


def with_any_object(model, training, federation, *, beta: object = None):
    return None


def with_an_array(model, training, federation, *, beta: np.ndarray = X):
    return None


def without_default(model, training, federation, *, beta: float):
    return None


def too_few(model, task):
    return None


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"dataset": (X, Y)}, "dataset= must be a Dataset, such as fedjax_pfl.arrays(x, y)"),
        (
            {"dataset": examples("digits")},
            "'digits' is the name of a built-in dataset already; use arrays(",
        ),
        ({"dataset": examples("rounds")}, "'rounds' is the name of a setting already; use arrays("),
        ({"dataset": examples("my data")}, "'my data' cannot name the dataset in a configuration"),
        (
            {"algorithm": named("fedavg")},
            "'fedavg' is the name of a built-in algorithm already; use",
        ),
        ({"algorithm": "fedavg"}, "algorithm= must be a function, got 'fedavg'; select a built-in"),
        ({"algorithm": named("<lambda>")}, "'<lambda>' cannot name the algorithm"),
        ({"algorithm": too_few}, "too_few must take (model, training, federation), and"),
        ({"algorithm": without_default}, "without_default must take (model, training, federation"),
        ({"algorithm": without_type}, "without_type must give its setting beta a type"),
        (
            {"algorithm": with_any_object},
            "with_any_object: no configuration can hold NoneType as the default of beta; use",
        ),
        (
            {"algorithm": with_an_array},
            "with_an_array: no configuration can hold ndarray as the default of beta; use",
        ),
        ({"algorithm": named("mine")}, "mine must return an Algorithm, got NoneType"),
    ],
)
def test_what_is_wrong_with_what_is_brought(given, line):
    plain = {key: value for key, value in SETTINGS.items() if key not in ("partition", "clients")}
    assert message(lambda: fedjax_pfl.run(plain, **given)).startswith(line)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"dataset": "digits"},
            "the settings select dataset='digits', and dataset= passes 'mine'",
        ),
        ({"fraction": 0.5}, "fraction is for datasets by name; give fewer examples instead"),
        (
            {"clients": 9},
            "9 clients need as many owners with 1 or more examples, and there are 4: use clients=4",
        ),
        ({"algorithm": "min"}, "there is no algorithm 'min'; did you mean mine_too?"),
        ({"mine_tooo": 1}, "there is no setting mine_tooo"),
    ],
)
def test_settings_that_do_not_go_with_it(settings, line):
    given = {"dataset": examples(), "algorithm": mine_too}
    assert message(lambda: fedjax_pfl.run({**SETTINGS, **settings}, **given)).startswith(line)


def test_a_factory_that_takes_any_setting():
    def loose(model, training, federation, **more):
        return mine(model, training, federation, **more)

    words, _ = custom.register({}, algorithm=loose)
    assert list(configuration.factory_settings(words.algorithm["loose"])) == ["digest"]


@pytest.mark.slow("several runs")
def test_code_without_a_source_is_known_by_what_it_does():
    """The order of a set is another one in each process, and no part of the code."""
    code = """
from fedjax_pfl.settings import custom
space = {}
exec("def typed(*given):\\n    return given in {'a', 'b', 'c', 'd'}", space)
print(custom._code_text(space["typed"].__code__))
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_settings_that_are_no_mapping():
    line = message(lambda: fedjax_pfl.run("fedavg"))
    assert line == "settings must be a mapping, such as {'algorithm': 'fedavg'}, got 'fedavg'"
    assert message(lambda: fedjax_pfl.run([])).endswith("got []")
