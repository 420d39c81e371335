"""Hostile servers: nodes refuse requests for other data, settings, clients and runs."""

import errno
import os
import shutil

import numpy as np
import pytest

from fedjax_pfl.deploy import assembly, enrolment, node, node_file, schema, server, wire
from fedjax_pfl.deploy.programs import ServerPrograms
from fedjax_pfl.deploy.server import Server
from tests.deploy.run_test import CONFIG, Nodes, make_node
from tests.deploy.schema_test import DELETE, FEDERATION, members, replace_at

pytestmark = pytest.mark.slow("a node and its programs for each message")

RUN, OTHER_RUN = "1f0a", "2e1b"
SECRET = "Quetzalcoatl"  # in a cell
PLANTED_ID = 760_031_337  # in a column of ids
COLUMNS = ("nickname", "socialno", "ageyears")
ONE_CLIENT = {**CONFIG, "clients": 1, "clients_per_round": 1, "rounds": 1}
SETTINGS = assembly.node_settings(ONE_CLIENT)


def write_table(path, rows=40, word=SECRET):
    """Writes a CSV file with a column of names and one of ids; one row is planted."""
    draw = np.random.default_rng(0)
    lines = [",".join([*COLUMNS, "label"])]
    for i in range(rows):
        name, ssn = (word, PLANTED_ID) if i == 3 else (f"Person{i}", 100_000_000 + i * 7919)
        age = draw.normal(40, 10)
        lines.append(f"{name},{ssn},{age:.3f},{'yes' if age > 40 else 'no'}")
    path.write_text("\n".join(lines))
    return path


def owner_node(tmp_path, rows=40, **more):
    """Returns a node that uses ids and ages, and hashes names.

    Args:
      rows: Rows of the file; None leaves the file unchanged.
    """
    path = tmp_path / "own.csv"
    if rows is not None:
        write_table(path, rows)
    content = {"dataset": f"csv:{path}", "labels": ["no", "yes"], "words": {"nickname": 8}}
    content |= {"test_fraction": 0.25, **more}
    return make_node(tmp_path / "node", **{k: v for k, v in content.items() if v is not None})


def request(kind="enrol", /, **facts):
    """Encodes a request, of the first round unless it is an enrolment."""
    common = {"kind": kind, "run": RUN, "client": 0, "settings": SETTINGS}
    if kind != "enrol":
        common |= {"federation": FEDERATION, "round": 0, "settled": -1}
    return wire.encode({**common, **facts}, envelope={"start": 0})


def refusal(worker, content):
    """Returns the reason of a refusal."""
    message = wire.decode(node.respond(worker, content), 10_000, schema.RESPONSE)
    assert message.facts["kind"] == "refused"
    assert "\n" not in message.facts["why"]
    assert SECRET not in message.facts["why"]
    return str(message.facts["why"])


def describe(worker, **facts):
    """Enrols a node; returns its description."""
    content = request(**facts)
    return enrolment.read_description(content, node.respond(worker, content))


DATA_SETTINGS = {
    "dataset": "csv:/other/secret.csv",
    "csv": {"test": "/other/secret.csv"},
    "data_dir": "/other",
    "test_fraction": 0.949,
    "classes": {"per_client": 1},
    "permute_labels": True,
}


def test_a_request_with_data_settings_is_refused(tmp_path):
    worker = owner_node(tmp_path)
    for name, value in DATA_SETTINGS.items():
        for kind in ("enrol", "train"):
            line = refusal(worker, request(kind, settings={**SETTINGS, name: value}))
            assert line == f"it sets {name}; only the node's own file decides about its data"
    assert list((tmp_path / "node").iterdir()) == []


def test_requests_of_the_server_have_no_data_settings():
    assert not set(SETTINGS) & node_file.DATA_SETTINGS
    assert {"algorithm", "learning_rate", "clients", "seed"} <= set(SETTINGS)
    rows = {"dataset", "data_dir", "fraction", "partition", "partition_seed", "split"}
    rows |= {"test_fraction", "validation_fraction", "validation_examples", "permute_labels"}
    assert rows | {"csv", "parquet", "images", "iid", "classes"} <= node_file.DATA_SETTINGS
    # Settings that may change when a run resumes are not sent.
    local_settings = {"conv": "xla", "log_to": "tensorboard", "devices": 3}
    assert assembly.node_settings({**ONE_CLIENT, **local_settings}) == SETTINGS


