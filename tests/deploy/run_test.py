"""Runs over nodes in one process: run directory, models, and resuming after a crash."""

import json
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import federate, load
from fedjax_pfl.deploy import node, node_file, run, schema, server, wire
from fedjax_pfl.deploy.exchange import Waiting
from fedjax_pfl.report import loggers, page, run_reader
from fedjax_pfl.runs import export, runner
from fedjax_pfl.simulation import forecast
from tests.commands import message
from tests.runs.common import BASE, read_metrics

pytestmark = pytest.mark.slow("nodes with programs of their own")

CONFIG = {
    **{name: value for name, value in BASE.items() if name not in ("dropout", "checkpoint_every")},
    "algorithm": "fedper",
    "rounds": 3,
    "eval_every": 1,
    "devices": 1,
}


# Content of a node's file in a trial: the settings of its part of the dataset.
NODE_DATA = {
    name: CONFIG[name]
    for name in ("dataset", "synthetic", "partition", "validation_fraction", "clients")
}


def make_node(folder, **content):
    """Builds a node from the content of its file."""
    return node.Node(folder, node_file.parse(json.loads(json.dumps(content)), "node.json"))


class Nodes:
    """Exchange with nodes in this process; the server dies after `until` requests."""

    def __init__(self, folder, n, until=10**6, data=None, code=()):
        contents = data or [{**NODE_DATA, "client": i, "code": code} for i in range(n)]
        self.nodes = [make_node(folder / f"node-{i}", **contents[i]) for i in range(n)]
        self.requests_left = until
        self.log_lines = []
        self.responses = []  # every byte that has left a node

    def ask(self, requests, seconds):
        for i, content in requests.items():
            self.requests_left -= 1
            if self.requests_left < 0:
                raise KeyboardInterrupt
            self.responses.append(self.respond(i, content))
            yield i, self.responses[-1]

    def wait_for_return(self, clients, seconds):
        """Returns at once: all nodes are online."""

    def respond(self, i, content):
        """Returns a node's response; hostile nodes override it."""
        return node.respond(self.nodes[i], content)

    def run(self, config, folder, **waiting):
        """Runs a server in `folder` that exchanges messages with these nodes."""
        return run.run(config, folder, self, Waiting(**waiting), self.log_lines.append)


def without_times(metrics):
    """Returns evaluations without times and remarks."""
    return [
        {k: v for k, v in line.items() if "seconds" not in k and k != "remarks"} for line in metrics
    ]


def assert_close(actual, expected):
    """Checks for equal text and equal numbers up to rounding."""
    flat = [jax.tree_util.tree_leaves_with_path(without_times(m)) for m in (actual, expected)]
    for (path, value), (expected_path, expected_value) in zip(*flat, strict=True):
        assert path == expected_path
        if isinstance(expected_value, str):
            assert value == expected_value, path
        else:
            np.testing.assert_allclose(value, expected_value, 1e-6, 1e-6, err_msg=str(path))


@pytest.mark.slow("it trains two whole runs, one of them over three nodes")
def test_a_killed_run_resumes_and_equals_the_simulation(tmp_path, monkeypatch):
    logged = []
    logger = loggers.Logger(logged.append, lambda: logged.append("closed"))
    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", lambda directory: logger)
    simulated = runner.run(CONFIG, tmp_path / "simulated")
    nodes = Nodes(tmp_path, 3, until=3 + 2 * (2 + 3) + 1)  # in the midst of the third round
    with pytest.raises(KeyboardInterrupt):
        nodes.run({**CONFIG, "log_to": "tensorboard"}, tmp_path / "real")
    assert [line if line == "closed" else line["round"] for line in logged] == [1, 2, "closed"]
    assert len(read_metrics(tmp_path / "real")) == 2
    nodes = Nodes(tmp_path, 3)
    result = nodes.run(CONFIG, tmp_path / "real")
    assert result.resumed_at == 2
    assert nodes.log_lines[0] == "The run is resumed at round 2"
    assert_close(result.metrics, simulated.metrics)
    assert_close(read_metrics(tmp_path / "real"), simulated.metrics)
    chex.assert_trees_all_close(result.clients, simulated.clients, rtol=1e-6, atol=1e-6)
    assert result.ledger == simulated.ledger
    assert (tmp_path / "real" / "report.html").is_file()
    traffic = [(tmp_path / name / "traffic.json").read_text() for name in ("real", "simulated")]
    assert traffic[0] == traffic[1]
    expected = dict(export.personalize(simulated, simulated.state, 3, range(3)))
    x = np.ones((2, 2, 2, 1), np.float32)
    for i in range(3):
        (path,) = (tmp_path / f"node-{i}").glob("run-*/model.safetensors")
        model, variables = export.load(path)
        chex.assert_trees_all_close(variables, expected[i], rtol=1e-6, atol=1e-6)
        assert export.describe(path)["client"] == i
        assert model.apply(variables, x).shape == (2, 3)
    lines = (tmp_path / "real" / run.WIRE_FILE).read_text().splitlines()
    assert len(lines) == 3
    nodes = Nodes(tmp_path, 3, until=0)
    assert nodes.run(CONFIG, tmp_path / "real").metrics == result.metrics
    assert nodes.log_lines == ["This run was finished at round 3; no node is asked"]
    assert "deployed" in message(runner.run, CONFIG, tmp_path / "real")
    assert "deployed" in message(export.load_result, tmp_path / "real")


