"""Tests of user-defined examples and methods: names, settings, digests and errors."""

import functools
import json
import os
import subprocess
import sys
from fractions import Fraction
from typing import Optional

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_pfl
from fedjax_pfl import algorithms
from fedjax_pfl.runs.build import build
from fedjax_pfl.settings import configuration, custom
from fedjax_pfl.settings.differences import differences
from tests.commands import message

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 5)).astype(np.float32), RNG.integers(0, 3, 60)
OWNERS = np.arange(60) % 4
SETTINGS = {
    "model": "mlp",
    "partition": "natural",
    "clients": 4,
    "rounds": 1,
    "eval_every": 1,
    "evaluate_after": False,
}


def examples(name="examples", x=X, **options):
    return fedjax_pfl.arrays(x, Y, owners=OWNERS, name=name, **options)


def mine(model, training, federation, *, share: float = 0.5):
    return algorithms.fedavg(model, training, federation)


@pytest.mark.slow("several runs")
def test_only_the_same_components_resume_a_run(tmp_path):
    settings = {**SETTINGS, "mine": {"share": 0.25}}
    components = {"dataset": examples(), "algorithm": mine}
    result = fedjax_pfl.run(settings, tmp_path, **components)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dataset"], config["algorithm"]) == ("examples", "mine")
    assert config["mine"].keys() == {"digest", "share"}
    assert config["mine"]["share"] == 0.25
    assert config["examples"] == {"digest": custom.dataset_digest(examples())}
    assert result.federation.clients == 4

    assert fedjax_pfl.run(settings, tmp_path, **components).resumed_at == 1
    assert fedjax_pfl.run(config, tmp_path, **components).resumed_at == 1
    changed = {**components, "dataset": examples(x=-X)}
    line = message(lambda: fedjax_pfl.run(settings, tmp_path, **changed))
    assert "holds a run with other settings: examples.digest (" in line
    line = message(lambda: fedjax_pfl.run(config, **changed))
    assert "use the examples of the configuration" in line


def test_register_does_not_change_the_builtins():
    default = configuration.default().to_dict()
    registry, _ = custom.register({}, dataset=examples(), algorithm=mine)
    assert set(registry.dataset) - set(configuration.DATASETS) == {"examples"}
    assert configuration.default().to_dict() == default
    assert "mine" not in configuration.ALGORITHMS


def test_user_defined_and_built_in_methods_in_phases():
    phases = ({"rounds": 2}, {"algorithm": "mine", "mine": {"share": 0.1}, "rounds": 3})
    settings = {**SETTINGS, "algorithm": "fedavg", "phases": phases}
    registry, settings = custom.register(settings, dataset=examples(), algorithm=mine)
    built = build(configuration.complete(settings, registry), registry=registry)
    assert [phase.config.algorithm for phase in built.phases] == ["fedavg", "mine"]
    assert built.phases[1].config.mine.share == 0.1


def with_integer_defaults(
    model,
    training,
    federation,
    *,
    beta: float = 1,
    rates: tuple[float, ...] | None = (1, 2),
    n: int = 3,
    scale: Optional[float] = 2,  # noqa: UP045
    bound: int | float | None = None,
):
    return algorithms.local(model, training, federation)


def test_integers_may_be_the_defaults_of_real_numbers():
    registry, _ = custom.register({}, algorithm=with_integer_defaults)
    values = {"beta": 0.5, "rates": (0.5,), "n": 4, "scale": 0.25, "bound": 1.5}
    settings = {"with_integer_defaults": values}
    config = configuration.complete(settings, registry).with_integer_defaults.to_dict()
    assert {name: config[name] for name in values} == values


def with_a_reserved_name(model, training, federation, *, outputs: int = 3):
    return algorithms.local(model, training, federation)


def local_version():
    def method(model, training, federation, *, share: float = 0.5):
        return algorithms.local(model, training, federation)

    return method


def fedavg_version():
    def method(model, training, federation, *, share: float = 0.5):
        return algorithms.fedavg(model, training, federation)

    return method