def test_a_run_keeps_the_settings_of_its_enrolment(tmp_path):
    worker = owner_node(tmp_path)
    assert "has not enrolled" in refusal(worker, request("train"))
    first = describe(worker)
    for kind in ("enrol", "train"):  # fedavg would upload parameters that fedper keeps private
        line = refusal(worker, request(kind, settings={**SETTINGS, "algorithm": "fedavg"}))
        assert line == "its settings are not those that this node enrolled with"
    assert "has not enrolled" in refusal(worker, request("train", run=OTHER_RUN))
    assert not (tmp_path / "node" / f"run-{OTHER_RUN}").exists()
    # Settings of training do not change the description.
    changed = {**SETTINGS, "seed": 7, "held_out": 0, "clients": 3, "batch_size": 1}
    assert describe(worker, settings=changed, run=OTHER_RUN) == first


def test_a_node_file_with_a_partition_for_another_federation_is_refused(tmp_path):
    """Normalisation and parts of clients would be those of other clients."""
    worker = make_node(tmp_path, dataset="wine", partition="iid", clients=2, client=0)
    for changes in ({"clients": 3}, {"clients": 2, "held_out": 1}):
        line = refusal(worker, request(settings={**SETTINGS, **changes}))
        assert line.startswith(f"its {list(changes)[-1]} is not that of this node's file")
    assert describe(worker, settings={**SETTINGS, "clients": 2})["outputs"] == 3


def test_a_model_that_is_too_large_is_refused(federation, tmp_path, monkeypatch):
    monkeypatch.setattr(node, "MAX_BYTES", 100_000)
    settings = {**SETTINGS, "mlp": {"hidden": [100_000]}}
    worker = owner_node(tmp_path)
    describe(worker, settings=settings, run=OTHER_RUN)
    facts = {"federation": federation, "settings": settings, "run": OTHER_RUN}
    line = refusal(worker, request("train", **facts))
    assert line == "its model needs more than 100,000 bytes in a round"


def test_no_cell_and_no_path_is_in_an_enrolment(tmp_path):
    content = node.respond(owner_node(tmp_path), request())
    assert not any(planted in content for planted in planted_values("own.csv", str(tmp_path)))
    assert b'"classes":["no","yes"]' in content


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"labels": None}, "labels"),
        ({"words": None}, "words"),
        ({"words": {"nickname": ["x"]}}, "Person0"),
    ],
)
def test_unlisted_words_only_appear_in_the_nodes_log(changes, word, tmp_path, capsys):
    line = refusal(owner_node(tmp_path, **changes), request())
    assert line == "it failed with UsageError; its own log says more"
    logged = capsys.readouterr().err
    assert logged.count("\n") == 1
    assert word in logged


def test_sums_need_a_minimum_of_rows(tmp_path):
    """The split of 26 rows leaves 20 or 19 rows for training."""
    assert describe(owner_node(tmp_path, 26))["sums"]["n"] == 20
    too_few = owner_node(tmp_path, 26, test_fraction=0.26)
    assert "fewer training examples" in refusal(too_few, request())
    lower_limit = owner_node(tmp_path, 26, least_rows=10, test_fraction=0.3)
    assert describe(lower_limit, run="aaaa")["sums"]["n"] == 18
    without = owner_node(tmp_path, 26, csv={"normalise": "none"}, test_fraction=0.3)
    assert "sums" not in describe(without, run=OTHER_RUN)


def test_a_run_gets_the_sums_of_one_version_of_the_examples(tmp_path):
    """Sums of changed examples would reveal the difference."""
    first = describe(owner_node(tmp_path))
    assert describe(owner_node(tmp_path)) == first
    text = (tmp_path / "own.csv").read_text()
    (tmp_path / "own.csv").write_text(text.replace(SECRET, "Person3"))
    changed = owner_node(tmp_path, None)
    assert changed.file.words == {"nickname": 8}
    assert "not those that it enrolled with" in refusal(changed, request())
    later = owner_node(tmp_path, 41)
    assert "not those that it enrolled with" in refusal(later, request())
    assert describe(later, run=OTHER_RUN)["sums"] != first["sums"]


