"""Hostile nodes: the server rejects invalid descriptions, uploads and scores."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import enrolment, run, schema, server, storage, wire
from fedjax_pfl.deploy.schema import InvalidError
from fedjax_pfl.simulation import forecast
from tests.deploy.faults_test import loop, replace_parts
from tests.deploy.loopback import RUN, Loopback
from tests.deploy.run_test import CONFIG, NODE_DATA, Nodes
from tests.deploy.schema_test import DELETE as DELETE
from tests.deploy.schema_test import DESCRIPTION, replace_at

__all__ = ["loop"]
HOSTILE_CLIENT = 1
INJECTED = "sorry\nThe run has ended: /srv\x1b[2J\u202e"
Change = Callable[[dict[str, Any]], Any]


class HostileNodes(Nodes):
    """Three nodes, one of which changes its description, a number of times or always."""

    def __init__(self, folder: Path, change: Change, times: int = 10**6) -> None:
        super().__init__(folder, 3)
        self.change, self.times = change, times

    def respond(self, i: int, content: bytes) -> bytes:
        response = super().respond(i, content)
        facts = wire.decode(response, len(response)).facts
        if i != HOSTILE_CLIENT or facts["kind"] != "enrol" or self.times == 0:
            return response
        self.times -= 1
        return wire.encode(self.change(facts))


ONE_ROUND = {**CONFIG, "rounds": 1, "evaluate_after": False}


def enrol_all(nodes: Nodes, folder: Path, tries: int = 3) -> dict[str, Any]:
    """Returns the federation's description after all nodes have enrolled."""
    settings, _ = run.assembly.complete(ONE_ROUND)
    return enrolment.enrol(
        RUN,
        0,
        settings,
        run.assembly.node_settings(ONE_ROUND),
        lambda requests: nodes.ask(requests, None),
        tries,
        nodes.log_lines.append,
    )


WRONG_RESPONSES: dict[str, Change] = {
    "a count that is text": lambda facts: replace_at(facts, "described.counts.train", "many"),
    "a count below zero": lambda facts: replace_at(facts, "described.counts.train", -5),
    "a huge count": lambda facts: replace_at(facts, "described.counts.train", 10**12),
    "more than its table holds": lambda facts: replace_at(facts, "described.counts.train", 10**6),
    "a huge table": lambda facts: replace_at(facts, "described.widths.train", 2**45),
    "huge outputs": lambda facts: replace_at(facts, "described.outputs", 3_000_000_000),
    "other outputs": lambda facts: replace_at(facts, "described.outputs", 1_000_000),
    "a huge shape": lambda facts: replace_at(facts, "described.input_shape", [2**20, 2**20]),
    "a missing key": lambda facts: replace_at(facts, "described.widths", DELETE),
    "sums that nobody wants": lambda facts: replace_at(
        facts, "described.sums", {"n": 30, "mean": [1.0], "m2": [1.0]}
    ),
    "another client": lambda facts: replace_at(facts, "client", 0),
    "another run": lambda facts: replace_at(facts, "run", "aaaa"),
    "another request": lambda facts: replace_at(facts, "request", "0" * 64),
    "another kind": lambda facts: {"kind": "shutdown"},
    "text": lambda facts: {"kind": "refused", "why": INJECTED},
}


@pytest.mark.parametrize("name", WRONG_RESPONSES)
def test_a_node_enrols_after_invalid_responses(name: str, tmp_path: Path):
    """A node that never sends a valid response ends the run."""
    nodes = HostileNodes(tmp_path, WRONG_RESPONSES[name], times=2)
    federation = enrol_all(nodes, tmp_path)
    assert federation == enrol_all(Nodes(tmp_path, 3), tmp_path)
    assert len(nodes.log_lines) == 2
    assert all(line.startswith("client 1 cannot enrol: ") for line in nodes.log_lines)
    with pytest.raises(UsageError, match="1 of 3 clients have not enrolled, the first is client 1"):
        enrol_all(HostileNodes(tmp_path, WRONG_RESPONSES[name]), tmp_path)


def test_only_a_valid_description_is_stored(tmp_path: Path):
    """The run continues in the same directory when the node is honest.

    A description that no method fits is not stored either.
    """
    nodes: Nodes = HostileNodes(tmp_path, WRONG_RESPONSES["a count that is text"])
    waiting = run.Waiting(tries=2)
    with pytest.raises(UsageError, match="have not enrolled"):
        run.run(ONE_ROUND, tmp_path / "run", nodes, waiting, nodes.log_lines.append)
    first = storage.read_json(tmp_path / "run" / run.DEPLOYED_FILE, schema.DEPLOYED)
    assert set(first) == {"run", "starts"}
    nodes = Nodes(tmp_path, 3)
    with pytest.raises(UsageError, match="auroc"):
        run.run(
            {**ONE_ROUND, "metrics": "auroc"},
            tmp_path / "no",
            nodes,
            waiting,
            nodes.log_lines.append,
        )
    assert set(json.loads((tmp_path / "no" / run.DEPLOYED_FILE).read_text())) == {"run", "starts"}
    done = run.run(ONE_ROUND, tmp_path / "run", nodes, waiting, nodes.log_lines.append)
    assert len(done.clients) == 3
    start_record = storage.read_json(tmp_path / "run" / run.DEPLOYED_FILE, schema.DEPLOYED)
    assert start_record["run"] != first["run"]


