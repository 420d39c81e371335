"""The documents' programs run, are as short as they say, and do what they say."""

import inspect
import itertools
import re
import shlex
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import launch
from experiments import tune as tune
from experiments.papers.pfedla import presets as pfedla
from experiments.papers.tables import TABLES
from fedjax_pfl import algorithms
from fedjax_pfl.algorithms import common
from fedjax_pfl.config import listing
from fedjax_pfl.config.settings import having
from fedjax_pfl.core import local_training
from fedjax_pfl.core.algorithm import Algorithm, Cohort, State, Trained, Visit, everything
from fedjax_pfl.core.shape_check import check_shapes
from fedjax_pfl.engine.rounds import make_rounds
from fedjax_pfl.report import comparison, comparison_page
from fedjax_pfl.runs.tuning import grids, search, show, trials
from fedjax_pfl.runs.tuning.choice import Tried
from tests import cases, documents, tiny
from tests.algorithms import linear

KEY = jax.random.key(3)


def test_your_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, reading = documents.blocks("your_data.md")
    assert documents.lines(code) < 20
    names = {"__name__": "__main__"}
    exec(code, names)
    *clients, page = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in clients] == ["Amsterdam", "Bern", "Cairo", "Delhi"]
    assert all(float(line.split()[1]) > 0.8 for line in clients)
    assert (tmp_path / page).is_file()
    # Each client has its own owner's examples, and all of them.
    held = np.asarray(names["result"].federation.counts)
    tested = [int(c["test_examples"]) for c in names["result"].clients]
    np.testing.assert_array_equal(held + tested, np.bincount(names["owners"]))
    # What the page reads from the directory is what the call gave.
    exec(reading, names)
    result = names["result"]
    scores = [line["before"]["accuracy_mean"] for line in result.metrics]
    np.testing.assert_array_equal(names["curve"], list(zip([5, 10, 15, 20], scores, strict=True)))
    for column in ("before_accuracy", "bytes_up", "visits"):
        wanted = [float(client[column]) for client in result.clients]
        np.testing.assert_allclose(names["clients"][column], wanted, rtol=1e-6)
    (other,) = documents.blocks("your_data.md", "py")  # pandas is no dependency
    compile(other, "pandas", "exec")


def test_models_as_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = documents.blocks("models.md")
    exec(code, {"__name__": "__main__"})
    predicted, labels = (re.findall(r"\d+", line) for line in capsys.readouterr().out.splitlines())
    assert len(predicted) == len(labels) == 5
    assert sum(map(str.__eq__, predicted, labels)) > 2  # a reader wants to see that it works
    assert {p.name for p in (tmp_path / "two-models").iterdir()} == {
        "client-0.safetensors", "client-3.safetensors"
    }  # fmt: skip


def test_lines_of_code_are_counted():
    assert documents.lines("# no\n\nx = 1  # yes\n    y = 2\n  # no\n") == 2


def test_your_method_is_short():
    file, comparing, *_ = documents.blocks("your_method.md")
    assert len(file.splitlines()) < 100
    assert documents.lines(comparing) < 20


def test_your_method_against_fedavg(tmp_path, monkeypatch):
    """As the page says: the bytes are equal, and momentum is far ahead."""
    monkeypatch.chdir(tmp_path)
    documents.module("your_method.md")
    exec(documents.blocks("your_method.md")[1], {"__name__": "__main__"})
    (command,) = documents.blocks("your_method.md", "sh")
    *_, words = command.partition("experiments.compare ")
    rows = comparison.group([comparison.read(tmp_path / word) for word in shlex.split(words)])
    fedavg, fedavgm = map(comparison.summary, rows)
    assert "fedavgm" not in rows[0].config  # which that run did not use
    assert fedavgm.before["mean"] > fedavg.before["mean"] + 0.1
    assert fedavgm.megabytes_down == fedavg.megabytes_down
    (shown,) = documents.blocks("your_method.md", "text")
    blank = lambda text: [re.sub(r"[\d.]+", "0", line).split() for line in text.splitlines()]
    found = comparison_page.text(rows).splitlines()
    first = next(i for i, line in enumerate(found) if line.startswith("fedavg "))
    assert blank(shown)[1:] == blank("\n".join(found[first : first + 2]))