def test_a_node_is_only_one_client(tmp_path):
    """Its file or its first request decides, also after a restart."""
    with_id = owner_node(tmp_path, client=1)
    assert refusal(with_id, request(client=0)) == "it is for client 0, and this node is client 1"
    assert describe(with_id, client=1)
    # The owner cannot give it another id in the same run.
    line = refusal(owner_node(tmp_path, client=0), request(client=0))
    assert line == "it is client 1 of this run"
    (tmp_path / "b").mkdir()
    first = owner_node(tmp_path / "b")
    assert describe(first, client=2)
    for run_name in (RUN, OTHER_RUN):
        for kind in ("enrol", "train"):
            content = request(kind, client=0, run=run_name)
            line = refusal(owner_node(tmp_path / "b"), content)
            assert line == "it is for client 0, and this node is client 2"
    assert not list((tmp_path / "b").glob("**/client-0*"))


def test_the_number_of_runs_of_a_node_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "MAX_RUNS", 2)
    worker = owner_node(tmp_path)
    for run_name in ("aaaa", "bbbb", "aaaa"):
        describe(worker, run=run_name)
    assert "has been in 2 runs" in refusal(worker, request(run="cccc"))


@pytest.fixture
def federation(tmp_path):
    """Returns the federation's description with one node."""
    settings, _ = assembly.complete(ONE_CLIENT)
    return enrolment.build_federation({0: describe(owner_node(tmp_path))}, settings)


def test_a_federation_of_other_examples_is_refused(federation, tmp_path):
    worker = owner_node(tmp_path)
    wrong = {
        "counts": [[{"train": 1, "validation": 0, "test": 10}]],
        "alike.outputs": [3],
        "alike.classes": [["yes", "no"]],
        "alike.input_shape": [[4]],
        "mean": [[0.0], DELETE],
    }
    for path, value in members(wrong):
        line = refusal(worker, request("train", federation=replace_at(federation, path, value)))
        assert "does not have this node's examples" in line or "other columns" in line, path
    # A payload of another shape.
    assert "is missing" in refusal(worker, request("train", federation=federation))


@pytest.fixture
def trained_node(federation, tmp_path):
    """Returns a node that has trained for one round, and its server."""
    worker = owner_node(tmp_path, None)
    settings, registry = assembly.complete(ONE_CLIENT)
    built, method = assembly.build_method(settings, registry, federation)
    programs = ServerPrograms(method, built.data, 1)
    run_server = Server(RUN, 0, programs, {"settings": SETTINGS, "federation": federation})
    pending = server.open_round(run_server, server.initial_state(run_server), 0)
    content = node.respond(worker, pending.requests[0])
    assert wire.decode(content, len(content), schema.RESPONSE).facts["kind"] == "train"
    return worker, run_server


def test_a_changed_federation_is_refused(trained_node):
    """A server cannot change the normalisation with each request."""
    worker, run_server = trained_node
    state = server.initial_state(run_server)
    changes = {"deviation": [1e-30, 1e30], "mean": [40.0, 0.0], "held_out": 1, "groups": 2}
    for name, value in changes.items():
        facts = replace_at(run_server.request_facts, f"federation.{name}", value)
        changed_server = run_server._replace(request_facts=facts)
        pending = server.open_evaluation(changed_server, state, 1, [0])
        for restart in (lambda: None, node._client_cache.clear):
            restart()
            line = refusal(worker, pending.requests[0])
            assert line == "the federation that it describes is not that of this run"
        pending = server.open_evaluation(run_server, state, 1, [0])
        content = node.respond(worker, pending.requests[0])
        assert wire.decode(content, len(content), schema.RESPONSE).facts["kind"] == "evaluate"


def test_removing_the_folder_of_a_run_leaves_it(trained_node):
    """The worker need not be restarted."""
    worker, run_server = trained_node
    shutil.rmtree(worker.folder / f"run-{RUN}")
    pending = server.open_round(run_server, server.initial_state(run_server), 0)
    assert refusal(worker, pending.requests[0]) == "this node has not enrolled in this run"
    assert not (worker.folder / f"run-{RUN}").exists()