class SingleNode(Nodes):
    """One node with a wrong description that no other node contradicts."""

    def __init__(self, folder: Path, change: Change) -> None:
        data = [{**NODE_DATA, "clients": 1, "client": 0}]
        super().__init__(folder, 1, data=data)
        self.change = change

    def respond(self, i: int, content: bytes) -> bytes:
        response = super().respond(i, content)
        facts = wire.decode(response, len(response)).facts
        return wire.encode(self.change(facts)) if facts["kind"] == "enrol" else response


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (
            "target",
            ["int32", [3, 4]],
            "no method can be built for the data that the nodes describe",
        ),
        ("constants", {"label_map": ["bool", []]}, "no method can be built"),
        ("constants", {"classes": ["float32", []]}, "no method can be built"),
        ("input_shape", [2**28], "the server needs .* for the data that the nodes describe"),
    ],
)
def test_a_description_that_no_method_fits_is_not_stored(
    path: str, value: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        run.forecast, "capacity", lambda: forecast.Capacity(1e9, 1e9, math.inf, False)
    )
    config = {**ONE_ROUND, "clients": 1, "clients_per_round": 1}
    nodes = SingleNode(tmp_path, lambda facts: replace_at(facts, f"described.{path}", value))
    with pytest.raises(UsageError, match=line):
        run.run(config, tmp_path / "run", nodes, run.Waiting(tries=1), nodes.log_lines.append)
    assert "federation" not in json.loads((tmp_path / "run" / run.DEPLOYED_FILE).read_text())


def test_a_description_without_a_state_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(server, "initial_state", full)
    nodes = Nodes(tmp_path, 3)
    with pytest.raises(UsageError, match=r"no state can be initialised .*Out of memory"):
        run.run(ONE_ROUND, tmp_path / "run", nodes, run.Waiting(tries=1), nodes.log_lines.append)
    assert "federation" not in json.loads((tmp_path / "run" / run.DEPLOYED_FILE).read_text())


def test_text_from_a_node_is_escaped_in_the_log(tmp_path: Path):
    nodes = HostileNodes(tmp_path, WRONG_RESPONSES["text"])
    with pytest.raises(UsageError, match="have not enrolled"):
        run.run(ONE_ROUND, tmp_path / "run", nodes, run.Waiting(tries=1), nodes.log_lines.append)
    (line,) = nodes.log_lines
    escaped = "sorry\\nThe run has ended: /srv\\x1b[2J\\u202e"
    assert line == f"client 1 cannot enrol: it has refused: {escaped}"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("sums.n", 31),
        ("sums.n", 60),
        ("sums.mean", [1.0]),
        ("sums.m2", [1.0, 2.0, 3.0]),
        ("normalise.features", [True, True]),
        ("normalise.targets", True),
        ("normalise", DELETE),
        ("sums", DELETE),
        ("classes", ["no", "no"]),
        ("classes", ["no"]),
        ("counts.test", 11),
        ("constants", {"label_map": ["int32", [2**20, 2**20]]}),
        ("each", [2**20, 2**20]),
    ],
)
def test_an_inconsistent_description_is_refused(path: str, value: Any):
    request = enrolment.request(RUN, 0, {}, 0)
    digest = wire.decode(request, len(request)).digest
    facts = {"kind": "enrol", "run": RUN, "client": 0, "request": digest}

    def response_with(described: Any) -> bytes:
        return wire.encode({**facts, "described": described})

    assert enrolment.read_description(request, response_with(DESCRIPTION)) == DESCRIPTION
    with pytest.raises(InvalidError):
        enrolment.read_description(request, response_with(replace_at(DESCRIPTION, path, value)))


def test_nodes_that_disagree_with_most_are_refused():
    differs, third = (
        replace_at(DESCRIPTION, "classes", ["yes", "no"]),
        replace_at(DESCRIPTION, "outputs", 3),
    )
    assert enrolment.find_disagreements({0: DESCRIPTION, 1: DESCRIPTION}) == {}
    for descriptions in (
        {0: differs, 1: DESCRIPTION, 2: DESCRIPTION},
        {0: differs, 3: third, 1: DESCRIPTION},
    ):
        assert 0 in enrolment.find_disagreements(descriptions) or 1 in enrolment.find_disagreements(
            descriptions
        )
    lines = enrolment.find_disagreements({0: differs, 1: DESCRIPTION, 2: DESCRIPTION})
    assert lines == {0: "its classes differs from that of client 1; all nodes need the same"}
    assert list(enrolment.find_disagreements({0: DESCRIPTION, 1: differs})) == [1]


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


def test_moments_at_the_bounds_are_finite():
    largest, n = schema.MAX_MEAN, schema.MAX_EXAMPLES * 1000
    extreme = [
        {"n": n, "mean": [largest, 0.0], "m2": [largest**2 * schema.MAX_EXAMPLES, 1e-70]},
        {"n": 1, "mean": [-largest, 0.0], "m2": [0.0, 0.0]},
    ]
    moments = enrolment._moments(extreme)
    assert all(math.isfinite(value) for values in moments.values() for value in values)
    assert moments["deviation"][1] == 1.0


