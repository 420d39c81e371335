"""A server that wants more than its part: what a node answers, by the bytes that it is sent."""

import copy
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedjax_pfl.deploy import assembly, enrolment, node, node_file, run, schema, server, wire
from fedjax_pfl.deploy.programs import ServerPrograms
from fedjax_pfl.deploy.server import Server
from tests.deploy.run_test import CONFIG, Nodes, made_node
from tests.deploy.schema_test import FEDERATION

RUN, OTHER = "1f0a", "2e1b"
SECRET = "Quetzalcoatl"  # in a cell
ID = 760_031_337  # in a column of ids
COLUMNS = ("nickname", "socialno", "ageyears")
ONE = {**CONFIG, "clients": 1, "clients_per_round": 1, "rounds": 1}
SENT = assembly.node_settings(ONE)


def table(path: Path, rows: int = 40, word: str = SECRET) -> Path:
    """A CSV file with a column of names and a column of ids, of which one is planted."""
    draw = np.random.default_rng(0)
    lines = [",".join([*COLUMNS, "label"])]
    for i in range(rows):
        name, ssn = (word, ID) if i == 3 else (f"Person{i}", 100_000_000 + i * 7919)
        age = draw.normal(40, 10)
        lines.append(f"{name},{ssn},{age:.3f},{'yes' if age > 40 else 'no'}")
    path.write_text("\n".join(lines))
    return path


def own(tmp_path: Path, rows: int | None = 40, **more: Any) -> node.Node:
    """A node whose owner lets ids and ages be used, and names be hashed.

    Args:
      rows: of its file; None: the file stays as it is.
    """
    path = tmp_path / "own.csv"
    content = {
        "dataset": f"csv:{path if rows is None else table(path, rows)}",
        "labels": ["no", "yes"],
        "words": {"nickname": 8},
        "test_fraction": 0.25,
        **more,
    }
    return made_node(tmp_path / "node", **{k: v for k, v in content.items() if v is not None})


def asked(kind: str = "enrol", /, **facts: Any) -> bytes:
    """A request; round facts are those of a first round."""
    common = {"kind": kind, "run": RUN, "client": 0, "settings": SENT}
    if kind != "enrol":
        common |= {"federation": FEDERATION, "round": 0, "settled": -1}
    return wire.encode({**common, **facts}, envelope={"start": 0})


def why(one: node.Node, content: bytes) -> str:
    """The line by which a node refuses."""
    found = wire.decode(node.respond(one, content), 10_000, schema.RESPONSE)
    assert found.facts["kind"] == "refused"
    assert "\n" not in found.facts["why"]
    assert SECRET not in found.facts["why"]
    return str(found.facts["why"])


def described(one: node.Node, **facts: Any) -> dict[str, Any]:
    """What a node says of its examples."""
    request = asked(**facts)
    return enrolment.read_description(request, node.respond(one, request))


