"""Hostile nodes: the server rejects invalid descriptions, uploads and scores."""

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import enrolment, run, schema, server, storage, wire
from fedjax_pfl.deploy.schema import InvalidError
from fedjax_pfl.simulation import forecast
from tests.deploy.faults_test import loop, replace_parts
from tests.deploy.loopback import RUN
from tests.deploy.run_test import CONFIG, NODE_DATA, Absent, Nodes
from tests.deploy.schema_test import DELETE, DESCRIPTION, members, replace_at

pytestmark = pytest.mark.slow("an enrolment for each lie of a node")

__all__ = ["loop"]
INJECTED = "sorry\nThe run has ended: /srv\x1b[2J\u202e"
Change = Callable[[dict[str, Any]], Any]


class HostileNodes(Nodes):
    """Nodes with one hostile node, which changes its first `times` descriptions."""

    def __init__(self, folder, change, times=10**6, hostile=1, **options):
        super().__init__(folder, **{"n": 3, **options})
        self.change, self.times, self.hostile = change, times, hostile

    def respond(self, i, content):
        response = super().respond(i, content)
        facts = wire.decode(response, len(response)).facts
        if i != self.hostile or facts["kind"] != "enrol" or self.times == 0:
            return response
        self.times -= 1
        return wire.encode(self.change(facts))


ONE_ROUND = {**CONFIG, "rounds": 1, "evaluate_after": False}


def enrol_all(nodes, folder, tries=3):
    """Returns the federation's description after all nodes have enrolled."""
    settings, _ = run.assembly.complete(ONE_ROUND)
    return enrolment.enrol(
        RUN,
        0,
        settings,
        run.assembly.node_settings(ONE_ROUND),
        lambda requests: nodes.ask(requests, None),
        lambda clients: nodes.wait_for_return(clients, 0.0),
        tries,
        nodes.log_lines.append,
    )


def describing(path, value):
    """Returns the change of one value of a description."""
    return lambda facts: replace_at(facts, f"described.{path}", value)


WRONG_RESPONSES = {
    "a count that is text": describing("counts.train", "many"),
    "more than its table holds": describing("counts.train", 10**6),
    "other outputs": describing("outputs", 1_000_000),
    "a huge shape": describing("input_shape", [2**20, 2**20]),
    "sums that are not requested": describing("sums", {"n": 30, "mean": [1.0], "m2": [1.0]}),
    "another client": lambda facts: {**facts, "client": 0},
    "another run": lambda facts: {**facts, "run": "aaaa"},
    "another request": lambda facts: {**facts, "request": "0" * 64},
    "another kind": lambda facts: {"kind": "shutdown"},
    "text": lambda facts: {"kind": "refused", "why": INJECTED},
}


@pytest.mark.parametrize("name", WRONG_RESPONSES)
def test_a_node_enrols_after_invalid_responses(name, tmp_path):
    """A node that never sends a valid response ends the run."""
    nodes = HostileNodes(tmp_path, WRONG_RESPONSES[name], times=2)
    federation = enrol_all(nodes, tmp_path)
    assert federation == enrol_all(Nodes(tmp_path, 3), tmp_path)
    assert len(nodes.log_lines) == 2
    assert all(line.startswith("client 1 cannot enrol: ") for line in nodes.log_lines)
    with pytest.raises(UsageError, match="1 of 3 clients have not enrolled, the first is client 1"):
        enrol_all(HostileNodes(tmp_path, WRONG_RESPONSES[name]), tmp_path)


def test_enrolment_waits_for_an_offline_node(tmp_path):
    nodes = Absent(tmp_path, n=3)
    nodes.missed = {"enrol": {1}}
    assert enrol_all(nodes, tmp_path, tries=2) == enrol_all(Nodes(tmp_path, 3), tmp_path)
    assert nodes.waits == [([1], 0.0)]
    assert nodes.log_lines == ["client 1 has not enrolled: it is offline or did not answer"]