class Silent(Nodes):
    """Nodes that refuse evaluations from round `since` on."""

    since = 0

    def respond(self, i, content):
        facts = wire.decode(content, len(content)).facts
        if facts["kind"] == "evaluate" and facts["round"] >= self.since:
            return node.refusal("busy")
        return super().respond(i, content)


@pytest.mark.parametrize("since", [1, pytest.param(2, marks=pytest.mark.slow("the same run"))])
def test_a_run_without_evaluation_responses_writes_a_report(since, tmp_path):
    nodes = Silent(tmp_path, 3)
    nodes.since = since
    done = nodes.run({**CONFIG, "rounds": 2}, tmp_path / "run")
    assert done.metrics[-1]["before"] is None
    assert (tmp_path / "run" / "report.html").is_file()
    page.table(run_reader.read(tmp_path / "run").metrics)


class OneSilent(Silent):
    """Nodes of which client 0 refuses evaluations from round `since` on."""

    def respond(self, i, content):
        return super().respond(i, content) if i == 0 else Nodes.respond(self, i, content)


def test_a_round_whose_evaluation_lacks_a_client_is_not_the_best(tmp_path, monkeypatch):
    """The server needs memory for messages of all clients, although a round has one."""
    requirements = []
    monkeypatch.setattr(
        forecast, "shortage", lambda needed, capacity: requirements.append(needed.device) or ""
    )
    nodes = OneSilent(tmp_path, 3)
    nodes.since = 2
    config = {**CONFIG, "rounds": 2, "learning_rate": 1e-9, "clients_per_round": 1}
    done = nodes.run(config, tmp_path / "run")
    assert [line["validation"]["clients"] for line in done.metrics] == [3, 2]
    assert [line["best_round"] for line in done.metrics] == [1, 1]
    assert requirements[0] > 3 * done.ledger.total_down / 2


@pytest.mark.parametrize("since", [1, 2])
def test_only_complete_validation_scores_count(since):
    federation = SimpleNamespace(
        validation_counts=np.array([3, 2, 0, 4]), active=np.array([True, True, True, False])
    )
    examples = np.array([3, 2 * (since > 1), 0, 0])
    scores = SimpleNamespace(validation=SimpleNamespace(examples=examples))
    assert server.is_complete(federation, scores) == (since > 1)
    assert server.is_complete(federation, SimpleNamespace(validation=None))


def test_a_start_record_from_a_backup_has_a_later_start(tmp_path, monkeypatch):
    """Nodes refuse requests of an earlier start than their last one."""
    path, seconds = tmp_path / run.DEPLOYED_FILE, iter([1000.5, 1000.7, 1020.0])
    monkeypatch.setattr(run.time, "time", lambda: next(seconds))
    (tmp_path / "config.json").touch()
    first = run._read_start_record(tmp_path, saved=False)["start"]
    backup = path.read_text()
    second = run._read_start_record(tmp_path, saved=False)["start"]
    path.write_text(backup)
    third = run._read_start_record(tmp_path, saved=False)["start"]
    assert [first, second, third] == [1000, 1001, 1020]