def test_a_full_disk_at_enrolment_is_a_refusal(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    worker = owner_node(tmp_path)
    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        line = refusal(worker, request())
    assert line.startswith("its disk cannot be written or read (No space left on device)")
    assert describe(worker)


def test_rounds_and_names_out_of_bounds_are_refused(tmp_path):
    worker = owner_node(tmp_path)
    describe(worker)
    wrong = {"round": 10**9, "settled": -2, "run": "../x", "client": 10**9, "settings": {"a/b": 1}}
    for name, value in wrong.items():
        line = refusal(worker, request("train", **{name: value}))
        assert line.startswith(("message.", "name 0 in message."))
        assert name in line
    assert refusal(worker, request("shutdown")).startswith("message.kind must be enrol or train or")
    assert refusal(worker, b"\x80\x04cos\nsystem\n") == "it does not begin as a message does"


def test_text_from_a_server_is_escaped_in_the_nodes_log(tmp_path, capsys):
    worker = owner_node(tmp_path)
    settings = {**SETTINGS, "algorithm": "fedavg\x1b[2J\nall is well"}
    assert "it failed with UsageError" in refusal(worker, request(settings=settings))
    logged = capsys.readouterr().err
    assert "\\x1b[2J\\nall is well" in logged
    assert logged.count("\n") == 1


def test_code_that_the_nodes_file_does_not_list_is_refused(tmp_path):
    for kind in ("algorithm", "model", "task", "optimizer"):
        line = refusal(owner_node(tmp_path), request(settings={**SETTINGS, kind: "os:getcwd"}))
        assert line.startswith(f"its {kind} is os:getcwd, which is not built in")
    settings = {**SETTINGS, "groups": [{"model": "os:getcwd"}]}
    assert "failed with UsageError" in refusal(owner_node(tmp_path), request(settings=settings))


class OwnerNodes(Nodes):
    """Two nodes of `owner_node`."""

    def __init__(self, folder):
        super().__init__(folder, 0)
        for i in range(2):
            (folder / str(i)).mkdir()
            self.nodes.append(owner_node(folder / str(i), client=i, least_rows=15))


def planted_values(*more_texts):
    """Returns texts and table cells as bytes; the id also in the number formats of messages."""
    texts = [SECRET, "Person", *COLUMNS, str(PLANTED_ID), *more_texts]
    numbers = [np.array(PLANTED_ID, t).tobytes() for t in ("<f4", "<f8", "<i4", "<i8")]
    return [text.encode() for text in texts] + numbers


@pytest.mark.slow("a run of two nodes")
def test_planted_values_never_leave_a_node(tmp_path):
    """All messages of a run, including refusals, are searched for cells and paths."""
    nodes = OwnerNodes(tmp_path)
    config = {**CONFIG, "clients": 2, "clients_per_round": 2, "rounds": 2}
    result = nodes.run(config, tmp_path / "run")
    assert [row["train_examples"] for row in result.clients] == [30, 30]
    nodes.responses.append(nodes.respond(0, request("train", run=OTHER_RUN)))
    nodes.responses.append(
        nodes.respond(0, request(settings={**SETTINGS, "dataset": f"csv:{tmp_path}"}))
    )
    assert len(nodes.responses) == 2 + 2 * 2 * 2 + 2
    kinds = [wire.decode(content, len(content), schema.RESPONSE).facts["kind"]
             for content in nodes.responses]  # fmt: skip
    assert set(kinds) == {"enrol", "train", "evaluate", "refused"}
    everything = b"\0".join(nodes.responses)
    for planted in planted_values("own.csv", str(tmp_path)):
        assert planted not in everything
    # The search would find the values: the node's own files hold all of them.
    file_content = (tmp_path / "0" / "own.csv").read_bytes()
    assert all(
        word.encode() in file_content for word in (SECRET, "Person", *COLUMNS, str(PLANTED_ID))
    )
    for ctx in (tmp_path / "0" / "node").glob("run-*/client-0/visit-*"):
        assert b"upload/" in ctx.read_bytes()