@pytest.fixture
def evaluated(loop: Loopback) -> tuple[Loopback, Any, dict[int, bytes]]:
    server_state = server.initial_state(loop.server)
    pending = server.open_evaluation(loop.server, server_state, 1, range(4))
    return loop, pending, loop.ask(pending.requests)


def refusal(loop: Loopback, pending: Any, content: bytes) -> str:
    with pytest.raises(InvalidError) as error:
        server.read_scores(loop.server, pending, 0, content)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("before/examples", 10**6, "enrolled with"),
        ("before/examples", -13, "enrolled with"),
        ("before/metrics/accuracy", 1e9, "accuracy in before is not from -1e-05 to 1"),
        ("before/metrics/accuracy", -1, "accuracy in before"),
        ("before/loss", 1e30, "loss in before"),
        ("validation/examples", 14, "validation is not over"),
    ],
)
def test_scores_out_of_bounds_are_refused(
    name: str, value: float, line: str, evaluated: tuple[Loopback, Any, dict[int, bytes]]
):
    loop, pending, responses = evaluated
    assert server.read_scores(loop.server, pending, 0, responses[0]).before.examples > 0
    array = wire.decode(responses[0], len(responses[0])).arrays[f"scores/{name}"]
    replaced = np.full_like(array, value)
    assert line in refusal(
        loop, pending, replace_parts(responses[0], f"scores/{name}", array=replaced)
    )


def test_scores_that_are_not_finite_are_allowed(
    evaluated: tuple[Loopback, Any, dict[int, bytes]],
):
    """An honest node whose model has diverged sends such scores."""
    loop, pending, responses = evaluated
    bad = replace_parts(responses[0], "scores/before/loss", array=np.array(np.nan, np.float32))
    assert np.isnan(server.read_scores(loop.server, pending, 0, bad).before.loss)


@pytest.mark.parametrize("value", [1e13, -1e13, np.nan, np.inf])
def test_metrics_of_training_out_of_bounds_are_rejected(loop: Loopback, value: float):
    _, pending, responses = loop.first_round()
    response = responses[0]
    name = next(n for n in wire.decode(response, len(response)).arrays if n.startswith("metrics/"))
    bad = replace_parts(response, name, array=np.array(value, np.float32))
    assert server.read_update(loop.server, pending, 0, response).accepted
    assert not server.read_update(loop.server, pending, 0, bad).accepted


def test_a_finite_upload_without_a_finite_norm_is_rejected(loop: Loopback):
    _, pending, responses = loop.first_round()
    response = responses[0]
    arrays = wire.decode(response, len(response)).arrays
    name = next(n for n in arrays if n.startswith("upload/") and "kernel" in n)
    bad = replace_parts(response, name, array=np.full_like(arrays[name], 1e37))
    assert server.read_update(loop.server, pending, 0, response).accepted
    assert not server.read_update(loop.server, pending, 0, bad).accepted


def test_uploads_that_make_the_state_not_finite_are_rejected(
    loop: Loopback, monkeypatch: pytest.MonkeyPatch
):
    """The state is unchanged, so training continues."""
    server_state = server.initial_state(loop.server)
    pending = server.open_round(loop.server, server_state, 0)
    updates = {
        i: server.read_update(loop.server, pending, i, content)
        for i, content in loop.ask(pending.requests).items()
    }
    receive = loop.server.programs.receive

    def overflowing(*arguments: Any) -> Any:
        new, rows = receive(*arguments)
        return jax.tree.map(lambda leaf: leaf * np.float32(np.inf), new), rows

    monkeypatch.setattr(loop.server.programs, "receive", overflowing)
    after, (log,) = server.close_round(loop.server, server_state, pending, updates)
    assert after is server_state
    assert log.rejected.all()


def test_facts_of_responses_are_checked(loop: Loopback):
    _, pending, responses = loop.first_round()
    response = responses[0]
    for facts in ({"finite": 1}, {"round": 10**12}, {"more": 1}, {"client": "0"}):
        with pytest.raises(InvalidError):
            server.read_update(loop.server, pending, 0, replace_parts(response, **facts))
    long = wire.encode({"kind": "refused", "why": "x" * 1001})
    with pytest.raises(InvalidError, match=r"message\.why must be text"):
        server.read_update(loop.server, pending, 0, long)


def test_a_stored_description_is_checked_when_it_is_read(tmp_path: Path):
    federation = enrol_all(Nodes(tmp_path, 3), tmp_path)
    (tmp_path / "run").mkdir()
    bad = copy.deepcopy(federation)
    bad["counts"][1]["train"] = -13
    content = json.dumps({"run": RUN, "starts": 0, "federation": bad})
    (tmp_path / "run" / run.DEPLOYED_FILE).write_text(content)
    with pytest.raises(UsageError, match=r"deployed\.json cannot be read"):
        run._read_start_record(tmp_path / "run", saved=False)