def test_tuning_has_equal_budgets_and_names_what_can_be_tuned():
    text = (documents.DOCS / "tuning.md").read_text()
    assert all(f"`{name}`" in text for name in grids.TRAINING)
    command = shlex.split(text.partition("\n    python ")[2].partition("\n\n")[0])
    given = dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)
    methods, (file, preset) = given["methods"].split(","), given["config"].split(":")
    assert file == "experiments/configs/pfedla.py"
    changes = {"validation_fraction": float(given["config.validation_fraction"])}
    base = pfedla.get_config(preset)
    base.update(changes)
    source = f"{Path(pfedla.__file__)}:{preset}"
    each = tune.configured(source, base, changes, methods)
    made = search.plan(each, [given["grid"]], int(given["rounds"]), None, as_preset=True)
    found = {one.method: [Tried(point, base, {}, 2) for point in one.points] for one in made}
    assert {len(tried) for tried in found.values()} == {4}
    (shown,) = documents.blocks("tuning.md", "text")
    head = show.head(found, int(given["seeds"]), each)
    assert head == " ".join(shown.partition("\n\n")[0].split())


def test_settings_that_may_differ_in_a_resumption():
    page = (documents.DOCS / "robustness.md").read_text()
    said = page[page.index("do not change results may differ:") :].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", said)) == set(having("resumable"))


def test_tuning_a_method_of_ones_own(tmp_path, monkeypatch, capsys):
    """What the page calls is planned; that such runs are made is tested elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "prepare_devices", lambda: None)
    asked = []
    monkeypatch.setattr(trials, "run", lambda made, *_: asked.extend(made))
    documents.module("your_method.md")
    (code,) = documents.blocks("tuning.md")
    exec(code, names := {})
    assert {trial.method: len(trial.points) for trial in asked} == {"fedavgm": 2, "fedavg": 2}
    assert names["chosen"] == {}
    assert "fedavgm.beta=0.9" in capsys.readouterr().out


# FedAvgM's mathematics.


def fedavgm(**settings):
    _, federation = tiny.federated()
    factory = cases.FACTORIES["fedavgm"]
    return factory(tiny.Net(), cases.TASK, cases.training(), federation, **settings)


def test_moments_and_steps_by_hand():
    """Two rounds of one weight: 1 → 2, 4 with examples 12 and 7 is a mean of 52/19 = 2.7368."""
    made = fedavgm(beta=0.5, server_rate=2.0)
    server = {"params": {"w": jnp.float32(1)}, "moments": {"w": jnp.float32(0)},
              "batch_stats": {"s": jnp.float32(9)}}  # fmt: skip
    ids, arrived = jnp.array([0, 1, 6]), jnp.array([True, True, False])
    upload = {"params": {"w": jnp.array([2.0, 4.0, 0.0])},
              "batch_stats": {"s": jnp.array([1.0, 1.0, 0.0])}}  # fmt: skip
    cohort = tiny.cohort(tiny.TRAIN, ids, arrived, (), upload, 0)
    receive = lambda server: made.receive(State(server, (), ()), cohort)[0]
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
        lambda x: jnp.stack([x + 1, x * 2, 0 * x]), made.send(state, Visit(0, None, 0, KEY))
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
    payload = made.send(State(state.server, (), ()), Visit(0, None, 0, KEY))
    assert set(payload) == {"params", "batch_stats"} == set(state.server) - {"moments"}


def test_fedavg_on_the_page_of_the_idea_keeps_the_contract():
    """It has the shapes of a method; ten lines but for the heads of its functions."""
    (code,) = documents.blocks("idea.md")
    (data, federation), training = tiny.federated(), cases.training(keep_momentum=False)
    names = {"common": common, "State": State, "Trained": Trained, "Algorithm": Algorithm}
    given = {"model": tiny.Net(), "task": cases.TASK, "training": training}
    exec(code, names := {**names, **given, "federation": federation})
    check_shapes("fedavg", names["fedavg"], federation, data)
    statements = [line for line in code.splitlines() if line.strip() and "def " not in line]
    assert len(statements) <= 10


# Ditto and APFL.


def one_step(factory, clients):
    """One step at rate .1 on f(w) = ½ (w − 3)², from the w = 1 that came down."""
    data, federation = linear.federated([[[1.0]]], [[3.0]])
    training = local_training.sgd(learning_rate=0.1, steps=1, batch_size=1)
    made = factory(linear.Linear(), linear.TASK, training, federation)
    visit = Visit(0, linear.client(data, 0), jnp.int32(0), KEY)
    done = jax.jit(made.train)(linear.variables([1.0]), clients, visit)
    return tuple(linear.weights(one)[0] for one in (done.upload, done.variables))


def test_a_step_of_ditto_by_hand():
    """From v = 2: ∇f = −1, and .5 · (2 − 1) pulls back; w moves as FedAvg's does."""
    made = documents.module("your_method.md", 2)
    client = made.Client((), linear.variables([2.0]), ())
    np.testing.assert_allclose(one_step(made.ditto, client), [1.2, 2.05], rtol=1e-6)