@pytest.mark.slow("three runs of nodes")
def test_only_a_valid_description_is_stored(tmp_path):
    """The run continues in the same directory when the node is honest.

    A description that no metric fits is not stored either.
    """
    nodes = HostileNodes(tmp_path, WRONG_RESPONSES["a count that is text"])
    with pytest.raises(UsageError, match="have not enrolled"):
        nodes.run(ONE_ROUND, tmp_path / "run", tries=1)
    first = storage.read_json(tmp_path / "run" / run.DEPLOYED_FILE, schema.DEPLOYED)
    assert set(first) == {"run", "start"}
    nodes = Nodes(tmp_path, 3)
    with pytest.raises(UsageError, match="auroc"):
        nodes.run({**ONE_ROUND, "metrics": "auroc"}, tmp_path / "no", tries=1)
    assert set(json.loads((tmp_path / "no" / run.DEPLOYED_FILE).read_text())) == {"run", "start"}
    assert len(nodes.run(ONE_ROUND, tmp_path / "run", tries=1).clients) == 3
    start_record = storage.read_json(tmp_path / "run" / run.DEPLOYED_FILE, schema.DEPLOYED)
    assert start_record["run"] != first["run"]


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("target", ["int32", [3, 4]], "no method can be built"),
        ("constants", {"label_map": ["bool", []]}, "no method can be built"),
        ("constants", {"classes": ["float32", []]}, "no method can be built"),
        ("input_shape", [2**28], "the server needs .*"),
    ],
)
def test_a_description_that_no_method_fits_is_not_stored(path, value, line, tmp_path, monkeypatch):
    """The run has one node, so no other node contradicts the description."""
    capacity = forecast.Capacity(1e9, 1e9, math.inf, False)
    monkeypatch.setattr(forecast, "capacity", lambda: capacity)
    config = {**ONE_ROUND, "clients": 1, "clients_per_round": 1}
    data = [{**NODE_DATA, "clients": 1, "client": 0}]
    nodes = HostileNodes(tmp_path, describing(path, value), hostile=0, n=1, data=data)
    with pytest.raises(UsageError, match=f"{line} for the data that the nodes describe"):
        nodes.run(config, tmp_path / "run", tries=1)
    assert "federation" not in json.loads((tmp_path / "run" / run.DEPLOYED_FILE).read_text())


