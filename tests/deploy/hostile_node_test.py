"""A node that does more than its part: what a server makes of the bytes that it is sent."""

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
from tests.deploy.faults_test import changed, made
from tests.deploy.loopback import RUN, Loopback
from tests.deploy.run_test import CONFIG, PART, Nodes
from tests.deploy.schema_test import DESCRIBED, put
from tests.deploy.schema_test import del_ as missing

__all__ = ["made"]
HOSTILE = 1
INJECTED = "sorry\nThe run has ended: /srv\x1b[2J\u202e"
Change = Callable[[dict[str, Any]], Any]


class Hostile(Nodes):
    """Three nodes, of which one changes what it says of its examples, at first or always."""

    def __init__(self, folder: Path, change: Change, times: int = 10**6) -> None:
        super().__init__(folder, 3)
        self.change, self.times = change, times

    def answer(self, i: int, content: bytes) -> bytes:
        good = super().answer(i, content)
        facts = wire.decode(good, len(good)).facts
        if i != HOSTILE or facts["kind"] != "enrol" or self.times == 0:
            return good
        self.times -= 1
        return wire.encode(self.change(facts))


ONE_ROUND = {**CONFIG, "rounds": 1, "evaluate_after": False}


def enrolled(nodes: Nodes, folder: Path, tries: int = 3) -> dict[str, Any]:
    """The description that a server keeps after it has asked nodes to enrol."""
    settings, _ = run.assembly.complete(ONE_ROUND)
    return enrolment.enrol(
        RUN,
        0,
        settings,
        run.assembly.node_settings(ONE_ROUND),
        lambda requests: nodes.ask(requests, None),
        tries,
        nodes.said.append,
    )


