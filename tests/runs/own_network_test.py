"""Tests of user-defined networks and tasks: settings, digests, exported files and errors."""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fedjax_pfl
from fedjax_pfl import algorithms
from fedjax_pfl.core.metrics import ACCURACY
from fedjax_pfl.core.task import Task, classification
from fedjax_pfl.runs import export, network_json, run_directory
from fedjax_pfl.runs.build import build
from fedjax_pfl.settings import configuration, custom
from tests.commands import message

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
OWNERS = np.array(["Bern", "Cairo", "Delhi"])[np.arange(48) % 3]
TOKENS = RNG.integers(0, 7, (48, 6))
SETTINGS = {
    "partition": "natural",
    "clients": 3,
    "rounds": 1,
    "eval_every": 1,
    "batch_size": 8,
    "learning_rate": 0.1,
}


def examples(x=X, y=Y):
    return fedjax_pfl.arrays(x, y, owners=OWNERS, name="mine")


class Net(nn.Module):
    outputs: int
    hidden: int = 6
    widths: tuple[int, ...] = (4,)

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.relu(nn.BatchNorm(not train)(nn.Dense(self.hidden)(x)))
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.outputs)(nn.Dropout(0.1, deterministic=not train)(x))


class Modern(nnx.Module):
    def __init__(self, outputs, hidden=6, *, rngs):
        self.body = nnx.Linear(5, hidden, rngs=rngs)
        self.norm = nnx.BatchNorm(hidden, rngs=rngs)
        self.out = nnx.Linear(hidden, outputs, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.body(x))))


def logistic(outputs, *, weight: float = 1.0):
    def loss(outputs, y, classes):
        return weight * classification().loss(outputs, y, classes)

    return Task(loss, (ACCURACY._replace(name="right", unit=""),), has_classes=True)


def resolved(settings, **components):
    """Returns the settings that a run with user-defined components records."""
    settings = {**SETTINGS, **settings}
    registry, settings = custom.register(settings, dataset=examples(), **components)
    config = configuration.complete(settings, registry)
    build(config, registry=registry)
    return configuration.resolve(config, registry)


def test_runs_and_exported_files_need_the_same_network(tmp_path):
    network = {"hidden": 3, "widths": (4, 2)}
    settings = {**SETTINGS, "algorithm": "fedper", "Net": network}
    components = {"dataset": examples(), "model": Net, "task": logistic}
    directory = tmp_path / "run"
    result = fedjax_pfl.run(settings, directory, **components)
    config = json.loads((directory / "config.json").read_text())
    assert (config["model"], config["task"]) == ("Net", "logistic")
    assert (config["Net"]["hidden"], config["Net"]["widths"]) == (3, [4, 2])
    assert config["Net"]["digest"] != config["logistic"]["digest"]
    assert "right_mean" in result.metrics[-1]["before"]
    assert fedjax_pfl.run(settings, directory, **components).resumed_at == 1
    changed = {**settings, "Net": {**network, "digest": "0" * 16}}
    line = message(lambda: fedjax_pfl.run(changed, directory, **components))
    assert "Net.digest is 0000000000000000, but the code has " in line

    line = message(lambda: export.load_result(directory, dataset=examples(), model=Net))
    assert "was run with a task of your own, logistic" in line
    loaded = export.load_result(directory, **components)
    path = export.write_models(loaded, tmp_path / "files")[1]
    line = "a network of your own, Net; use load(path, model=Net)"
    assert line in message(export.load, path)
    assert "it has the network Net, got Modern" in message(export.load, path, Modern)
    model, variables = export.load(path, Net)
    assert export.describe(path)["model"]["settings"]["hidden"] == 3
    head = variables["params"].pop(model.head)
    assert head["kernel"].shape == (2, 2)
    expected = result.state.clients.personal["params"][model.head]["bias"][1]
    np.testing.assert_array_equal(head["bias"], expected)


def nnx_factory(outputs, *, hidden: int = 5, rngs):
    return Modern(outputs, hidden, rngs=rngs)


def linen_factory(outputs, width=4):
    return Net(outputs, width)


class WithScalar(nn.Module):
    @nn.compact
    def __call__(self, x):
        temperature = self.param("temperature", nn.initializers.ones, ())
        return nn.Dense(2)(x) * temperature


def with_narrow_observations(model, training, federation):
    def observe(state):
        temperature = state.clients.variables["params"]["temperature"]
        return {"temperature": temperature.astype(jnp.bfloat16)}

    return algorithms.local(model, training, federation)._replace(observe=observe)