def test_a_step_of_apfl_by_hand():
    """From v = 2 the mixture is 1.5; v moves by .1 · .5 · 1.5 to 2.075, the mixture to 1.6375."""
    made = documents.module("your_method.md", 3)
    client = made.Client(linear.variables([2.0])["params"], ())
    np.testing.assert_allclose(one_step(made.apfl, client), [1.2, 1.6375], rtol=1e-6)


def test_the_methods_on_the_page_are_short():
    """Lines of code, without the imports."""
    most = {"ditto": 38, "apfl": 36, "fedavgm": 38}
    for number in (0, 2, 3):
        code = documents.blocks("your_method.md")[number]
        name = re.findall(r"^def (\w+)", code, re.M)[0]
        assert documents.lines(code[code.index("class" if number else "def") :]) <= most[name]


# What the functions of a method are given.


def table(first):
    """The rows of your_method.md's table with that first heading, as dicts of their cells."""
    lines = (documents.DOCS / "your_method.md").read_text().splitlines()
    cells = lambda line: [cell.strip() for cell in line.strip("|").split("|")]
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[at + 2 :])
    return [dict(zip(cells(lines[at]), cells(row), strict=True)) for row in rows]


def test_the_functions_are_those_of_the_contract():
    form = r"^ +(\w+) +\(([\w, =]+)\) -> (.+?)\.(?: |$)"
    contract = re.findall(form, Algorithm.__doc__, re.M)
    shown = [tuple(row[k].replace("`", "") for k in row) for row in table("Function")]
    assert shown == contract
    assert [name for name, *_ in shown] == list(Algorithm._fields)
    optional = set(Algorithm._field_defaults)
    text = (documents.DOCS / "your_method.md").read_text()
    assert "`traffic` and `observe` may be left out" in text
    assert optional == {"traffic", "observe"}


def test_every_argument_is_in_the_table():
    found = {}
    for row in table("Argument"):
        for function in row["Of"].replace("`", "").split(", "):
            found.setdefault(function, set()).add(row["Argument"].strip("`"))
    wanted = {
        row["Function"].strip("`"): set(re.findall(r"(\w+)(?:=None)?", row["Is given"])) - {"None"}
        for row in table("Function")
    }
    own = inspect.signature(algorithms.fedavg).parameters
    assert found == {**wanted, "the factory": set(own)}
    assert [r["Argument"].strip("`") for r in table("Argument")][:4] == list(own)


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
        send=lambda state, visit: state.rows[visit.i],
        train=lambda payload, client, visit: Trained(payload, (), client, {"loss": client.sum()}),
        receive=lambda state, cohort: (state.server, state.rows),
        personal=lambda state, client, visit: (),
        predict=lambda variables, x: jnp.zeros((len(x), 3)),
        traffic=lambda payload, upload: everything(payload, upload),
        observe=lambda state: {"rows": state.rows},
    )
    method = Algorithm(*(watched(name, part) for name, part in plain._asdict().items()))
    data, federation = tiny.federated(clients=n)
    rounds = make_rounds(method, cases.TASK, federation, cohort=k)
    key, number = jax.random.key(0), jax.ShapeDtypeStruct((), jnp.int32)
    state = jax.eval_shape(rounds.init, key, shape)
    jax.eval_shape(rounds.run, key, state, data, number, number)
    jax.eval_shape(rounds.evaluate, key, state, data, number)
    jax.eval_shape(lambda state: method.observe(state), state)

    for row in table("Argument")[4:]:
        for function in row["Of"].replace("`", "").split(", "):
            name = row["Argument"].strip("`")
            for value in (given[name] for given in seen[function]):
                as_the_table_says(value, row, (function, name), n, k)
    records = {
        State: [given["state"] for given in seen["observe"]],
        Visit: [given["visit"] for given in seen["train"] + seen["personal"]],
        Cohort: [given["cohort"] for given in seen["receive"]],
    }
    fields = {record: [] for record in records}
    for row in table("Field"):
        name = row["Field"].strip("`")
        for record in (r for r in records if r.__name__ in re.findall(r"\w+", row["Of"])):
            fields[record].append(name)
            for value in records[record]:
                as_the_table_says(getattr(value, name), row, (record, name), n, k)
    assert {r: sorted(f) for r, f in fields.items()} == {r: sorted(r._fields) for r in records}
    for given in seen["send"]:
        assert (given["state"].clients, given["visit"].data) == ((), None)
    for given in seen["receive"] + seen["personal"]:
        assert given["state"].clients == ()


def as_the_table_says(value, row, where, n, k):
    fits = {"": lambda s: True, "[]": lambda s: s == (), "[K]": lambda s: s == (k,),
            "[N, ...]": lambda s: s in ((n, 2), (n, 4)), "[K, ...]": lambda s: s == (k, 2),
            "[...]": lambda s: s == (4,),
            "[B, ...]": lambda s: s[1:] == (tiny.FEATURES,)}  # fmt: skip
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


