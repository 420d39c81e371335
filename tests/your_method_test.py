"""The page "Your method", and the contract that it describes."""

import inspect
import itertools
import re
import shlex

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import algorithms
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import (
    Algorithm,
    ClientContext,
    ClientResult,
    Cohort,
    State,
    full_traffic,
)
from fedjax_pfl.report import comparison, comparison_page
from fedjax_pfl.simulation.rounds import make_rounds
from tests import cases, documents, tiny
from tests.algorithms import linear

KEY = jax.random.key(3)


def test_the_code_of_the_page_is_short():
    fedavgm, comparing, fedsam, *_ = documents.blocks("your_method.md")
    assert len(fedavgm.splitlines()) < 100
    assert documents.lines(comparing) < 20
    for code, limit in ((fedavgm, 38), (fedsam, 20)):
        assert documents.lines(code[code.index("def ") :]) <= limit


@pytest.mark.slow("all commands of a page")
def test_the_page_compares_fedavgm_with_fedavg(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents.module("your_method.md")
    exec(documents.blocks("your_method.md")[1], {"__name__": "__main__"})
    (command,) = documents.blocks("your_method.md", "sh")
    *_, arguments = command.partition("fedjax-pfl compare ")
    runs = [comparison.read(tmp_path / path) for path in shlex.split(arguments)]
    rows = comparison.group(runs)
    fedavg, fedavgm = map(comparison.summary, rows)
    assert "fedavgm" not in rows[0].config  # the settings of a method that the run does not use
    assert fedavgm.before["mean"] > fedavg.before["mean"] + 0.1
    assert fedavgm.megabytes_down == fedavg.megabytes_down
    (sample,) = documents.blocks("your_method.md", "text")

    def wording(lines):
        return [re.sub(r"[\d.]+", "0", line).split() for line in lines]

    lines = comparison_page.text(rows).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("FedAvg "))
    assert wording(sample.splitlines())[1:] == wording(lines[first : first + 2])


def fedavgm(**settings):
    _, federation = tiny.federated()
    factory = cases.FACTORIES["fedavgm"]
    return factory(tiny.Net(), cases.training(), federation, **settings)


def test_moments_and_steps_of_two_rounds():
    """Computes by hand: 1 -> 2, 4 with examples 12 and 7 is a mean of 52/19 = 2.7368."""
    method = fedavgm(beta=0.5, server_rate=2.0)
    server = {
        "params": {"w": jnp.float32(1)},
        "moments": {"w": jnp.float32(0)},
        "batch_stats": {"s": jnp.float32(9)},
    }
    payload = method.send(State(server, (), ()), ClientContext(0, None, 0, KEY))
    assert set(payload) == {"params", "batch_stats"}
    ids, arrived = jnp.array([0, 1, 6]), jnp.array([True, True, False])
    upload = {
        "params": {"w": jnp.array([2.0, 4.0, 0.0])},
        "batch_stats": {"s": jnp.array([1.0, 1.0, 0.0])},
    }
    cohort = tiny.cohort(tiny.TRAIN, ids, arrived, (), upload, 0)
    first = method.receive(State(server, (), ()), cohort)[0]
    change = 52 / 19 - 1
    np.testing.assert_allclose(first["moments"]["w"], change, rtol=1e-6)
    np.testing.assert_allclose(first["params"]["w"], 1 + 2 * change, rtol=1e-6)
    np.testing.assert_allclose(first["batch_stats"]["s"], 1, rtol=1e-6)
    second = method.receive(State(first, (), ()), cohort)[0]
    moment = 0.5 * change + 52 / 19 - (1 + 2 * change)
    np.testing.assert_allclose(second["moments"]["w"], moment, rtol=1e-5)
    np.testing.assert_allclose(second["params"]["w"], 1 + 2 * change + 2 * moment, rtol=1e-5)


def test_fedavgm_without_momentum_is_fedavg():
    method, fedavg = fedavgm(beta=0.0), cases.make("fedavg", tiny.federated()[1])
    state = method.init(KEY)
    payload = method.send(state, ClientContext(0, None, 0, KEY))
    uploads = jax.tree.map(lambda x: jnp.stack([x + 1, x * 2, 0 * x]), payload)
    ids, arrived = jnp.array([0, 4, 6]), jnp.array([True, True, False])
    cohort = tiny.cohort(tiny.TRAIN, ids, arrived, uploads, uploads, 0)
    server, _ = method.receive(state, cohort)
    expected, _ = fedavg.receive(fedavg.init(KEY), cohort)
    assert set(server) == {*expected, "moments"}
    chex.assert_trees_all_close({k: server[k] for k in expected}, expected, rtol=1e-6, atol=1e-6)


def test_a_step_of_fedsam():
    """Computes by hand: f(w) = (w - 3)²/2 is worst within 0.5 of w = 1 at 0.5, with slope -2.5."""
    data, federation = linear.federated([[[1.0]]], [[3.0]])
    training = local_training.sgd(learning_rate=0.1, steps=1, batch_size=1)
    method = cases.FACTORIES["fedsam"](linear.Linear(), training, federation, rho=0.5)
    result = linear.train_client(method, linear.variables([1.0]), (), data)
    np.testing.assert_allclose(linear.weights(result.upload), [1.25], rtol=1e-6)