@pytest.mark.parametrize(
    "settings",
    [
        {"dataset": "csv:/other/secret.csv"},
        {"csv": {"test": "/other/secret.csv"}},
        {"csv": {"input": "ssn"}},
        {"csv": {"label": "ssn", "label_kind": "class"}},
        {"data_dir": "/other"},
        {"split": "official"},
        {"test_fraction": 0.949},
        {"validation_fraction": 0.5},
        {"validation_examples": 3},
        {"fraction": 0.1},
        {"partition": "iid"},
        {"classes": {"per_client": 1}},
        {"partition_seed": 5},
        {"permute_labels": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_request_that_names_a_nodes_data_is_refused(settings: dict[str, Any], tmp_path: Path):
    """Each of them at enrolment and in a round."""
    one = own(tmp_path)
    name = next(iter(settings))
    for kind in ("enrol", "train"):
        line = why(one, asked(kind, settings={**SENT, **settings}))
        assert line == f"it sets {name}; only the node's own file decides about its data"
    assert list((tmp_path / "node").iterdir()) == []


def test_a_servers_own_requests_name_none_of_them():
    assert not set(SENT) & node_file.DATA_SETTINGS
    assert {"algorithm", "learning_rate", "clients", "seed"} <= set(SENT)
    rows = {"dataset", "data_dir", "fraction", "partition", "partition_seed", "split"}
    rows |= {"test_fraction", "validation_fraction", "validation_examples", "permute_labels"}
    assert rows | {"csv", "parquet", "images", "iid", "classes"} <= node_file.DATA_SETTINGS
    # What may change when a run is started again is not sent, because nodes keep what was.
    here = {"conv": "xla", "tensorboard": True, "devices": 3}
    assert assembly.node_settings({**ONE, **here}) == SENT


def test_settings_of_training_do_not_change_what_a_node_says(tmp_path: Path):
    one = own(tmp_path)
    first = described(one)
    changed = {**SENT, "seed": 7, "held_out": 0, "clients": 3, "batch_size": 1}
    assert described(one, settings=changed, run=OTHER) == first


def test_a_run_keeps_the_settings_that_a_node_enrolled_with(tmp_path: Path):
    """Another method could upload what this one keeps at the node."""
    one = own(tmp_path)
    described(one)
    for kind in ("enrol", "train"):
        line = why(one, asked(kind, settings={**SENT, "algorithm": "fedavg"}))
        assert line == "its settings are not those that this node enrolled with"


def test_a_model_that_is_too_large_is_refused(
    federation: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(node, "MAX_BYTES", 100_000)
    settings = {**SENT, "mlp": {"hidden": [100_000]}}
    one = own(tmp_path)
    described(one, settings=settings, run=OTHER)
    line = why(one, asked("train", federation=federation, settings=settings, run=OTHER))
    assert line == "its model needs more than 100,000 bytes in a round"


def test_no_cell_and_no_path_leaves_with_an_enrolment(tmp_path: Path):
    content = node.respond(own(tmp_path), asked())
    for planted in (SECRET, "Person", str(ID), *COLUMNS, "own.csv", str(tmp_path)):
        assert planted.encode() not in content
    assert b'"classes":["no","yes"]' in content


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"labels": None}, "labels"),
        ({"words": None}, "words"),
        ({"words": {"nickname": ["x"]}}, "Person0"),
    ],
)
def test_words_that_are_not_stated_end_in_the_nodes_own_log(
    changes: Any, word: str, tmp_path: Path, capsys: Any
):
    line = why(own(tmp_path, **changes), asked())
    assert line == "it failed with UsageError; its own log says more"
    logged = capsys.readouterr().err
    assert logged.count("\n") == 1
    assert word in logged


def test_sums_need_so_many_rows(tmp_path: Path):
    """Of 26 rows 6 or 7 test, so that 20 or 19 train."""
    assert described(own(tmp_path, 26))["sums"]["n"] == 20
    few = own(tmp_path, 26, test_fraction=0.26)
    assert "fewer training examples" in why(few, asked())
    fewer = own(tmp_path, 26, least_rows=10, test_fraction=0.3)
    assert described(fewer, run="aaaa")["sums"]["n"] == 18
    without = own(tmp_path, 26, csv={"normalise": "none"}, test_fraction=0.3)
    assert "sums" not in described(without, run=OTHER)


def test_sums_leave_once_in_a_run(tmp_path: Path):
    """The same ones again, or none: not those of the examples of another day."""
    first = described(own(tmp_path))
    assert described(own(tmp_path)) == first
    text = (tmp_path / "own.csv").read_text()
    (tmp_path / "own.csv").write_text(text.replace(SECRET, "Person3"))
    changed = own(tmp_path, None)
    assert changed.file.words == {"nickname": 8}
    assert "not those that it enrolled with" in why(changed, asked())
    later = own(tmp_path, 41)
    assert "not those that it enrolled with" in why(later, asked())
    assert described(later, run=OTHER)["sums"] != first["sums"]


def test_a_node_is_one_client(tmp_path: Path):
    """That of its file, or that of its first request; after a restart too."""
    named = own(tmp_path, client=1)
    assert why(named, asked(client=0)) == "it is for client 0, and this node is client 1"
    assert described(named, client=1)
    (tmp_path / "b").mkdir()
    first = own(tmp_path / "b")
    assert described(first, client=2)
    for run_name in (RUN, OTHER):
        again = why(own(tmp_path / "b"), asked(client=0, run=run_name))
        assert again == "it is for client 0, and this node is client 2"
        assert "client 2" in why(own(tmp_path / "b"), asked("train", client=0, run=run_name))
    assert not list((tmp_path / "b").glob("**/client-0*"))