def test_a_description_without_a_state_is_not_stored(tmp_path, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(server, "initial_state", full)
    nodes = Nodes(tmp_path, 3)
    with pytest.raises(UsageError, match=r"no state can be initialised .*Out of memory"):
        nodes.run(ONE_ROUND, tmp_path / "run", tries=1)
    assert "federation" not in json.loads((tmp_path / "run" / run.DEPLOYED_FILE).read_text())


def test_text_from_a_node_is_escaped_in_the_log(tmp_path):
    nodes = HostileNodes(tmp_path, WRONG_RESPONSES["text"])
    with pytest.raises(UsageError, match="have not enrolled"):
        nodes.run(ONE_ROUND, tmp_path / "run", tries=1)
    (line,) = nodes.log_lines
    escaped = "sorry\\nThe run has ended: /srv\\x1b[2J\\u202e"
    assert line == f"client 1 cannot enrol: it has refused: {escaped}"


INCONSISTENT = {
    "sums.n": [31, 60],
    "sums.mean": [[1.0]],
    "sums.m2": [[1.0, 2.0, 3.0]],
    "sums": [DELETE],
    "normalise.features": [[True, True]],
    "normalise.targets": [True],
    "normalise": [DELETE],
    "classes": [["no", "no"], ["no"]],
    "counts.test": [11],
    "constants": [{"label_map": ["int32", [2**20, 2**20]]}],
    "each": [[2**20, 2**20]],
}


@pytest.mark.parametrize(("path", "value"), members(INCONSISTENT))
def test_an_inconsistent_description_is_refused(path, value):
    request = enrolment.request(RUN, 0, {}, 0)
    digest = wire.decode(request, len(request)).digest
    facts = {"kind": "enrol", "run": RUN, "client": 0, "request": digest}

    def read(described):
        content = wire.encode({**facts, "described": described})
        return enrolment.read_description(request, content)

    assert read(DESCRIPTION) == DESCRIPTION
    with pytest.raises(InvalidError):
        read(replace_at(DESCRIPTION, path, value))


def test_nodes_that_disagree_with_most_are_refused():
    differs = replace_at(DESCRIPTION, "classes", ["yes", "no"])
    third = replace_at(DESCRIPTION, "outputs", 3)
    find = enrolment.find_disagreements
    assert find({0: DESCRIPTION, 1: DESCRIPTION}) == {}
    lines = find({0: differs, 1: DESCRIPTION, 2: DESCRIPTION})
    assert lines == {0: "its classes differs from that of client 1; all nodes need the same"}
    assert {0, 1} & set(find({0: differs, 3: third, 1: DESCRIPTION}))
    assert list(find({0: DESCRIPTION, 1: differs})) == [1]


def test_moments_of_two_nodes_equal_those_of_all_examples():
    x = np.random.default_rng(0).normal(5, 3, (50, 2))
    parts = [x[:20], x[20:]]
    sums = [
        {"n": len(p), "mean": p.mean(0).tolist(), "m2": np.square(p - p.mean(0)).sum(0).tolist()}
        for p in parts
    ]
    moments = enrolment._moments(sums)
    np.testing.assert_allclose(moments["mean"], x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments["deviation"], x.std(0), rtol=1e-12)


def test_held_out_nodes_do_not_change_the_normalisation():
    others = replace_at(DESCRIPTION, "sums", {"n": 30, "mean": [1000.0, 50.0], "m2": [9.0, 9.0]})
    described = {0: DESCRIPTION, 1: DESCRIPTION, 2: others}
    settings = SimpleNamespace(held_out=1, groups=())
    federation = enrolment.build_federation(described, settings)
    assert federation["mean"] == DESCRIPTION["sums"]["mean"]
    np.testing.assert_allclose(federation["deviation"], [np.sqrt(2.5 / 30), 1.0], rtol=1e-12)


def test_moments_at_the_bounds_are_finite():
    largest, n = schema.MAX_MEAN, schema.MAX_EXAMPLES * 1000
    extreme = [
        {"n": n, "mean": [largest, 0.0], "m2": [largest**2 * schema.MAX_EXAMPLES, 1e-70]},
        {"n": 1, "mean": [-largest, 0.0], "m2": [0.0, 0.0]},
    ]
    moments = enrolment._moments(extreme)
    assert all(math.isfinite(value) for values in moments.values() for value in values)
    assert moments["deviation"][1] == 1.0


WRONG_SCORES = [
    ("before/examples", 10**6, "enrolled with"),
    ("before/examples", -13, "enrolled with"),
    ("before/metrics/accuracy", 1e9, "accuracy in before is not from -1e-05 to 1"),
    ("before/metrics/accuracy", -1, "accuracy in before"),
    ("before/loss", 1e33, "loss in before"),
    ("validation/examples", 14, "validation is not over"),
]


def test_scores_out_of_bounds_are_refused(loop):
    pending = server.open_evaluation(loop.server, server.initial_state(loop.server), 1, range(4))
    response = loop.ask(pending.requests)[0]
    arrays = wire.decode(response, len(response)).arrays

    def read(name, value):
        array = np.full_like(arrays[f"scores/{name}"], value)
        content = replace_parts(response, f"scores/{name}", array=array)
        return server.read_scores(loop.server, pending, 0, content)

    assert server.read_scores(loop.server, pending, 0, response).before.examples > 0
    for name, value, line in WRONG_SCORES:
        with pytest.raises(InvalidError, match=line):
            read(name, value)
    # An honest node whose model has diverged sends scores that are not finite.
    assert np.isnan(read("before/loss", np.nan).before.loss)


def test_updates_out_of_bounds_are_rejected(loop):
    _, pending, responses = loop.first_round()
    response = responses[0]
    arrays = wire.decode(response, len(response)).arrays
    metric = next(name for name in arrays if name.startswith("metrics/"))
    kernel = next(name for name in arrays if name.startswith("upload/") and "kernel" in name)
    assert server.read_update(loop.server, pending, 0, response).accepted
    wrong = [(metric, value) for value in (1e31, -1e31, np.nan, np.inf)]
    for name, value in [*wrong, (kernel, 1e37)]:  # finite, but not its norm
        bad = replace_parts(response, name, array=np.full_like(arrays[name], value))
        assert not server.read_update(loop.server, pending, 0, bad).accepted, (name, value)


class LyingNodes(Nodes):
    """Nodes of which client 1 sends updates and scores that are out of bounds."""

    def respond(self, i, content):
        response = super().respond(i, content)
        message = wire.decode(response, len(response))
        lies = {"train": ("upload/", np.nan), "evaluate": ("scores/before/metrics/", 1e9)}
        if i != 1 or message.facts["kind"] not in lies:
            return response
        group, value = lies[message.facts["kind"]]
        name = next(name for name in message.arrays if name.startswith(group))
        return replace_parts(response, name, array=np.full_like(message.arrays[name], value))


def test_a_lying_node_does_not_affect_the_others(tmp_path):
    nodes = LyingNodes(tmp_path, 3)
    config = {**ONE_ROUND, "clients_per_round": 3, "rounds": 2}
    result = nodes.run(config, tmp_path / "run")
    for t in (1, 2):
        line = f"evaluate, round {t}: client 1: its accuracy in before is not from"
        assert any(logged.startswith(line) for logged in nodes.log_lines)
    assert [line["before"]["clients"] for line in result.metrics] == [2, 2]
    assert [line["rejected"] for line in result.metrics] == [1, 2]
    assert (tmp_path / "run" / "report.html").is_file()


def test_uploads_that_make_the_state_not_finite_are_rejected(loop, monkeypatch):
    """The state is unchanged."""
    server_state = server.initial_state(loop.server)
    pending = server.open_round(loop.server, server_state, 0)
    updates = {
        i: server.read_update(loop.server, pending, i, content)
        for i, content in loop.ask(pending.requests).items()
    }
    receive = loop.server.programs.receive

    def overflowing(*arguments):
        new, rows = receive(*arguments)
        return jax.tree.map(lambda leaf: leaf * np.float32(np.inf), new), rows

    monkeypatch.setattr(loop.server.programs, "receive", overflowing)
    after, (log,) = server.close_round(loop.server, server_state, pending, updates)
    assert after is server_state
    assert log.rejected.all()


def test_a_stored_description_is_checked_when_it_is_read(tmp_path):
    bad = replace_at(enrol_all(Nodes(tmp_path, 3), tmp_path), "counts.1.train", -13)
    (tmp_path / "run").mkdir()
    content = json.dumps({"run": RUN, "start": 0, "federation": bad})
    (tmp_path / "run" / run.DEPLOYED_FILE).write_text(content)
    with pytest.raises(UsageError, match=r"deployed\.json cannot be read"):
        run._read_start_record(tmp_path / "run", saved=False)