@pytest.mark.slow("three nodes with programs of their own")
def test_a_run_with_different_files_at_the_nodes(tmp_path):
    """Inputs are normalised over all nodes, and the files number the classes."""
    rng = np.random.default_rng(0)
    data, labels = [], ["no", "maybe", "yes"]
    shared_content = {"labels": labels, "least_rows": 15, "validation_fraction": 0.2}
    for i, low in enumerate(("no", "maybe")):
        x = rng.normal(3 + 5 * i, 2, (30 + 10 * i, 2))
        rows = [f"{a},{b},{'yes' if a > 3 + 5 * i else low}" for a, b in x]
        path = tmp_path / f"{i}.csv"
        path.write_text("\n".join(["age,dose,label", *rows]))
        data.append({"dataset": f"csv:{path}", **shared_content})
    config = {**CONFIG, "clients": 2, "clients_per_round": 2, "rounds": 1}
    nodes = Nodes(tmp_path, 2, data=data)
    result = nodes.run(config, tmp_path / "real")
    assert [row["train_examples"] for row in result.clients] == [15, 20]
    path = tmp_path / "real" / run.DEPLOYED_FILE
    federation = node.storage.read_json(path, schema.DEPLOYED)["federation"]
    assert federation["alike"]["classes"] == labels
    assert 5 < federation["mean"][0] < 7
    for i in range(2):
        (path,) = (tmp_path / f"node-{i}").glob("run-*/model.safetensors")
        about = export.describe(path)
        assert (about["outputs"], about["input_shape"]) == (3, [2])
        assert json.loads((path.parent / node.CLASSES).read_text()) == labels
        expected = 1 / np.array(federation["deviation"])
        np.testing.assert_allclose(np.ravel(about["scale"]), expected, 1e-6)
    data[1]["csv"] = {"input": "age"}
    nodes = Nodes(tmp_path / "other", 2, data=data)
    with pytest.raises(UsageError, match="1 of 2 clients have not enrolled, the first is client 1"):
        nodes.run(config, tmp_path / "differ")
    line = "client 1 cannot enrol: its input_shape differs from that of client 0"
    assert line in nodes.log_lines[-1]