def test_a_node_answers_in_no_run_that_it_is_not_in(tmp_path: Path):
    one = own(tmp_path)
    assert "has not enrolled" in why(one, asked("train"))
    described(one)
    assert "has not enrolled" in why(one, asked("train", run=OTHER))
    assert not (tmp_path / "node" / f"run-{OTHER}").exists()


def test_a_client_of_a_run_stays_that_one(tmp_path: Path):
    """Even where its owner has given the node another number."""
    described(own(tmp_path, client=0))
    assert why(own(tmp_path, client=1), asked(client=1)) == "it is client 0 of this run"


def test_a_node_keeps_so_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node, "MAX_RUNS", 2)
    one = own(tmp_path)
    for run_name in ("aaaa", "bbbb", "aaaa"):
        described(one, run=run_name)
    assert "has been in 2 runs" in why(one, asked(run="cccc"))


@pytest.fixture
def federation(tmp_path: Path) -> dict[str, Any]:
    """The description of the federation of `own` alone."""
    settings, _ = assembly.complete(ONE)
    return enrolment.build_federation({0: described(own(tmp_path))}, settings)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("counts", [{"train": 1, "validation": 0, "test": 10}]),
        ("alike.outputs", 3),
        ("alike.classes", ["yes", "no"]),
        ("alike.input_shape", [4]),
        ("mean", [0.0]),
        ("mean", None),
    ],
)
def test_a_federation_of_other_examples_is_refused(
    path: str, value: Any, federation: dict[str, Any], tmp_path: Path
):
    changed = copy.deepcopy(federation)
    *outer, last = path.split(".")
    place = changed[outer[0]] if outer else changed
    place[last] = value
    if value is None:
        del place[last]
    line = why(own(tmp_path), asked("train", federation=changed))
    assert "does not have this node's examples" in line or "other columns" in line


@pytest.fixture
def joined(federation: dict[str, Any], tmp_path: Path) -> tuple[node.Node, Server]:
    """A node that has trained for one round, and its server."""
    one = own(tmp_path, None)
    settings, words = assembly.complete(ONE)
    built, method = assembly.build_method(settings, words, federation)
    programs = ServerPrograms(method, built.data, 1)
    made = Server(RUN, 0, programs, {"settings": SENT, "federation": federation})
    content = node.respond(one, server.open_round(made, server.initial_state(made), 0).requests[0])
    assert wire.decode(content, len(content), schema.RESPONSE).facts["kind"] == "train"
    return one, made


