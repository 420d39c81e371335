"""The methods on the page of one's own method, and what it says of a method's functions."""

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


def test_your_method_is_short():
    file, comparing, *_ = documents.blocks("your_method.md")
    assert len(file.splitlines()) < 100
    assert documents.lines(comparing) < 20


@pytest.mark.slow("all commands of a page")
def test_your_method_against_fedavg(tmp_path, monkeypatch):
    """As the page says: the bytes are equal, and momentum is far ahead."""
    monkeypatch.chdir(tmp_path)
    documents.module("your_method.md")
    exec(documents.blocks("your_method.md")[1], {"__name__": "__main__"})
    (command,) = documents.blocks("your_method.md", "sh")
    *_, words = command.partition("fedjax-pfl compare ")
    rows = comparison.group([comparison.read(tmp_path / word) for word in shlex.split(words)])
    fedavg, fedavgm = map(comparison.summary, rows)
    assert "fedavgm" not in rows[0].config  # which that run did not use
    assert fedavgm.before["mean"] > fedavg.before["mean"] + 0.1
    assert fedavgm.megabytes_down == fedavg.megabytes_down
    (shown,) = documents.blocks("your_method.md", "text")

    def blank(text):
        return [re.sub(r"[\d.]+", "0", line).split() for line in text.splitlines()]

    found = comparison_page.text(rows).splitlines()
    first = next(i for i, line in enumerate(found) if line.startswith("FedAvg "))
    assert blank(shown)[1:] == blank("\n".join(found[first : first + 2]))


# FedAvgM's mathematics.


def fedavgm(**settings):
    _, federation = tiny.federated()
    factory = cases.FACTORIES["fedavgm"]
    return factory(tiny.Net(), cases.training(), federation, **settings)


def test_moments_and_steps_by_hand():
    """Two rounds of one weight: 1 → 2, 4 with examples 12 and 7 is a mean of 52/19 = 2.7368."""
    made = fedavgm(beta=0.5, server_rate=2.0)
    server = {
        "params": {"w": jnp.float32(1)},
        "moments": {"w": jnp.float32(0)},
        "batch_stats": {"s": jnp.float32(9)},
    }
    ids, arrived = jnp.array([0, 1, 6]), jnp.array([True, True, False])
    upload = {
        "params": {"w": jnp.array([2.0, 4.0, 0.0])},
        "batch_stats": {"s": jnp.array([1.0, 1.0, 0.0])},
    }
    cohort = tiny.cohort(tiny.TRAIN, ids, arrived, (), upload, 0)

    def receive(server):
        return made.receive(State(server, (), ()), cohort)[0]

    once = receive(server)
    change = 52 / 19 - 1
    np.testing.assert_allclose(once["moments"]["w"], change, rtol=1e-6)
    np.testing.assert_allclose(once["params"]["w"], 1 + 2 * change, rtol=1e-6)
    np.testing.assert_allclose(once["batch_stats"]["s"], 1, rtol=1e-6)
    twice = receive(once)
    moment = 0.5 * change + 52 / 19 - (1 + 2 * change)
    np.testing.assert_allclose(twice["moments"]["w"], moment, rtol=1e-5)
    np.testing.assert_allclose(twice["params"]["w"], 1 + 2 * change + 2 * moment, rtol=1e-5)


def test_without_momentum_it_is_fedavg():
    made, plain = fedavgm(beta=0.0), cases.make("fedavg", tiny.federated()[1])
    state = made.init(KEY)
    uploads = jax.tree.map(
        lambda x: jnp.stack([x + 1, x * 2, 0 * x]), made.send(state, ClientContext(0, None, 0, KEY))
    )
    ids, arrived = jnp.array([0, 4, 6]), jnp.array([True, True, False])
    cohort = tiny.cohort(tiny.TRAIN, ids, arrived, uploads, uploads, 0)
    ours, _ = made.receive(state, cohort)
    theirs, _ = plain.receive(plain.init(KEY), cohort)
    assert set(ours) == {*theirs, "moments"}
    chex.assert_trees_all_close({k: ours[k] for k in theirs}, theirs, rtol=1e-6, atol=1e-6)


def test_moments_do_not_travel():
    made = fedavgm()
    state = made.init(KEY)
    payload = made.send(State(state.server, (), ()), ClientContext(0, None, 0, KEY))
    assert set(payload) == {"params", "batch_stats"} == set(state.server) - {"moments"}


# FedSAM.


def test_a_step_of_fedsam_by_hand():
    """f(w) = ½ (w − 3)² from w = 1: the worst within .5 is w = .5, whose gradient is −2.5."""
    data, federation = linear.federated([[[1.0]]], [[3.0]])
    training = local_training.sgd(learning_rate=0.1, steps=1, batch_size=1)
    factory = cases.FACTORIES["fedsam"]
    made = factory(linear.Linear(), training, federation, rho=0.5)
    done = linear.train_client(made, linear.variables([1.0]), (), data)
    np.testing.assert_allclose(linear.weights(done.upload), [1.25], rtol=1e-6)