def table(first):
    """Returns the rows of the table of contract.md with a first heading, as dicts of cells."""
    lines = (documents.DOCS / "contract.md").read_text().splitlines()

    def cells(line):
        return [cell.strip() for cell in line.strip("|").split("|")]

    head = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[head + 2 :])
    return [dict(zip(cells(lines[head]), cells(row), strict=True)) for row in rows]


def test_the_page_lists_the_functions_of_the_contract():
    pattern = r"^ *(\w+) +\(([\w, =]+)\) -> (.+?)\.(?: |$)"
    columns = ("Function", "Arguments", "Returns")
    listed = [tuple(row[k].replace("`", "") for k in columns) for row in table("Function")]
    assert listed == re.findall(pattern, Algorithm.__doc__, re.M)
    assert [*(name for name, *_ in listed), "offload", "kept_change"] == list(Algorithm._fields)
    text = (documents.DOCS / "contract.md").read_text()
    assert "`traffic`, `observe`, `offload` and `kept_change` are optional" in text
    assert set(Algorithm._field_defaults) == {"traffic", "observe", "offload", "kept_change"}


def test_the_page_lists_every_argument():
    listed = {}
    for row in table("Argument"):
        for function in row["Function"].replace("`", "").split(", "):
            listed.setdefault(function, set()).add(row["Argument"].strip("`"))
    expected = {
        row["Function"].strip("`"): set(re.findall(r"(\w+)(?:=None)?", row["Arguments"])) - {"None"}
        for row in table("Function")
    }
    parameters = list(inspect.signature(algorithms.fedavg).parameters)
    assert listed == {**expected, "the factory": set(parameters)}
    assert [row["Argument"].strip("`") for row in table("Argument")][:3] == parameters


def test_arguments_have_the_types_and_shapes_of_the_page():
    """Traces a method that computes nothing: five clients, three in a round."""
    n, k = 5, 3
    calls = {}

    def recorded(name, function):
        def call(*arguments):
            bound = zip(inspect.signature(function).parameters, arguments, strict=False)
            calls.setdefault(name, []).append(dict(bound))
            return function(*arguments)

        return call

    initial = State(jnp.zeros(7), jnp.zeros((n, 2)), jnp.zeros((n, 4)))
    functions = {
        "init": lambda key, start=None: initial if start is None else start,
        "send": lambda state, ctx: state.rows[ctx.i],
        "train": lambda payload, client, ctx: ClientResult(
            payload, (), client, {"loss": client.sum()}
        ),
        "receive": lambda state, cohort: (state.server, state.rows),
        "personalize": lambda state, client, ctx: (),
        "predict": lambda variables, x: jnp.zeros((len(x), 3)),
        "traffic": lambda payload, upload: full_traffic(payload, upload),
        "observe": lambda state: {"rows": state.rows},
    }
    method = Algorithm(**{name: recorded(name, function) for name, function in functions.items()})
    data, federation = tiny.federated(clients=n)
    rounds = make_rounds(method, federation, cohort=k)
    key, number = jax.random.key(0), jax.ShapeDtypeStruct((), jnp.int32)
    state = jax.eval_shape(rounds.init, key, initial)
    jax.eval_shape(rounds.run, key, state, data, number, number)
    jax.eval_shape(rounds.evaluate, key, state, data, number)
    jax.eval_shape(lambda state: method.observe(state), state)

    for row in table("Argument")[4:]:
        for function in row["Function"].replace("`", "").split(", "):
            name = row["Argument"].strip("`")
            for arguments in calls[function]:
                assert_fits(arguments[name], row, (function, name), n, k)
    records = {
        State: [call["state"] for call in calls["observe"]],
        ClientContext: [call["ctx"] for call in calls["train"] + calls["personalize"]],
        Cohort: [call["cohort"] for call in calls["receive"]],
    }
    fields = {record: [] for record in records}
    for row in table("Field"):
        name = row["Field"].strip("`")
        for record in (r for r in records if r.__name__ in re.findall(r"\w+", row["Record"])):
            fields[record].append(name)
            for value in records[record]:
                assert_fits(getattr(value, name), row, (record, name), n, k)
    assert {r: sorted(f) for r, f in fields.items()} == {r: sorted(r._fields) for r in records}
    assert {(c["state"].clients, c["ctx"].data) for c in calls["send"]} == {((), None)}
    assert {c["state"].clients for c in calls["receive"] + calls["personalize"]} == {()}


def assert_fits(value, row, place, n, k):
    """Asserts that a value has the type and the shape of a row of the page."""
    fits = {
        "": lambda s: True,
        "[]": lambda s: s == (),
        "[K]": lambda s: s == (k,),
        "[N, ...]": lambda s: s in ((n, 2), (n, 4)),
        "[K, ...]": lambda s: s == (k, 2),
        "[...]": lambda s: s == (4,),
        "[B, ...]": lambda s: s[1:] == (tiny.FEATURES,),
    }
    kind, form = (row[c].strip("`") for c in ("Type", "Shape"))
    for leaf in jax.tree.leaves(value):
        assert isinstance(leaf, jax.core.Tracer) == (row.get("Traced", "yes") == "yes"), place
        assert fits[form](leaf.shape), place
    if value is None:
        assert "None" in row["Meaning"], place
    elif kind in ("int32", "bool", "float32"):
        assert value.dtype == kind, place
    elif kind == "key":
        assert jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key), place
    elif kind != "tree":
        assert type(value).__name__ == kind, place