@pytest.mark.parametrize(
    ("name", "value"),
    [("deviation", [1e-30, 1e30]), ("mean", [40.0, 0.0]), ("held_out", 1), ("groups", 2)],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_run_keeps_the_federation_that_its_first_round_had(
    name: str, value: Any, restarted: bool, joined: tuple[node.Node, Server]
):
    """A server cannot choose for each request how a node's columns are normalised."""
    one, made = joined
    if restarted:
        node._client_cache.clear()
    request_facts = {
        **made.request_facts,
        "federation": {**made.request_facts["federation"], name: value},
    }
    other = made._replace(request_facts=request_facts)
    opened = server.open_evaluation(other, server.initial_state(made), 1, [0])
    line = "the federation that it describes is not that of this run"
    assert why(one, opened.requests[0]) == line
    again = server.open_evaluation(made, server.initial_state(made), 1, [0])
    content = node.respond(one, again.requests[0])
    assert wire.decode(content, len(content), schema.RESPONSE).facts["kind"] == "evaluate"


def test_a_node_whose_owner_removes_the_folder_of_a_run_has_left_it(
    joined: tuple[node.Node, Server],
):
    """At once, without a restart of its worker."""
    one, made = joined
    shutil.rmtree(one.folder / f"run-{RUN}")
    opened = server.open_round(made, server.initial_state(made), 0)
    assert why(one, opened.requests[0]) == "this node has not enrolled in this run"
    assert not (one.folder / f"run-{RUN}").exists()


def test_a_full_disk_at_enrolment_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    one = own(tmp_path)
    with monkeypatch.context() as now:
        now.setattr(os, "fsync", full)
        line = why(one, asked())
    assert line.startswith("its disk cannot be written or read (No space left on device)")
    assert described(one)


def test_a_payload_of_another_shape_is_refused(federation: dict[str, Any], tmp_path: Path):
    assert "is missing" in why(own(tmp_path), asked("train", federation=federation))


def test_rounds_and_names_out_of_bounds_are_refused(tmp_path: Path):
    one = own(tmp_path)
    described(one)
    wrong = {"round": 10**9, "settled": -2, "run": "../x", "client": 10**9, "settings": {"a/b": 1}}
    for name, value in wrong.items():
        line = why(one, asked("train", **{name: value}))
        assert line.startswith(("message.", "name 0 in message."))
        assert name in line
    assert why(one, asked("shutdown")).startswith("message.kind must be enrol or train or")
    assert why(one, b"\x80\x04cos\nsystem\n") == "it does not begin as a message does"


def test_text_of_a_server_is_escaped_in_a_nodes_log(tmp_path: Path, capsys: Any):
    one = own(tmp_path)
    settings = {**SENT, "algorithm": "fedavg\x1b[2J\nall is well"}
    assert "it failed with UsageError" in why(one, asked(settings=settings))
    logged = capsys.readouterr().err
    assert "\\x1b[2J\\nall is well" in logged
    assert logged.count("\n") == 1


def test_no_code_runs_that_a_nodes_file_does_not_name(tmp_path: Path):
    for kind in ("algorithm", "model", "task", "optimizer"):
        line = why(own(tmp_path), asked(settings={**SENT, kind: "os:getcwd"}))
        assert line.startswith(f"its {kind} is os:getcwd, which is not built in")
    settings = {**SENT, "groups": [{"model": "os:getcwd"}]}
    assert "failed with UsageError" in why(own(tmp_path), asked(settings=settings))


class Recorded(Nodes):
    """Two nodes as `own` is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 0)
        for i in range(2):
            (folder / str(i)).mkdir()
            self.nodes.append(own(folder / str(i), client=i, least_rows=15))


def forms(number: float) -> list[bytes]:
    """A number as text and as any of the dtypes of a message."""
    found = [repr(number).encode(), str(int(number)).encode()]
    return found + [np.array(number, t).tobytes() for t in ("<f4", "<f8", "<i4", "<i8")]


@pytest.mark.slow("a run of two nodes")
def test_nothing_that_is_planted_is_among_the_bytes_that_leave_in_a_run(tmp_path: Path):
    """Enrolments, uploads, scores and refusals, and of the examples neither cells nor paths."""
    nodes = Recorded(tmp_path)
    config = {**CONFIG, "clients": 2, "clients_per_round": 2, "rounds": 2}
    done = run.run(config, tmp_path / "run", nodes, log=nodes.said.append)
    assert [row["train_examples"] for row in done.clients] == [30, 30]
    nodes.answers.append(nodes.answer(0, asked("train", run=OTHER)))
    nodes.answers.append(nodes.answer(0, asked(settings={**SENT, "dataset": f"csv:{tmp_path}"})))
    assert len(nodes.answers) == 2 + 2 * 2 * 2 + 2
    kinds = [wire.decode(content, len(content), schema.RESPONSE).facts["kind"]
             for content in nodes.answers]  # fmt: skip
    assert set(kinds) == {"enrol", "train", "evaluate", "refused"}
    everything = b"\0".join(nodes.answers)
    words = [SECRET, "Person", "own.csv", str(tmp_path), *COLUMNS]
    for planted in [word.encode() for word in words] + forms(ID):
        assert planted not in everything
    # The search does find what a node holds: its own files have all of it.
    held = (tmp_path / "0" / "own.csv").read_bytes()
    assert all(word.encode() in held for word in (SECRET, "Person", *COLUMNS, str(ID)))
    for ctx in (tmp_path / "0" / "node").glob("run-*/client-0/visit-*"):
        assert b"upload/" in ctx.read_bytes()
