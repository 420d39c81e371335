"""Networks and tasks that a caller brings: settings, digests, files, and what is refused."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fedjax_pfl
from fedjax_pfl.core.scores import ACCURACY
from fedjax_pfl.core.task import Task, classification
from fedjax_pfl.runs import export
from fedjax_pfl.runs.build import build
from fedjax_pfl.settings import configuration, custom
from tests.commands import message

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(48, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
WHO = np.array(["Bern", "Cairo", "Delhi"])[np.arange(48) % 3]
TOKENS = DRAW.integers(0, 7, (48, 6))
SETTINGS = {
    "partition": "natural",
    "clients": 3,
    "rounds": 1,
    "eval_every": 1,
    "batch_size": 8,
    "learning_rate": 0.1,
}


def examples(x=X, y=Y, **more):
    return fedjax_pfl.arrays(x, y, owners=WHO, name="mine", **more)


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


def written(settings, **brought):
    """Settings as a run directory has them, of a run that is not run."""
    words, given = custom.register({**SETTINGS, **settings}, dataset=examples(), **brought)
    config = configuration.complete(given, words)
    build(config, registry=words)
    return configuration.resolve(config, words)


def test_a_directory_goes_on_with_the_same_network_and_files_are_read_back(tmp_path):
    settings = {**SETTINGS, "algorithm": "fedper", "Net": {"hidden": 3, "widths": (4, 2)}}

    def run(**more):
        brought = {"dataset": examples(), "model": Net, "task": logistic}
        return fedjax_pfl.run({**settings, **more}, tmp_path / "run", **brought)

    result = run()
    there = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (there["model"], there["task"]) == ("Net", "logistic")
    assert (there["Net"]["hidden"], there["Net"]["widths"]) == (3, [4, 2])
    assert there["Net"]["digest"] != there["logistic"]["digest"]
    assert "right_mean" in result.metrics[-1]["before"]
    assert run().resumed_at == 1
    other = {"Net": {**settings["Net"], "digest": "0" * 16}}
    assert "Net.digest is 0000000000000000, but the code has" in message(lambda: run(**other))
    # And what is exported is what the client is served.
    assert "was run with a task of your own, logistic" in message(
        lambda: export.load_result(tmp_path / "run", dataset=examples(), model=Net)
    )
    brought = {"dataset": examples(), "model": Net, "task": logistic}
    paths = export.write_models(export.load_result(tmp_path / "run", **brought), tmp_path / "files")
    assert "a network of your own, Net; use load(path, model=Net)" in message(
        lambda: export.load(paths[1])
    )
    assert "network Net, got Modern" in message(lambda: export.load(paths[1], Modern))
    model, variables = export.load(paths[1], Net)
    assert export.describe(paths[1])["model"]["hidden"] == 3
    head = variables["params"].pop(model.head)
    assert head["kernel"].shape == (2, 2)
    np.testing.assert_array_equal(
        head["bias"], result.state.clients.personal["params"][model.head]["bias"][1]
    )


def test_modules_classes_and_functions_and_their_settings():
    def made(outputs, *, hidden: int = 5, rngs):
        return Modern(outputs, hidden, rngs=rngs)

    def linen(outputs, width=4):
        return Net(outputs, width)

    for brought, name, own in (
        (Net, "Net", {"hidden": 6, "widths": (4,)}),
        (Net(2, hidden=9), "Net", {"hidden": 9, "widths": (4,)}),
        (Modern, "Modern", {"hidden": 6}),
        (made, "made", {"hidden": 5}),
        (linen, "linen", {"width": 4}),
    ):
        config = written({}, model=brought)
        assert config["model"] == name
        assert len(config[name].pop("digest")) == 16
        assert config[name] == own


def test_digests_follow_the_code_and_what_a_module_is_made_with():
    def digest(brought):
        return written({}, model=brought)[custom.object_name(brought)]["digest"]

    one, other = nn.Sequential([nn.Dense(2)]), nn.Sequential([nn.Dense(3), nn.relu, nn.Dense(2)])
    assert digest(one) == digest(nn.Sequential([nn.Dense(2)])) != digest(other)
    made = []
    for width in (3, 4):
        scope = {"nn": nn, "__name__": "typed"}
        exec(
            "class Typed(nn.Module):\n    @nn.compact\n    def __call__(self, x):\n"
            f"        return nn.Dense(2)(nn.Dense({width})(x))",
            scope,
        )
        made.append(digest(scope["Typed"]))
    assert made[0] != made[1]


def test_a_configuration_imports_what_it_names(tmp_path, monkeypatch):
    (tmp_path / "somewhere.py").write_text(
        "import flax.linen as nn\nfrom fedjax_pfl.core.task import classification\n"
        "def net(outputs):\n    return nn.Dense(outputs)\n"
        "def learned(outputs):\n    return classification(outputs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = written({"model": "somewhere:net", "task": "somewhere:learned"})
    assert (config["model"], config["task"]) == ("net", "learned")
    assert set(config["net"]) == {"digest"}
    for said, line in (
        (
            "nowhere:net",
            "model is 'nowhere:net', MODULE:NAME, and cannot be loaded: No module named",
        ),
        ("somewhere:nett", "cannot be loaded: module 'somewhere' has no attribute 'nett'"),
    ):
        assert line in message(lambda said=said: written({"model": said}))
    both = {"model": "somewhere:net"}
    assert "and model= is given too" in message(lambda: written(both, model=Net))


def without_rngs(outputs):
    return Modern(outputs, rngs=nnx.Rngs(0))


def needs(outputs, hidden):
    return Net(outputs, hidden)


def nothing(outputs):
    return None


class Thirsty(nnx.Module):
    """Its Dropout has no random numbers."""

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
        whole = self.param("bias", nn.initializers.zeros, (self.outputs,), jnp.int32)
        return nn.Dense(self.outputs)(x) + whole.astype(jnp.float32)[None]


class Small(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(nn.Embed(5, 4)(x))


@pytest.mark.parametrize(
    ("settings", "brought", "line"),
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
def test_what_is_refused_before_anything_is_compiled(settings, brought, line, monkeypatch):
    given = dict(brought)
    if given.get("model") == "lstm":
        settings = {**settings, "model": given.pop("model")}
    data = examples(given.pop("x", X), given.pop("y", Y))

    def compiled(*arguments, **more):
        raise AssertionError("something was compiled")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    said = message(lambda: fedjax_pfl.run({**SETTINGS, **settings}, dataset=data, **given))
    assert said.startswith(line), said


def test_a_token_without_a_row_is_named():
    data = examples(TOKENS, TOKENS)
    said = message(lambda: fedjax_pfl.run(SETTINGS, dataset=data, model=Small))
    assert "has the token " in said
    assert "of x, and Small embeds those from 0 to 4; give it a larger vocabulary" in said
    negative = examples(np.where(TOKENS > 4, -3, TOKENS), TOKENS)
    said = message(lambda: fedjax_pfl.run(SETTINGS, dataset=negative, model=Small))
    assert said.endswith("from 0 to 4; number tokens from 0")


@pytest.mark.parametrize("network", [Net, Modern])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "pfedla", "pfedhn", "factorized_fl"])
def test_under_methods_that_differ_in_structure(network, method, tmp_path):
    """A run, its files, and predictions from them that are those of the run."""
    settings = {**SETTINGS, "algorithm": method, "rounds": 2, "evaluate_after": False}
    result = fedjax_pfl.run(settings, tmp_path / "run", dataset=examples(), model=network)
    paths = export.write_models(result, tmp_path / "files")
    for i, path in enumerate(paths):
        model, variables = export.load(path, network)
        rows = np.asarray(result.data.test.rows[i])[: int(result.data.test.size[i])]
        found = jnp.argmax(model.apply(variables, result.data.x[rows]), -1)
        accuracy = np.mean(np.asarray(found) == np.asarray(result.data.y)[rows])
        assert accuracy == pytest.approx(result.clients[i]["before_accuracy"])