# What stands on the pages, in a clone and in the site.

ROOT = documents.DOCS.parent
PAGES = sorted(p.relative_to(ROOT) for p in documents.DOCS.glob("*.md"))
OTHERS = (
    "README.md",
    "BUILD.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "experiments/results/README.md",
    "third_party/README.md",
)


@pytest.fixture(scope="module")
def site():
    """docs/conf.py, which needs no Sphinx."""
    return documents.script("conf")


@pytest.fixture(scope="module")
def written():
    return documents.script("written")


@pytest.mark.parametrize("page", [*map(str, PAGES), *OTHERS])
def test_links_lead_somewhere(page):
    assert documents.lost(ROOT / page) == []


def test_lost_links_are_found(tmp_path):
    (tmp_path / "there.md").write_text("# Data, and `more`\n```sh\n# no title\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "## Here\n[a](there.md) [b](there.md#data-and-more) [c](#here) [d](https://x.y) "
        "![e](no.png) [f](there.md#no-title) [g](no/there.md#data) [h](#there)"
    )
    assert documents.lost(page) == ["no.png", "there.md#no-title", "no/there.md#data", "#there"]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_pages_say_what_the_code_says(page, written):
    text = (ROOT / page).read_text()
    assert written.written(text) == text, "python docs/written.py brings the pages up to date"
    assert text.count("<!-- begin ") == text.count("<!-- end -->")
    assert "{{" not in text


def test_what_the_code_says_is_on_the_pages(written):
    text = lambda page: (documents.DOCS / page).read_text()
    assert "| pfedla | 61.43 ± 0.56 | 3 | 69.85 ± 1.45 | 70.33 ± 1.69 |" in text("pfedla.md")
    assert "| `pfedla.rate` | `0.5` |" in text("pfedla.md")
    assert "(∂θ̄_i/∂ψ_i)ᵀ Δθ_i" in text("pfedla.md")
    assert all(f"`{name}`" in text("tables.md") for name in TABLES)
    assert documents.blocks("settings.md", "text") == [listing.listing("settings") + "\n"]
    assert "| `learning_rate` | `0.01` | `0.01` | `0.005` | `0.01` |" in text("pfedla.md")
    assert "| `rounds` | `150` | `150` | `200` |" in text("fedmn.md")  # phases together
    assert "`test_fraction`" not in text("pfedhn.md")
    assert "| pfedhn | 46.98 ± 1.91 | 0 | not run | not run |" in text("pfedla.md")
    assert "depth 3: 88.38, depth 4: 88.42 (cifar10-n50)" in text("pfedhn.md")
    stale = text("pfedla.md").replace("61.43", "61.44")
    assert written.written(stale) == text("pfedla.md")
    with pytest.raises(KeyError):
        written.published("pfedla/table1", "cifar11-n10")


def test_the_first_page_and_the_site_lead_to_all_pages(site):
    first = (documents.DOCS / "index.md").read_text()
    for page in {p.stem for p in PAGES} - {"index"}:
        assert f"]({page}.md" in first, page
        assert f"\n{page}\n" in site.NAVIGATION, page


def test_the_site_has_its_own_places_for_what_lies_elsewhere(site):
    for page in PAGES:
        source = [(ROOT / page).read_text()]
        site._read(None, page.stem, source)
        assert "](../" not in source[0], page
        assert ("{toctree}" in source[0]) == (page.stem == "index")
    assert set(site.LINKS.values()) == {"results/", "api/methods.md"}
    assert "Methods" in site.API


def test_numbers_in_tables_are_not_broken_from_what_belongs_to_them(site):
    row = "| Local, 10 x 4 | 59.44 ± .40 | 485 kB | 100 % | 3 Bern | 2 of 3 |"
    kept = "| Local, 10~x 4 | 59.44~±~.40 | 485~kB | 100~% | 3 Bern | 2 of 3 |"
    assert site.beside(row) == kept.replace("~", "\N{NO-BREAK SPACE}")
    source = [f"5 kB\n{row}"]
    site._read(None, "speed", source)
    assert source[0].startswith("5 kB\n| Local, 10\N{NO-BREAK SPACE}x")


def test_the_reference_has_every_method_and_what_is_public(site):
    text = "\n".join(site.module(name) for modules in site.API.values() for name in modules)
    for name in algorithms.__all__:
        assert f"### `{name}`\n\n```python\ndef {name}(" in text
    assert "### `run`" in text
    assert "    server: PyTree  # what all share" in text
    assert "### `_" not in text
