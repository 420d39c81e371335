"""Tests of user-defined examples and methods: names, settings, digests and errors."""

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


def examples(name="mine", x=X, **options):
    return fedjax_pfl.arrays(x, Y, owners=OWNERS, name=name, **options)


def mine(model, training, federation, *, share: float = 0.5):
    return algorithms.fedavg(model, training, federation)


@pytest.mark.slow("several runs")
def test_configuration_holds_names_and_settings_of_components(tmp_path):
    result = fedjax_pfl.run(
        {**SETTINGS, "mine": {"share": 0.25}},
        tmp_path,
        dataset=examples("examples"),
        algorithm=mine,
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dataset"], config["algorithm"]) == ("examples", "mine")
    assert config["mine"].pop("digest")
    assert config["mine"] == {"share": 0.25}
    assert config["examples"] == {"digest": custom.dataset_digest(examples())}
    assert result.federation.clients == 4
    # Only the same components resume the run.

    def resume(**components):
        return fedjax_pfl.run(
            {**SETTINGS, "mine": {"share": 0.25}},
            tmp_path,
            **{"dataset": examples("examples"), "algorithm": mine, **components},
        )

    assert resume().resumed_at == 1
    line = message(lambda: resume(dataset=examples("examples", -X)))
    assert "holds a run with other settings: examples.digest (" in line
    # The recorded configuration can be given again, with the same examples.
    components = {"dataset": examples("examples"), "algorithm": mine}
    assert fedjax_pfl.run(config, tmp_path, **components).resumed_at == 1
    line = message(
        lambda: fedjax_pfl.run(config, **{**components, "dataset": examples("examples", -X)})
    )
    assert "use the examples of the configuration" in line


def test_register_does_not_change_the_builtins():
    before = configuration.default().to_dict()
    registry, _ = custom.register({}, dataset=examples(), algorithm=mine_too)
    assert set(registry.dataset) - set(configuration.DATASETS) == {"mine"}
    assert configuration.default().to_dict() == before
    assert "mine_too" not in configuration.ALGORITHMS


def mine_too(model, training, federation):
    return algorithms.local(model, training, federation)


def test_user_defined_and_built_in_methods_in_phases():
    phases = ({"rounds": 2}, {"algorithm": "mine", "mine": {"share": 0.1}, "rounds": 3})
    registry, given = custom.register(
        {**SETTINGS, "algorithm": "fedavg", "phases": phases},
        dataset=examples("examples"),
        algorithm=mine,
    )
    built = build(configuration.complete(given, registry), registry=registry)
    assert [phase.config.algorithm for phase in built.phases] == ["fedavg", "mine"]
    assert built.phases[1].config.mine.share == 0.1


def versions():
    """Returns two factories with one name, and the first one again."""

    def make_local():
        def method(model, training, federation, *, share: float = 0.5):
            return algorithms.local(model, training, federation)

        return method

    def make_fedavg():
        def method(model, training, federation, *, share: float = 0.5):
            return algorithms.fedavg(model, training, federation)

        return method

    return make_local(), make_fedavg(), make_local()


def test_configuration_of_another_version_of_a_method_is_refused():
    def resolved(factory):
        registry, given = custom.register(
            {**SETTINGS}, dataset=examples("examples"), algorithm=factory
        )
        config = configuration.complete(given, registry)
        return configuration.resolve(config, registry), registry, config

    (first, registry, config), (second, *_), (again, *_) = map(resolved, versions())
    assert first == again
    (line,) = differences(first, second)
    assert line.startswith("method.digest ('")
    config.method.digest = second["method"]["digest"]
    with pytest.raises(UsageError, match=r"method\.digest is \w+, but the function has"):
        build(config, registry=registry)


def test_function_without_source_has_a_digest():
    digests = set()
    for share in (1, 2):
        scope = {}
        exec(f"def typed(model, training, federation): return [model, {share}]", scope)
        typed = scope["typed"]
        versioned = custom._with_digest("typed", typed, custom._source_digest(typed))
        digests.add(configuration.factory_settings(versioned)["digest"])
    assert len(digests) == 2


def test_dataset_digests_differ():
    digest = custom.dataset_digest(examples())
    assert custom.dataset_digest(examples("other")) == digest
    assert (
        len(
            {
                digest,
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
    ("components", "line"),
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
def test_invalid_components_are_refused(components, line):
    settings = {
        key: value for key, value in SETTINGS.items() if key not in ("partition", "clients")
    }
    assert message(lambda: fedjax_pfl.run(settings, **components)).startswith(line)


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
def test_settings_that_contradict_components_are_refused(settings, line):
    components = {"dataset": examples(), "algorithm": mine_too}
    assert message(lambda: fedjax_pfl.run({**SETTINGS, **settings}, **components)).startswith(line)


def test_factory_with_arbitrary_keywords():
    def loose(model, training, federation, **settings):
        return mine(model, training, federation, **settings)

    registry, _ = custom.register({}, algorithm=loose)
    assert list(configuration.factory_settings(registry.algorithm["loose"])) == ["digest"]


@pytest.mark.slow("several runs")
def test_code_without_source_has_the_same_digest_in_every_process():
    code = """
from fedjax_pfl.settings import custom
space = {}
exec("def typed(*given):\\n    return given in {'a', 'b', 'c', 'd'}", space)
print(custom._code_text(space["typed"].__code__))
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


def test_settings_that_are_no_mapping_are_refused():
    line = message(lambda: fedjax_pfl.run("fedavg"))
    assert line == "settings must be a mapping, such as {'algorithm': 'fedavg'}, got 'fedavg'"
    assert message(lambda: fedjax_pfl.run([])).endswith("got []")