def test_configuration_of_another_version_of_a_method_is_refused():
    def resolved(factory):
        registry, settings = custom.register(SETTINGS, dataset=examples(), algorithm=factory)
        config = configuration.complete(settings, registry)
        return configuration.resolve(config, registry), registry, config

    first, registry, config = resolved(local_version())
    second = resolved(fedavg_version())[0]
    assert first == resolved(local_version())[0]
    (line,) = differences(first, second)
    assert line.startswith("method.digest ('")
    config.method.digest = second["method"]["digest"]
    line = message(lambda: build(config, registry=registry))
    assert line.startswith("method.digest is ")
    assert ", but the code has" in line


def test_functions_without_source_differ_in_their_digests():
    digests = set()
    for share in (1, 2):
        scope = {}
        exec(f"def typed(model, training, federation): return [model, {share}]", scope)
        registry, _ = custom.register({}, algorithm=scope["typed"])
        digests.add(configuration.factory_settings(registry.algorithm["typed"])["digest"])
    assert len(digests) == 2


@pytest.mark.slow("several processes")
def test_code_without_source_has_the_same_digest_in_every_process():
    code = """
from fedjax_pfl.settings import custom
scope = {}
exec("def typed(*values):\\n    return values in {'a', 'b', 'c', 'd'}", scope)
print(custom._code_text(scope["typed"].__code__))
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


class Rate:
    """Schedule with a value of its own, and a reference to itself."""

    def __init__(self, value):
        self.value, self.owner = value, self

    def __call__(self, count):
        return self.value

    def at(self, count):
        return self.value


@pytest.mark.parametrize("schedule", [Rate, lambda value: Rate(value).at])
def test_names_of_optimizers_depend_on_the_attributes_of_a_schedule(schedule):
    def name(value):
        return custom.register({}, optimizer=optax.sgd(schedule(value)))[1]["optimizer"]

    assert name(0.1) == name(0.1) != name(0.2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (frozenset("ab"), frozenset("ac")),
        (b"a", b"b"),
        (range(2), range(3)),
        (Fraction(1, 2), Fraction(1, 3)),
        (np.float32, np.float16),
        (jnp.float32, jnp.bfloat16),
    ],
)
def test_names_of_optimizers_depend_on_what_a_schedule_closes_over(first, second):
    def name(value):
        def schedule(count):
            return 0.1 if value else 0.2

        return custom.register({}, optimizer=optax.sgd(schedule))[1]["optimizer"]

    assert name(first) == name(first) != name(second)


def test_dataset_digests_depend_on_everything_but_the_name():
    different = (
        examples(),
        examples(x=X + 1e-6),
        examples(outputs=4),
        examples(scale=2.0),
        fedjax_pfl.arrays(X, Y, owners=OWNERS[::-1]),
    )
    digests = [custom.dataset_digest(dataset) for dataset in different]
    assert len(set(digests)) == len(digests)
    assert custom.dataset_digest(examples("another")) == digests[0]


def with_name(name):
    def factory(model, training, federation): ...

    factory.__name__ = name
    return factory


def too_few(model, task): ...
def without_default(model, training, federation, *, beta: float): ...
def without_type(model, training, federation, *, beta=0.9): ...
def with_any_object(model, training, federation, *, beta: object = None): ...
def with_an_array(model, training, federation, *, beta: np.ndarray = X): ...


def with_unknown_type(model, training, federation: "Unknown"): ...  # noqa: F821


class CallableObject:
    def __call__(self, model, training, federation): ...


@pytest.mark.parametrize(
    ("components", "line"),
    [
        ({"datset": examples()}, "run has no argument 'datset'; did you mean 'dataset'? it takes "),
        ({"dataset": (X, Y)}, "dataset= must be a Dataset, such as fedjax_pfl.arrays(x, y)"),
        ({"dataset": examples("digits")}, "'digits' is the name of a built-in dataset already; us"),
        ({"dataset": examples("rounds")}, "'rounds' is the name of a setting already; use arrays("),
        ({"dataset": examples("my data")}, "'my data' cannot name the dataset in a configuration"),
        ({"algorithm": with_name("fedavg")}, "'fedavg' is the name of a built-in algorithm alread"),
        ({"algorithm": "fedavg"}, "algorithm= must be a function, got 'fedavg'; select a built-in"),
        ({"algorithm": with_name("<lambda>")}, "'<lambda>' cannot name the algorithm"),
        ({"algorithm": too_few}, "too_few must take (model, training, federation), and"),
        ({"algorithm": dict}, "dict must take (model, training, federation), and"),
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
        (
            {"algorithm": with_unknown_type},
            "the types of the arguments of with_unknown_type cannot be read (name 'Unknown' is",
        ),
        (
            {"algorithm": functools.partial(mine, share=0.1)},
            "partial is no function; write a function that calls it",
        ),
        ({"algorithm": CallableObject()}, "CallableObject is no function; write a function"),
        ({"algorithm": with_name("mine")}, "mine must return an Algorithm, got NoneType"),
        ({"algorithm": with_a_reserved_name}, "with_a_reserved_name has a setting outputs, a rese"),
    ],
)
def test_invalid_components_are_refused(components, line):
    settings = {"model": "mlp", "rounds": 1}
    assert message(lambda: fedjax_pfl.run(settings, **components)).startswith(line)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"dataset": "digits"}, "the settings select dataset='digits', and dataset= passes 'examp"),
        ({"fraction": 0.5}, "fraction is for datasets by name; give fewer examples instead"),
        (
            {"clients": 9},
            "9 clients need as many owners with 1 or more examples, and there are 4: use clients=4",
        ),
        ({"algorithm": "min"}, "there is no algorithm 'min'; did you mean mine?"),
        ({"minee": 1}, "there is no setting minee"),
        (
            {"phases": ({"optimizer": "sgd"}, {"optimizer": "adam"})},
            "the settings select optimizer='own-",
        ),
    ],
)
def test_settings_that_contradict_components_are_refused(settings, line):
    components = {"dataset": examples(), "algorithm": mine, "optimizer": optax.sgd(0.1)}
    assert message(lambda: fedjax_pfl.run({**SETTINGS, **settings}, **components)).startswith(line)


@pytest.mark.parametrize(
    ("content", "problem"),
    [("def", "invalid syntax"), ("mine = undefined", "name 'undefined' is not defined")],
)
def test_modules_that_cannot_be_imported(content, problem, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    line = message(custom.register, {"algorithm": "broken_module:mine"})
    assert line.startswith("algorithm is 'broken_module:mine', MODULE:NAME, and cannot be loaded: ")
    assert problem in line
    assert "cannot be loaded: " in message(custom.register, {"algorithm": ".relative:mine"})


class Activations(nn.Module):
    outputs: int = 3
    functions: tuple = (nn.relu, nn.tanh)
    widths: tuple = (4, 5)

    @nn.compact
    def __call__(self, x):
        for function, width in zip(self.functions, self.widths, strict=True):
            x = function(nn.Dense(width)(x))
        return nn.Dense(self.outputs)(x)


def test_a_tuple_of_functions_is_no_setting_of_a_network():
    registry, _ = custom.register({}, model=Activations)
    settings = configuration.factory_settings(registry.model["Activations"])
    assert settings.keys() == {"widths", "digest"}
    json.dumps(settings)


def test_factory_with_arbitrary_keywords():
    def loose(model, training, federation, **settings):
        return mine(model, training, federation, **settings)

    registry, _ = custom.register({}, algorithm=loose)
    assert list(configuration.factory_settings(registry.algorithm["loose"])) == ["digest"]


def test_settings_that_are_no_mapping_are_refused():
    line = message(lambda: fedjax_pfl.run("fedavg"))
    assert line == "settings must be a mapping, such as {'algorithm': 'fedavg'}, got 'fedavg'"
