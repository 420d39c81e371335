"""A whole run over nodes in one process: its directory, its models, and going on after a crash."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import node, node_file, run, schema, wire
from fedjax_pfl.report import page, run_reader
from fedjax_pfl.runs import export, runner
from tests.runs.common import BASE, read_metrics

CONFIG = {
    **{name: value for name, value in BASE.items() if name not in ("dropout", "checkpoint_every")},
    "algorithm": "fedper",
    "rounds": 3,
    "eval_every": 1,
    "devices": 1,
}


# What a node of a trial has in its file: its part of the dataset of CONFIG.
PART = {
    name: CONFIG[name]
    for name in ("dataset", "synthetic", "partition", "validation_fraction", "clients")
}


def made_node(folder: Path, **content: Any) -> node.Node:
    """A node by the content of its file."""
    return node.Node(folder, node_file.parse(json.loads(json.dumps(content)), "node.json"))


class Nodes:
    """Nodes that are asked one after the other; the server dies with the nth request."""

    def __init__(
        self,
        folder: Path,
        n: int,
        until: int = 10**6,
        data: Any = None,
        code: tuple[str, ...] = (),
    ) -> None:
        each = data or [{**PART, "client": i, "code": code} for i in range(n)]
        self.nodes = [made_node(folder / f"node-{i}", **each[i]) for i in range(n)]
        self.left = until
        self.said: list[str] = []
        self.answers: list[bytes] = []  # every byte that has left a node

    def ask(
        self, requests: Mapping[int, bytes], seconds: float | None
    ) -> Iterator[tuple[int, bytes]]:
        for i, content in requests.items():
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            self.answers.append(self.answer(i, content))
            yield i, self.answers[-1]

    def answer(self, i: int, content: bytes) -> bytes:
        """The answer of a node, which tests of hostile ones replace."""
        return node.respond(self.nodes[i], content)


def numbers(metrics: Any) -> Any:
    """Of evaluations, all that is not a time."""
    return [
        {k: v for k, v in line.items() if "seconds" not in k and k != "remarks"} for line in metrics
    ]


def close(got: Any, wanted: Any) -> None:
    """The same words, and the same numbers but for rounding."""
    leaves = [jax.tree_util.tree_leaves_with_path(numbers(one)) for one in (got, wanted)]
    for (path, mine), (there, theirs) in zip(*leaves, strict=True):
        assert path == there
        if isinstance(theirs, str):
            assert mine == theirs, path
        else:
            np.testing.assert_allclose(mine, theirs, 1e-6, 1e-6, err_msg=str(path))


@pytest.mark.slow("it trains two whole runs, one of them over three nodes")
def test_a_run_is_what_the_simulation_is_and_goes_on_where_it_was_killed(tmp_path: Path):
    simulated = runner.run(CONFIG, tmp_path / "simulated")
    nodes = Nodes(tmp_path, 3, until=3 + 2 * (2 + 3) + 1)  # in the midst of the third round
    with pytest.raises(KeyboardInterrupt):
        run.run(CONFIG, tmp_path / "real", nodes, log=nodes.said.append)
    assert len(read_metrics(tmp_path / "real")) == 2
    nodes = Nodes(tmp_path, 3)
    done = run.run(CONFIG, tmp_path / "real", nodes, log=nodes.said.append)
    assert done.resumed_at == 2
    close(done.metrics, simulated.metrics)
    close(read_metrics(tmp_path / "real"), simulated.metrics)
    chex.assert_trees_all_close(done.clients, simulated.clients, rtol=1e-6, atol=1e-6)
    assert done.ledger == simulated.ledger
    assert (tmp_path / "real" / "report.html").is_file()
    assert (tmp_path / "real" / "traffic.json").read_text() == (
        tmp_path / "simulated" / "traffic.json"
    ).read_text()
    wanted = dict(export.personalize(simulated, simulated.state, 3, range(3)))
    x = np.ones((2, 2, 2, 1), np.float32)
    for i in range(3):
        (path,) = (tmp_path / f"node-{i}").glob("run-*/model.safetensors")
        model, variables = export.load(path)
        chex.assert_trees_all_close(variables, wanted[i], rtol=1e-6, atol=1e-6)
        assert export.describe(path)["client"] == i
        assert model.apply(variables, x).shape == (2, 3)
    lines = (tmp_path / "real" / run.WIRE_FILE).read_text().splitlines()
    assert len(lines) == 3
    again = run.run(CONFIG, tmp_path / "real", Nodes(tmp_path, 3, until=0))
    assert again.metrics == done.metrics
    for call in (
        lambda: runner.run(CONFIG, tmp_path / "real"),
        lambda: export.load_result(tmp_path / "real"),
    ):
        with pytest.raises(UsageError, match="deployed"):
            call()


class Silent(Nodes):
    """Nodes that do not answer evaluations from a round on."""

    since = 0

    def answer(self, i: int, content: bytes) -> bytes:
        facts = wire.decode(content, len(content)).facts
        if facts["kind"] == "evaluate" and facts["round"] >= self.since:
            return node.refusal("busy")
        return super().answer(i, content)


@pytest.mark.parametrize("since", [1, 2])
def test_a_run_whose_evaluations_nobody_answers_ends_with_a_report(since: int, tmp_path: Path):
    nodes = Silent(tmp_path, 3)
    nodes.since = since
    done = run.run({**CONFIG, "rounds": 2}, tmp_path / "run", nodes, log=nodes.said.append)
    assert done.metrics[-1]["before"] is None
    assert (tmp_path / "run" / "report.html").is_file()
    page.table(run_reader.read(tmp_path / "run").metrics)


def test_nodes_with_files_of_their_own(tmp_path: Path):
    """Numbers are normalised by what all have, and classes are numbered as the files state."""
    draw = np.random.default_rng(0)
    data, names = [], (("no", "yes"), ("maybe", "yes"))
    labels = ["no", "maybe", "yes"]
    for i, (one, other) in enumerate(names):
        x = draw.normal(3 + 5 * i, 2, (30 + 10 * i, 2))
        rows = [f"{a},{b},{other if a > 3 + 5 * i else one}" for a, b in x]
        (tmp_path / f"{i}.csv").write_text("\n".join(["age,dose,label", *rows]))
        path = tmp_path / f"{i}.csv"
        own = {"labels": labels, "least_rows": 15, "validation_fraction": 0.2}
        data.append({"dataset": f"csv:{path}", **own})
    config = {**CONFIG, "clients": 2, "clients_per_round": 2, "rounds": 1}
    nodes = Nodes(tmp_path, 2, data=data)
    done = run.run(config, tmp_path / "real", nodes, log=nodes.said.append)
    assert [row["train_examples"] for row in done.clients] == [15, 20]
    path = tmp_path / "real" / run.DEPLOYED_FILE
    known = node.storage.read_json(path, schema.DEPLOYED)["federation"]
    assert known["alike"]["classes"] == labels
    assert 5 < known["mean"][0] < 7
    for i in range(2):
        (path,) = (tmp_path / f"node-{i}").glob("run-*/model.safetensors")
        about = export.describe(path)
        assert (about["outputs"], about["input_shape"]) == (3, [2])
        names = json.loads((path.parent / node.CLASSES).read_text())
        assert names == labels
        np.testing.assert_allclose(np.ravel(about["scale"]), 1 / np.array(known["deviation"]), 1e-6)
    data[1]["csv"] = {"input": "age"}
    nodes = Nodes(tmp_path / "other", 2, data=data)
    with pytest.raises(UsageError, match="1 of 2 clients have not enrolled, the first is client 1"):
        run.run(config, tmp_path / "differ", nodes, log=nodes.said.append)
    assert "client 1 cannot enrol: its input_shape differs from that of client 0" in nodes.said[-1]


def test_a_method_of_ones_own_runs_at_nodes_that_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "of_mine.py").write_text(
        "from fedjax_pfl.algorithms import fedavg\n\n\n"
        "import jax\n"
        "def scaled(model, training, federation, *, by: float = 0.5):\n"
        "    base = fedavg(model, training, federation)\n"
        "    def receive(state, cohort):\n"
        "        new, rows = base.receive(state, cohort)\n"
        "        return jax.tree.map(lambda leaf: by * leaf, new), rows\n"
        "    return base._replace(receive=receive)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = {"algorithm": "of_mine:scaled", "scaled": {"by": 0.0}}
    config = {**CONFIG, **own, "rounds": 1, "evaluate_after": False}
    nodes = Nodes(tmp_path / "no", 3)
    with pytest.raises(UsageError, match="have not enrolled"):
        run.run(config, tmp_path / "no", nodes, run.Waiting(tries=1), log=nodes.said.append)
    assert all("algorithm is of_mine:scaled" in line for line in nodes.said)
    nodes = Nodes(tmp_path, 3, code=("of_mine:scaled",))
    done = run.run(config, tmp_path / "real", nodes, log=nodes.said.append)
    assert not any(leaf.any() for leaf in jax.tree.leaves(done.server_state.state.server))
    assert sorted(done.server_state.settled) == [-1, 0, 0]
    for i in range(3):  # one of which has never been in a round
        (path,) = (tmp_path / f"node-{i}").glob("run-*/model.safetensors")
        assert export.describe(path)["algorithm"] == "scaled"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"phases": ({"rounds": 1},)}, "phases"),
        ({"seeds": 2}, "seeds"),
        ({"algorithm": "fedav"}, "fedavg"),
    ],
)
def test_what_only_a_simulation_has_is_refused_before_anything_is_written(
    changes: dict[str, Any], word: str, tmp_path: Path
):
    with pytest.raises(UsageError, match=word):
        run.run({**CONFIG, **changes}, tmp_path / "run", Nodes(tmp_path, 3))
    assert not (tmp_path / "run").exists()