WRONG: dict[str, Change] = {
    "a count that is text": lambda facts: put(facts, "described.counts.train", "many"),
    "a count below zero": lambda facts: put(facts, "described.counts.train", -5),
    "a huge count": lambda facts: put(facts, "described.counts.train", 10**12),
    "more than its table holds": lambda facts: put(facts, "described.counts.train", 10**6),
    "a huge table": lambda facts: put(facts, "described.widths.train", 2**45),
    "huge outputs": lambda facts: put(facts, "described.outputs", 3_000_000_000),
    "other outputs": lambda facts: put(facts, "described.outputs", 1_000_000),
    "a huge shape": lambda facts: put(facts, "described.input_shape", [2**20, 2**20]),
    "a missing key": lambda facts: put(facts, "described.widths", missing),
    "sums that nobody wants": lambda facts: put(
        facts, "described.sums", {"n": 30, "mean": [1.0], "m2": [1.0]}
    ),
    "another client": lambda facts: put(facts, "client", 0),
    "another run": lambda facts: put(facts, "run", "aaaa"),
    "another request": lambda facts: put(facts, "request", "0" * 64),
    "another kind": lambda facts: {"kind": "shutdown"},
    "text": lambda facts: {"kind": "refused", "why": INJECTED},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_bad_enrolment_is_one_line_and_does_not_end_a_run(what: str, tmp_path: Path):
    """The node is asked again, and enrols when it is honest; if it never is, nothing is kept."""
    nodes = Hostile(tmp_path, WRONG[what], times=2)
    known = enrolled(nodes, tmp_path)
    assert known == enrolled(Nodes(tmp_path, 3), tmp_path)
    assert len(nodes.said) == 2
    assert all(line.startswith("client 1 cannot enrol: ") for line in nodes.said)
    with pytest.raises(UsageError, match="1 of 3 clients have not enrolled, the first is client 1"):
        enrolled(Hostile(tmp_path, WRONG[what]), tmp_path)


def test_a_description_is_kept_only_when_it_was_checked(tmp_path: Path):
    """A run whose node was hostile goes on with the same directory when it is honest.

    Nor is it kept if no method can be built of it.
    """
    nodes: Nodes = Hostile(tmp_path, WRONG["a count that is text"])
    waiting = run.Waiting(tries=2)
    with pytest.raises(UsageError, match="have not enrolled"):
        run.run(ONE_ROUND, tmp_path / "run", nodes, waiting, nodes.said.append)
    first = storage.read_json(tmp_path / "run" / run.DEPLOYED_FILE, schema.DEPLOYED)
    assert set(first) == {"run", "starts"}
    nodes = Nodes(tmp_path, 3)
    with pytest.raises(UsageError, match="auroc"):
        run.run(
            {**ONE_ROUND, "metrics": "auroc"}, tmp_path / "no", nodes, waiting, nodes.said.append
        )
    assert set(json.loads((tmp_path / "no" / run.DEPLOYED_FILE).read_text())) == {"run", "starts"}
    done = run.run(ONE_ROUND, tmp_path / "run", nodes, waiting, nodes.said.append)
    assert len(done.clients) == 3
    known = storage.read_json(tmp_path / "run" / run.DEPLOYED_FILE, schema.DEPLOYED)
    assert known["run"] != first["run"]


class Alone(Nodes):
    """One node, which describes its examples wrongly, so that no other one says otherwise."""

    def __init__(self, folder: Path, change: Change) -> None:
        data = [{**PART, "clients": 1, "client": 0}]
        super().__init__(folder, 1, data=data)
        self.change = change

    def answer(self, i: int, content: bytes) -> bytes:
        good = super().answer(i, content)
        facts = wire.decode(good, len(good)).facts
        return wire.encode(self.change(facts)) if facts["kind"] == "enrol" else good


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
def test_a_description_that_no_server_can_use_is_one_line_and_is_not_kept(
    path: str, value: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        run.forecast, "capacity", lambda: forecast.Capacity(1e9, 1e9, math.inf, False)
    )
    config = {**ONE_ROUND, "clients": 1, "clients_per_round": 1}
    nodes = Alone(tmp_path, lambda facts: put(facts, f"described.{path}", value))
    with pytest.raises(UsageError, match=line):
        run.run(config, tmp_path / "run", nodes, run.Waiting(tries=1), nodes.said.append)
    assert "federation" not in json.loads((tmp_path / "run" / run.DEPLOYED_FILE).read_text())


def test_a_description_is_kept_only_when_there_is_a_state_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(server, "initial_state", full)
    nodes = Nodes(tmp_path, 3)
    with pytest.raises(UsageError, match=r"no state can be initialised .*Out of memory"):
        run.run(ONE_ROUND, tmp_path / "run", nodes, run.Waiting(tries=1), nodes.said.append)
    assert "federation" not in json.loads((tmp_path / "run" / run.DEPLOYED_FILE).read_text())


def test_text_of_a_node_is_one_escaped_line_of_a_runs_log(tmp_path: Path):
    nodes = Hostile(tmp_path, WRONG["text"])
    with pytest.raises(UsageError, match="have not enrolled"):
        run.run(ONE_ROUND, tmp_path / "run", nodes, run.Waiting(tries=1), nodes.said.append)
    (line,) = nodes.said
    wanted = "sorry\\nThe run has ended: /srv\\x1b[2J\\u202e"
    assert line == f"client 1 cannot enrol: it has refused: {wanted}"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("sums.n", 31),
        ("sums.n", 60),
        ("sums.mean", [1.0]),
        ("sums.m2", [1.0, 2.0, 3.0]),
        ("normalise.features", [True, True]),
        ("normalise.targets", True),
        ("normalise", missing),
        ("sums", missing),
        ("classes", ["no", "no"]),
        ("classes", ["no"]),
        ("counts.test", 11),
        ("constants", {"label_map": ["int32", [2**20, 2**20]]}),
        ("each", [2**20, 2**20]),
    ],
)
def test_a_description_that_does_not_fit_together(path: str, value: Any):
    request = enrolment.request(RUN, 0, {}, 0)
    digest = wire.decode(request, len(request)).digest
    facts = {"kind": "enrol", "run": RUN, "client": 0, "request": digest}

    def answer(described: Any) -> bytes:
        return wire.encode({**facts, "described": described})

    assert enrolment.read_description(request, answer(DESCRIBED)) == DESCRIBED
    with pytest.raises(InvalidError):
        enrolment.read_description(request, answer(put(DESCRIBED, path, value)))


def test_most_nodes_say_what_all_must_say():
    other, third = put(DESCRIBED, "classes", ["yes", "no"]), put(DESCRIBED, "outputs", 3)
    assert enrolment.find_disagreements({0: DESCRIBED, 1: DESCRIBED}) == {}
    for said in ({0: other, 1: DESCRIBED, 2: DESCRIBED}, {0: other, 3: third, 1: DESCRIBED}):
        assert 0 in enrolment.find_disagreements(said) or 1 in enrolment.find_disagreements(said)
    lines = enrolment.find_disagreements({0: other, 1: DESCRIBED, 2: DESCRIBED})
    assert lines == {0: "its classes differs from that of client 1; all nodes need the same"}
    assert list(enrolment.find_disagreements({0: DESCRIBED, 1: other})) == [1]