def test_the_methods_on_the_page_are_short():
    """Lines of code, without the imports."""
    most = {"fedsam": 20, "fedavgm": 38}
    for number in (0, 2):
        code = documents.blocks("your_method.md")[number]
        name = re.findall(r"^def (\w+)", code, re.M)[0]
        assert documents.lines(code[code.index("def") :]) <= most[name]


# What the functions of a method are given.


def table(first):
    """Returns the rows of contract.md's table with that first heading, as dicts of cells."""
    lines = (documents.DOCS / "contract.md").read_text().splitlines()

    def cells(line):
        return [cell.strip() for cell in line.strip("|").split("|")]

    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[at + 2 :])
    return [dict(zip(cells(lines[at]), cells(row), strict=True)) for row in rows]


def test_the_functions_are_those_of_the_contract():
    form = r"^ *(\w+) +\(([\w, =]+)\) -> (.+?)\.(?: |$)"
    contract = re.findall(form, Algorithm.__doc__, re.M)
    shown = [
        tuple(row[k].replace("`", "") for k in ("Function", "Arguments", "Returns"))
        for row in table("Function")
    ]
    assert shown == contract
    assert [*(name for name, *_ in shown), "offload"] == list(
        Algorithm._fields
    )  # offload is no function
    optional = set(Algorithm._field_defaults)
    text = (documents.DOCS / "contract.md").read_text()
    assert "`traffic`, `observe` and `offload` are optional" in text
    assert optional == {"traffic", "observe", "offload"}


def test_every_argument_is_in_the_table():
    found = {}
    for row in table("Argument"):
        for function in row["Function"].replace("`", "").split(", "):
            found.setdefault(function, set()).add(row["Argument"].strip("`"))
    wanted = {
        row["Function"].strip("`"): set(re.findall(r"(\w+)(?:=None)?", row["Arguments"])) - {"None"}
        for row in table("Function")
    }
    own = inspect.signature(algorithms.fedavg).parameters
    assert found == {**wanted, "the factory": set(own)}
    assert [r["Argument"].strip("`") for r in table("Argument")][:3] == list(own)


def test_arguments_are_what_the_table_says():
    """Of a method that computes nothing: five clients, three in a round, unlike shapes."""
    n, k = 5, 3
    seen = {}

    def watched(name, function):
        def called(*arguments):
            bound = zip(inspect.signature(function).parameters, arguments, strict=False)
            seen.setdefault(name, []).append(dict(bound))
            return function(*arguments)

        return called

    shape = State(jnp.zeros(7), jnp.zeros((n, 2)), jnp.zeros((n, 4)))
    plain = Algorithm(
        init=lambda key, start=None: shape if start is None else start,
        send=lambda state, ctx: state.rows[ctx.i],
        train=lambda payload, client, ctx: ClientResult(
            payload, (), client, {"loss": client.sum()}
        ),
        receive=lambda state, cohort: (state.server, state.rows),
        personalize=lambda state, client, ctx: (),
        predict=lambda variables, x: jnp.zeros((len(x), 3)),
        traffic=lambda payload, upload: full_traffic(payload, upload),
        observe=lambda state: {"rows": state.rows},
    )
    method = Algorithm(*(watched(name, part) for name, part in plain._asdict().items()))
    data, federation = tiny.federated(clients=n)
    rounds = make_rounds(method, federation, cohort=k)
    key, number = jax.random.key(0), jax.ShapeDtypeStruct((), jnp.int32)
    state = jax.eval_shape(rounds.init, key, shape)
    jax.eval_shape(rounds.run, key, state, data, number, number)
    jax.eval_shape(rounds.evaluate, key, state, data, number)
    jax.eval_shape(lambda state: method.observe(state), state)

    for row in table("Argument")[4:]:
        for function in row["Function"].replace("`", "").split(", "):
            name = row["Argument"].strip("`")
            for value in (given[name] for given in seen[function]):
                as_the_table_says(value, row, (function, name), n, k)
    records = {
        State: [given["state"] for given in seen["observe"]],
        ClientContext: [given["ctx"] for given in seen["train"] + seen["personalize"]],
        Cohort: [given["cohort"] for given in seen["receive"]],
    }
    fields = {record: [] for record in records}
    for row in table("Field"):
        name = row["Field"].strip("`")
        for record in (r for r in records if r.__name__ in re.findall(r"\w+", row["Record"])):
            fields[record].append(name)
            for value in records[record]:
                as_the_table_says(getattr(value, name), row, (record, name), n, k)
    assert {r: sorted(f) for r, f in fields.items()} == {r: sorted(r._fields) for r in records}
    for given in seen["send"]:
        assert (given["state"].clients, given["ctx"].data) == ((), None)
    for given in seen["receive"] + seen["personalize"]:
        assert given["state"].clients == ()


def as_the_table_says(value, row, where, n, k):
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
        assert isinstance(leaf, jax.core.Tracer) == (row.get("Traced", "yes") == "yes"), where
        assert fits[form](leaf.shape), where
    if kind in ("int32", "bool", "float32"):
        assert value.dtype == kind, where
    elif kind == "key":
        assert jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key), where
    elif kind != "tree":
        assert type(value).__name__ == kind, where