class Absent(Nodes):
    """Nodes that miss some requests; in the end only client 2 misses the evaluation."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.missed, self.waits = {"train": {0, 1, 2}, "evaluate": {1, 2}}, []

    def ask(self, requests, seconds):
        kinds = {i: wire.decode(c, len(c)).facts["kind"] for i, c in requests.items()}
        online = {i: c for i, c in requests.items() if i not in self.missed.get(kinds[i], ())}
        return super().ask(online, seconds)

    def wait_for_return(self, clients, seconds):
        self.waits.append((sorted(clients), seconds))
        self.missed = {"evaluate": {2} if len(self.waits) > 1 else {1, 2}}


@pytest.mark.slow("a run with its report")
def test_absent_nodes_and_the_report_of_data_that_only_nodes_know(tmp_path):
    """Asks again for a round and for the last evaluation, when a node is back."""
    shared = {"dataset": "wine", "clients": 3, "partition": "iid"}
    split = {"test_fraction": 0.25, "validation_fraction": 0.25}
    nodes = Absent(tmp_path, 3, data=[{**shared, **split, "client": i} for i in range(3)])
    changes = {"rounds": 1, "evaluate_after": False, "clients_per_round": None}
    result = nodes.run({**CONFIG, **changes}, tmp_path / "run", seconds=500)
    assert [clients for clients, _ in nodes.waits] == [[0, 1, 2], [1, 2]]
    assert all(0 < seconds <= 500 for _, seconds in nodes.waits)
    assert all(row["test_examples"] > 0 for row in result.clients)
    assert [row["before_accuracy"] is None for row in result.clients] == [False, False, True]
    metadata = federate(load("wine"), "iid", clients=3, **split)[1].metadata
    for i in range(2):
        (path,) = (tmp_path / f"node-{i}").glob("run-*/model.safetensors")
        scale = export.describe(path)["scale"]
        np.testing.assert_allclose(scale, 1 / np.array(metadata["input_deviation"]), rtol=1e-6)
    assert not list((tmp_path / "node-2").glob("run-*/model.safetensors"))
    report = (tmp_path / "run" / "report.html").read_text()
    assert "on data of the nodes</h1>" in report
    assert "The examples of this run are unknown here" in report
    assert "have no test examples" not in report
    assert run_reader.read(tmp_path / "run").examples is None


def test_a_user_defined_method_runs_at_nodes_that_list_it(tmp_path, monkeypatch):
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
    method_settings = {"algorithm": "of_mine:scaled", "scaled": {"by": 0.0}}
    config = {**CONFIG, **method_settings, "rounds": 1, "evaluate_after": False}
    nodes = Nodes(tmp_path / "no", 3)
    with pytest.raises(UsageError, match="have not enrolled"):
        nodes.run(config, tmp_path / "no", tries=1)
    assert all("algorithm is of_mine:scaled" in line for line in nodes.log_lines)
    nodes = Nodes(tmp_path, 3, code=("of_mine:scaled",))
    result = nodes.run(config, tmp_path / "real")
    assert not any(leaf.any() for leaf in jax.tree.leaves(result.server_state.state.server))
    assert sorted(result.server_state.settled) == [-1, 0, 0]
    for i in range(3):  # also the client that was never in a round
        (path,) = (tmp_path / f"node-{i}").glob("run-*/model.safetensors")
        assert export.describe(path)["algorithm"] == "scaled"


def test_scores_count_if_the_model_cannot_be_saved(tmp_path, monkeypatch, capsys):
    """No file holds a prediction function of one's own; all of its scores are in the report."""
    (tmp_path / "with_own.py").write_text(
        "from fedjax_pfl.algorithms import fedavg\n\n\n"
        "def guarded(model, training, federation):\n"
        "    base = fedavg(model, training, federation)\n"
        "    def predict(variables, x):\n"
        "        return base.predict(variables, x)\n"
        "    return base._replace(predict=predict)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = {**CONFIG, "algorithm": "with_own:guarded", "rounds": 1, "eval_every": 1}
    result = Nodes(tmp_path, 3, code=("with_own:guarded",)).run(config, tmp_path / "real")
    assert result.metrics[-1]["before"]["clients"] == 3
    assert capsys.readouterr().err.count("the model is not saved: ") == 3
    assert not list(tmp_path.glob("node-*/run-*/model.safetensors"))


def test_updates_that_are_not_finite_end_the_run_with_the_reason(tmp_path):
    """Nodes would send the same updates if they were asked again."""
    config = {**CONFIG, "learning_rate": 1e38, "clients_per_round": None}
    line = message(Nodes(tmp_path, 3).run, config, tmp_path / "run")
    assert line.startswith("the updates of clients 0, 1, 2 in round 1 are not finite or too large")


def test_finite_updates_whose_mean_is_not_end_the_run(tmp_path, monkeypatch):
    """The rounds would count without a change of the model."""
    nodes = Nodes(tmp_path, 3)
    close_round = run.server.close_round

    def overflowing(server, server_state, pending, updates):
        rejected = {i: update._replace(accepted=False) for i, update in updates.items()}
        return close_round(server, server_state, pending, rejected)

    monkeypatch.setattr(run.server, "close_round", overflowing)
    line = message(nodes.run, {**CONFIG, "clients_per_round": None}, tmp_path / "run")
    assert line.startswith("the updates of round 1 are finite, but their mean is not; start again")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"privacy": "local"}, "privacy is for simulations"),
        ({"attack": "sign_flip", "attack_share": 0.5}, "attack is for simulations"),
        ({"step_seconds": 1.0}, "step_seconds is for simulations"),
        ({"speed_trace": "x.csv"}, "speed_trace is for simulations"),
        ({"step_seconds": None, "bandwidth": 9.0}, "bandwidth is for simulations"),
        ({"deadline": 5.0}, "deadline is for simulations"),
        ({"speed_spread": 2.0}, "speed_spread is for simulations"),
        ({"late": "partial"}, "late is for simulations"),
        ({"phases": ({"rounds": 1},)}, "phases"),
        ({"seeds": 2}, "seeds"),
        ({"participants": "held_out", "held_out": 2}, "participants is for simulations"),
        ({"own_partitions": True}, "own_partitions"),
        ({"sampling": "cyclic"}, "sampling is for simulations"),
        ({"initial_weights": "w.safetensors"}, "initial_weights is for simulations"),
        ({"algorithm": "fedav"}, "fedavg"),
    ],
)
def test_simulation_settings_are_refused(changes, word, tmp_path):
    assert word in message(Nodes(tmp_path, 3).run, {**CONFIG, **changes}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_held_out_clients_give_no_answers_in_a_round(tmp_path):
    config = {**CONFIG, "held_out": 2, "clients_per_round": None}
    line = message(lambda: Nodes(tmp_path, 3).run(config, tmp_path / "run", min_answers=2))
    assert line.startswith("min_answers is 2, and a round has only 1 clients")