def test_scalar_parameters_and_narrow_observations(tmp_path, capsys):
    """Observations in bfloat16 survive a resume, and scalars an export, of ids from NumPy."""
    components = {
        "dataset": examples(),
        "model": WithScalar,
        "algorithm": with_narrow_observations,
    }
    settings = {**SETTINGS, "rounds": 2, "eval_every": 1, "checkpoint_every": 1}
    run = functools.partial(fedjax_pfl.run, settings, tmp_path / "run", **components)
    run(on_evaluation=lambda line: False)
    result = run()
    assert result.resumed_at == 1
    rounds, arrays = result.observations["temperature"]
    assert (rounds, {array.dtype for array in arrays}) == ([1, 2], {np.dtype(np.float32)})
    (path,) = export.write_models(result, tmp_path / "files", np.array([1]))
    model, variables = export.load(path, WithScalar)
    expected = result.state.clients.variables["params"]["temperature"][1]
    np.testing.assert_array_equal(variables["params"]["temperature"], expected)
    assert model.apply(variables, X[:2]).shape == (2, 2)

    file = tmp_path / "run" / "temperature.npz"
    np.savez(file, rounds=[1], values=np.zeros((1, 2), jnp.bfloat16))
    assert run_directory.read_observations(tmp_path / "run", 2) == {}
    assert "temperature.npz is damaged (its values have a type" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "name", "settings"),
    [
        (Net, "Net", {"hidden": 6, "widths": (4,)}),
        (Net(2, hidden=9), "Net", {"hidden": 9, "widths": (4,)}),
        (Modern, "Modern", {"hidden": 6}),
        (nnx_factory, "nnx_factory", {"hidden": 5}),
        (linen_factory, "linen_factory", {"width": 4}),
    ],
)
def test_settings_of_modules_classes_and_functions(model, name, settings):
    config = resolved({}, model=model)
    assert config["model"] == name
    assert len(config[name].pop("digest")) == 16
    assert config[name] == settings


def kinds(outputs, kind: str = "plain", name: str = "first"):
    return nn.Dense(outputs)


def test_settings_may_have_the_names_of_fields_of_a_model_file():
    registry, _ = custom.register({}, model=kinds)
    network = registry.model["kinds"](outputs=2, kind="deep", name="last")
    content = json.loads(json.dumps(network_json.to_json(network)))
    facts = {"outputs": 2, "input_shape": [5], "input_dtype": "float32"}
    decoded = network_json.from_json(network_json.lists_to_tuples(content), facts, kinds)
    assert (decoded.name, decoded.settings) == (network.name, network.settings)