def test_sums_of_two_nodes_are_those_of_both_together():
    x = np.random.default_rng(0).normal(5, 3, (50, 2))
    parts = [x[:20], x[20:]]
    sums = [
        {"n": len(p), "mean": p.mean(0).tolist(), "m2": np.square(p - p.mean(0)).sum(0).tolist()}
        for p in parts
    ]
    made = enrolment._moments(sums)
    np.testing.assert_allclose(made["mean"], x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(made["deviation"], x.std(0), rtol=1e-12)


def test_sums_at_their_bounds_are_finite():
    most, n = schema.MAX_MEAN, schema.MAX_EXAMPLES * 1000
    extreme = [
        {"n": n, "mean": [most, 0.0], "m2": [most**2 * schema.MAX_EXAMPLES, 1e-70]},
        {"n": 1, "mean": [-most, 0.0], "m2": [0.0, 0.0]},
    ]
    made = enrolment._moments(extreme)
    assert all(math.isfinite(value) for values in made.values() for value in values)
    assert made["deviation"][1] == 1.0


@pytest.fixture
def evaluated(made: Loopback) -> tuple[Loopback, Any, dict[int, bytes]]:
    server_state = server.initial_state(made.server)
    opened = server.open_evaluation(made.server, server_state, 1, range(4))
    return made, opened, made.ask(opened.requests)


def refused(made: Loopback, opened: Any, content: bytes) -> str:
    with pytest.raises(InvalidError) as error:
        server.read_scores(made.server, opened, 0, content)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "word"),
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
    name: str, value: float, word: str, evaluated: tuple[Loopback, Any, dict[int, bytes]]
):
    made, opened, answers = evaluated
    assert server.read_scores(made.server, opened, 0, answers[0]).before.examples > 0
    found = wire.decode(answers[0], len(answers[0])).arrays[f"scores/{name}"]
    array = np.full_like(found, value)
    assert word in refused(made, opened, changed(answers[0], f"scores/{name}", array=array))


def test_scores_that_are_not_finite_are_left_out(
    evaluated: tuple[Loopback, Any, dict[int, bytes]],
):
    """As those of an honest node whose model is not finite."""
    made, opened, answers = evaluated
    bad = changed(answers[0], "scores/before/loss", array=np.array(np.nan, np.float32))
    assert np.isnan(server.read_scores(made.server, opened, 0, bad).before.loss)


@pytest.mark.parametrize("value", [1e13, -1e13, np.nan, np.inf])
def test_metrics_of_training_out_of_bounds_are_rejected(made: Loopback, value: float):
    server_state = server.initial_state(made.server)
    opened = server.open_round(made.server, server_state, 0)
    good = made.ask(opened.requests)[0]
    name = next(n for n in wire.decode(good, len(good)).arrays if n.startswith("metrics/"))
    bad = changed(good, name, array=np.array(value, np.float32))
    assert server.read_update(made.server, opened, 0, good).accepted
    assert not server.read_update(made.server, opened, 0, bad).accepted


def test_a_finite_upload_without_a_finite_norm_is_rejected(made: Loopback):
    server_state = server.initial_state(made.server)
    opened = server.open_round(made.server, server_state, 0)
    good = made.ask(opened.requests)[0]
    found = wire.decode(good, len(good)).arrays
    name = next(n for n in found if n.startswith("upload/") and "kernel" in n)
    bad = changed(good, name, array=np.full_like(found[name], 1e37))
    assert server.read_update(made.server, opened, 0, good).accepted
    assert not server.read_update(made.server, opened, 0, bad).accepted


def test_uploads_that_make_the_state_not_finite_are_rejected(
    made: Loopback, monkeypatch: pytest.MonkeyPatch
):
    """The round changes nothing, so that the next one goes on."""
    server_state = server.initial_state(made.server)
    opened = server.open_round(made.server, server_state, 0)
    came = {
        i: server.read_update(made.server, opened, i, content)
        for i, content in made.ask(opened.requests).items()
    }
    receive = made.server.programs.receive

    def overflowing(*arguments: Any) -> Any:
        new, rows = receive(*arguments)
        return jax.tree.map(lambda leaf: leaf * np.float32(np.inf), new), rows

    monkeypatch.setattr(made.server.programs, "receive", overflowing)
    after, (log,) = server.close_round(made.server, server_state, opened, came)
    assert after is server_state
    assert log.rejected.all()


def test_text_and_numbers_of_answers_have_a_form(made: Loopback):
    server_state = server.initial_state(made.server)
    opened = server.open_round(made.server, server_state, 0)
    good = made.ask(opened.requests)[0]
    for facts in ({"finite": 1}, {"round": 10**12}, {"more": 1}, {"client": "0"}):
        with pytest.raises(InvalidError):
            server.read_update(made.server, opened, 0, changed(good, **facts))
    long = wire.encode({"kind": "refused", "why": "x" * 1001})
    with pytest.raises(InvalidError, match=r"message\.why must be text"):
        server.read_update(made.server, opened, 0, long)


def test_a_kept_description_is_checked_when_it_is_read(tmp_path: Path):
    known = enrolled(Nodes(tmp_path, 3), tmp_path)
    (tmp_path / "run").mkdir()
    bad = copy.deepcopy(known)
    bad["counts"][1]["train"] = -13
    content = json.dumps({"run": RUN, "starts": 0, "federation": bad})
    (tmp_path / "run" / run.DEPLOYED_FILE).write_text(content)
    with pytest.raises(UsageError, match=r"deployed\.json cannot be read"):
        run._read_start_record(tmp_path / "run", saved=False)