def test_digests_depend_on_the_code_and_the_fields_of_a_module():
    def typed(width):
        scope = {"nn": nn, "__name__": "typed"}
        exec(
            "class Typed(nn.Module):\n    @nn.compact\n    def __call__(self, x):\n"
            f"        return nn.Dense(2)(nn.Dense({width})(x))",
            scope,
        )
        return scope["Typed"]

    deep = nn.Sequential([nn.Dense(3), nn.relu, nn.Dense(2)])
    models = [nn.Sequential([nn.Dense(2)]), nn.Sequential([nn.Dense(2)]), deep, typed(3), typed(4)]
    digests = [resolved({}, model=model)[custom.object_name(model)]["digest"] for model in models]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_a_configuration_imports_components_by_name(tmp_path, monkeypatch):
    (tmp_path / "somewhere.py").write_text(
        "import flax.linen as nn\nfrom fedjax_pfl.core.task import classification\n"
        "def net(outputs):\n    return nn.Sequential([nn.Dense(outputs)])\n"
        "def learned(outputs):\n    return classification(outputs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = resolved({"model": "somewhere:net", "task": "somewhere:learned"})
    assert (config["model"], config["task"]) == ("net", "learned")
    assert set(config["net"]) == {"digest"}
    for model, line in (
        (
            "nowhere:net",
            "model is 'nowhere:net', MODULE:NAME, and cannot be loaded: No module named",
        ),
        ("somewhere:nett", "cannot be loaded: module 'somewhere' has no attribute 'nett'"),
    ):
        assert line in message(resolved, {"model": model})
    line = message(lambda: resolved({"model": "somewhere:net"}, model=Net))
    assert "and model= is given too" in line


def without_rngs(outputs):
    return Modern(outputs, rngs=nnx.Rngs(0))


def needs(outputs, hidden):
    return Net(outputs, hidden)


def nothing(outputs):
    return None


class Thirsty(nnx.Module):
    """Module whose Dropout has no random numbers."""

    def __init__(self, outputs, *, rngs):
        self.dropout = nnx.Dropout(0.5)
        self.head = nnx.Linear(5, outputs, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(x))


class Narrow(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(7)(x)


class Counts(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        counts = self.param("bias", nn.initializers.zeros, (self.outputs,), jnp.int32)
        return nn.Dense(self.outputs)(x) + counts.astype(jnp.float32)[None]


class Small(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(nn.Embed(5, 4)(x))


@pytest.mark.parametrize(
    ("settings", "components", "line"),
    [
        ({}, {"model": "mlp"}, "model= must be a linen module, an NNX class or a function that"),
        (
            {},
            {"model": Modern(2, rngs=nnx.Rngs(0))},
            "model=Modern is an NNX module that has parameters already",
        ),
        (
            {},
            {"model": without_rngs},
            "without_rngs returns an NNX module; give it an argument rngs",
        ),
        ({}, {"model": needs}, "needs needs hidden; give it a default, or pass a function that"),
        ({}, {"model": nothing}, "nothing must return a linen or NNX module, got NoneType"),
        (
            {"model": "mlp"},
            {"model": Net},
            "the settings select model='mlp', and model= passes Net",
        ),
        (
            {"task": "tokens"},
            {"task": logistic},
            "the settings select task='tokens', and task= passes",
        ),
        ({"model": Net}, {}, "model in the settings must be a name, got <class "),
        (
            {"optimizer": optax.sgd(0.1)},
            {},
            "optimizer in the settings must be a name, got Gradient",
        ),
        ({}, {"model": Thirsty}, "Thirsty fails for examples (5,): `deterministic` is False, but "),
        ({}, {"model": Counts}, "Counts has bias, a parameter of int32; use real numbers"),
        ({}, {"model": Narrow}, "Narrow gives [2, 7] for 2 examples, and their task needs [2, 2]"),
        (
            {},
            {"model": "lstm", "x": TOKENS},
            "lstm gives [2, 6, 2] for 2 examples, and their task needs [2, 2], an output for each",
        ),
        (
            {},
            {"model": Small, "x": TOKENS, "y": TOKENS},
            "mine: one of the training examples of client ",
        ),
        ({"model": "mlp"}, {"y": TOKENS}, "mlp gives [2, 7] for 2 examples, and their task needs"),
        ({"task": "tokens"}, {}, "task tokens learns integer classes of each position [examples,"),
        ({"task": "token"}, {}, "there is no task 'token'; did you mean tokens?"),
        ({"metrics": "auroc,f1"}, {}, "metrics: task classification has none called 'f1'; there"),
        ({}, {"task": nothing}, "nothing must return a Task, got NoneType"),
        ({}, {"task": Net(2)}, "Net must take (outputs), and its settings by keyword"),
        ({"algorithm": "fedmn"}, {"model": Net}, "fedmn routes examples with one label through"),
        ({"algorithm": "fedem", "model": "lstm"}, {"x": TOKENS, "y": TOKENS}, "fedem mixes probab"),
    ],
)
def test_invalid_components_are_refused_before_compilation(settings, components, line, monkeypatch):
    components = dict(components)
    if components.get("model") == "lstm":
        settings = {**settings, "model": components.pop("model")}
    data = examples(components.pop("x", X), components.pop("y", Y))

    def compiled(*arguments, **keywords):
        raise AssertionError

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    error = message(lambda: fedjax_pfl.run({**SETTINGS, **settings}, dataset=data, **components))
    assert error.startswith(line), error


def test_invalid_tokens_are_named():
    def line(x):
        return message(lambda: fedjax_pfl.run(SETTINGS, dataset=examples(x, TOKENS), model=Small))

    too_large = line(TOKENS)
    assert "has the token " in too_large
    assert "of x, and Small embeds those from 0 to 4; give it a larger vocabulary" in too_large
    negative = line(np.where(TOKENS > 4, -3, TOKENS))
    assert negative.endswith("from 0 to 4; number tokens from 0")


@pytest.mark.parametrize("network", [Net, Modern])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "pfedla", "pfedhn", "factorized_fl"])
def test_user_defined_networks_under_different_methods(network, method, tmp_path):
    """Compares predictions of exported files with the accuracies of the run."""
    settings = {**SETTINGS, "algorithm": method, "rounds": 2, "evaluate_after": False}
    result = fedjax_pfl.run(settings, tmp_path / "run", dataset=examples(), model=network)
    test = result.data.test
    for i, path in enumerate(export.write_models(result, tmp_path / "files")):
        model, variables = export.load(path, network)
        rows = np.asarray(test.rows[i])[: int(test.size[i])]
        predictions = jnp.argmax(model.apply(variables, result.data.x[rows]), -1)
        accuracy = np.mean(np.asarray(predictions) == np.asarray(result.data.y)[rows])
        assert accuracy == pytest.approx(result.clients[i]["before_accuracy"])
