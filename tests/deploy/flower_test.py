"""Exchange over Flower: identity of nodes, messages, processes of a trial, and a whole run."""

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from fedjax_pfl.deploy import guard, schema, wire
from tests.commands import message

pytest.importorskip(
    "flwr", reason="Flower is not installed; pip install -e '.[dev]' brings it, as CI does"
)

from flwr.common.constant import ErrorCode

from fedjax_pfl.deploy import flower, keys, trial
from fedjax_pfl.deploy.flower import FlowerExchange

pytestmark = pytest.mark.slow("processes of Flower")

NODES = ("client-0", "client-1")


class Grid:
    """Fake of Flower's Grid with nodes (id, name, key, status) and prepared replies."""

    def __init__(self, *nodes):
        self.all, self.pushed = nodes, []
        self.replies = []  # one list for each call of `pull_messages`
        self.since = "noon"

    def get_nodes(self):
        names = ("node_id", "name", "public_key", "status")
        since = {"status": "online", "last_activated_at": self.since}
        return [
            SimpleNamespace(**since | dict(zip(names, node, strict=False))) for node in self.all
        ]

    def push_messages(self, messages):
        self.pushed += messages
        return [f"m{len(self.pushed)}"]

    def pull_messages(self, ids):
        return self.replies.pop(0) if self.replies else []


def refusal_reason(response):
    """Returns the reason of a refusal, which must not contain Flower's error text."""
    assert b"patients" not in response
    return str(wire.decode(response, 10_000, schema.RESPONSE).facts["why"])


def node_ids(exchange):
    """Returns the id of each client's node."""
    return {i: online.node for i, online in exchange.nodes().items()}


def make_exchange(grid, folder):
    log_lines = []
    return FlowerExchange(grid, folder / "run", 2, log_lines.append), log_lines


def connect(folder, *nodes):
    """Returns the nodes that an exchange accepts in two calls, and its log lines."""
    exchange, log_lines = make_exchange(Grid(*nodes), folder)
    accepted = node_ids(exchange)
    assert node_ids(exchange) == accepted
    return accepted, log_lines


def test_a_node_is_identified_by_its_key(tmp_path):
    first, second = (7, NODES[0], b"a"), (8, NODES[1], b"b")
    assert connect(tmp_path, first, second) == ({0: 7, 1: 8}, [])
    assert connect(tmp_path, (17, *first[1:]), (*second, "offline")) == ({0: 17}, [])
    accepted, (line,) = connect(tmp_path, (7, NODES[0], b"c"), second)
    assert accepted == {1: 8}
    assert line.startswith("client-0 has another key than before, or another client's: refused")
    assert line.endswith("remove client 0 from " + str(tmp_path / "run.keys.json"))


def test_a_second_key_or_name_is_refused(tmp_path):
    first, second = (7, NODES[0], b"a"), (9, NODES[0], b"z")
    for nodes in ((first, second), (second, first)):  # the first key stays
        accepted, log_lines = connect(tmp_path, *nodes)
        assert accepted == {0: 7}
        assert len(log_lines) == 1
    assert connect(tmp_path, second)[0] == {}  # it cannot replace the first one later either
    accepted, log_lines = connect(tmp_path, first, (8, NODES[1], b"a"))
    assert accepted == {0: 7}
    assert len(log_lines) == 1


@pytest.mark.parametrize(
    "name", ["client-00", "client-01", "client-²", "client-9", "client-", "client-0\n", "client--0"]
)
def test_a_node_with_another_name_is_refused(name, tmp_path):
    nodes = ((6, name, b"x"), (7, NODES[0], b"a"), (8, "me", b"d"))
    accepted, log_lines = connect(tmp_path, *nodes)
    assert accepted == {0: 7}
    assert log_lines == [f"{name!a} is not a client's name: use client-0 to client-1; refused"]


def test_an_invalid_file_of_keys_is_a_usage_error(tmp_path):
    (tmp_path / "run.keys.json").write_text('{"00": "a"}')
    assert "run.keys.json cannot be read" in message(connect, tmp_path, (7, NODES[0], b"a"))


def test_node_files_of_a_trial(tmp_path):
    config = {"dataset": "digits", "clients": 2, "partition": "iid", "seed": 3, "data_dir": None}
    data = {name: config[name] for name in ("dataset", "clients", "partition")}
    settings = trial._node_settings(1, {**config, "algorithm": "a:b"}, [])
    assert settings == {**data, "client": 1, "code": ["a:b"]}
    (tmp_path / "mine.json").write_text('{"dataset": "csv:x", "client": 1}')
    node_files = [str(tmp_path / "mine.json")]
    expected = {"dataset": "csv:x", "client": 1, "code": []}
    assert trial._node_settings(1, config, node_files) == expected
    line = message(trial._node_settings, 0, config, node_files)
    assert "has client 1, and is given for client 0" in line
    line = message(trial._node_settings, 0, {**config, "dataset": "csv:x"}, [])
    assert "one file for each node" in line
    damaged = tmp_path / "damaged.json"
    assert "No such file" in message(trial._node_settings, 0, config, [str(damaged)])
    damaged.write_text("{")
    line = message(trial._node_settings, 0, config, [str(damaged)])
    assert line.startswith(f"{damaged} cannot be read as JSON")


def reply(to, source, error=0):
    """Returns a reply as Flower builds it; the text of an error may be anything."""
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=to, src_node_id=source),
        error=SimpleNamespace(code=error, reason="/home/amsterdam/patients.csv"),
        has_error=lambda: error > 0,
        content=flower.to_record(b"an answer"),
    )


@pytest.fixture
def grid(monkeypatch):
    """Returns a grid of two nodes, without Flower's messages, which need a SuperLink."""

    def new_message(content, *_, ttl):
        return SimpleNamespace(content=content, ttl=ttl)

    monkeypatch.setattr(flower, "Message", new_message)
    monkeypatch.setattr(flower, "_POLL_SECONDS", 0.0)
    return Grid((7, NODES[0], b"a"), (8, NODES[1], b"b"))


def test_a_reply_from_another_node_becomes_a_refusal(grid, tmp_path):
    exchange, _ = make_exchange(grid, tmp_path)
    grid.replies = [[reply("m1", 8), reply("m9", 7), reply("m2", 8)]]
    responses = dict(exchange.ask({0: b"x", 1: b"y"}, 30))
    assert [flower.from_record(m.content) for m in grid.pushed] == [b"x", b"y"]
    assert "another node" in refusal_reason(responses[0])
    assert responses[1] == b"an answer"
    assert dict(exchange.ask({0: b"x"}, 0.3)) == {}


def test_a_node_that_returns_gets_its_request_again(grid, tmp_path):
    exchange, _ = make_exchange(grid, tmp_path)
    grid.replies = [[reply("m1", 0, ErrorCode.NODE_UNAVAILABLE), reply("m2", 8)], [], []]
    responses = exchange.ask({0: b"x", 1: b"y"}, 30)
    assert next(responses) == (1, b"an answer")
    assert [flower.from_record(m.content) for m in grid.pushed] == [b"x", b"y"]
    grid.since = "one o'clock"
    grid.replies = [[], [reply("m3", 7)]]
    assert next(responses) == (0, b"an answer")
    assert [flower.from_record(m.content) for m in grid.pushed] == [b"x", b"y", b"x"]
    assert list(responses) == []


def test_a_request_that_flower_did_not_take_is_sent_again(grid, tmp_path, monkeypatch):
    exchange, _ = make_exchange(grid, tmp_path)
    push, failures = grid.push_messages, [[""], []]
    monkeypatch.setattr(grid, "push_messages", lambda m: failures.pop() if failures else push(m))
    grid.replies = [[], [], [reply("m1", 7)]]
    assert list(exchange.ask({0: b"x"}, 30)) == [(0, b"an answer")]


def test_a_node_that_stays_offline_or_always_fails_is_absent(grid, tmp_path, monkeypatch):
    exchange, _ = make_exchange(grid, tmp_path)
    failed = ErrorCode.CLIENT_APP_CRASHED
    grid.replies = [[reply("m1", 7, failed)], [reply("m2", 7, failed)], [reply("m3", 7, failed)]]
    ((_, response),) = exchange.ask({0: b"x"}, 30)
    assert refusal_reason(response) == f"Flower reports error {failed} of its node"
    assert len(grid.pushed) == 3
    monkeypatch.setattr(flower, "_RETURN_SECONDS", 0.5)
    grid.replies = [[reply("m4", 0, ErrorCode.NODE_UNAVAILABLE)]]
    ((_, response),) = exchange.ask({0: b"x"}, 30)
    assert "went offline for more than" in refusal_reason(response)
    assert len(grid.pushed) == 4


def handshake(authority, certificate, key):
    """Connects with the strict certificate checks of Python 3.13."""
    client_context = ssl.create_default_context(cafile=str(authority))
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(certificate, key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for endpoint in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            endpoint.do_handshake()
    names = client.getpeercert()["subjectAltName"]
    assert names == (("IP Address", "127.0.0.1"), ("DNS", "localhost"))


def test_certificates_and_keys_are_created_once_and_private(tmp_path):
    paths = keys.ensure_certificates(tmp_path)
    public = keys.ensure_node_key(tmp_path / "client-0.key")
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert keys.ensure_certificates(tmp_path) == paths
    assert keys.ensure_node_key(tmp_path / "client-0.key") == public
    assert files == {path: path.read_bytes() for path in tmp_path.iterdir()}
    handshake(*paths)
    for name in ("server.key", "client-0.key"):
        assert os.stat(tmp_path / name).st_mode & 0o77 == 0


def test_damaged_keys_are_named_and_damaged_certificates_replaced(tmp_path, monkeypatch):
    """A trial was killed while it wrote them, or they have expired."""
    private = tmp_path / "client-0.key"
    content = keys.ensure_node_key(private).read_bytes()
    keys.ensure_node_key(private).unlink()
    assert keys.ensure_node_key(private).read_bytes() == content
    private.write_bytes(b"")
    assert "client-0.key is damaged" in message(keys.ensure_node_key, private)
    for path in keys.ensure_certificates(tmp_path):
        path.write_bytes(b"")
        paths = keys.ensure_certificates(tmp_path)
        files = [path.read_bytes() for path in paths]
        assert all(files)
        keys.ensure_certificates(tmp_path)
        assert files == [path.read_bytes() for path in paths]
    monkeypatch.setattr(keys, "_DAYS", 0)
    (tmp_path / "ca.crt").unlink()
    old = keys.ensure_certificates(tmp_path)[0].read_bytes()
    assert keys.ensure_certificates(tmp_path)[0].read_bytes() != old


def wait_for_processes(home):
    """Waits for the processes of a home: a process that starts has no environment for a moment."""
    until = time.monotonic() + 30
    while not (pids := guard.running_processes(home)) and time.monotonic() < until:
        time.sleep(0.01)
    return pids


def test_the_guard_ends_processes_that_are_just_starting(monkeypatch):
    waited, killed = [], []
    monkeypatch.setattr(guard, "_TERM_SECONDS", 0.0)
    monkeypatch.setattr(
        guard, "running_processes", lambda home: [7] if waited and not killed else []
    )
    monkeypatch.setattr(guard.os, "kill", lambda *arguments: killed.append(arguments))
    monkeypatch.setattr(guard.time, "sleep", waited.append)
    guard.end_processes("home")
    assert killed == [(7, signal.SIGKILL)]


def test_processes_of_a_killed_trial_end(tmp_path):
    """A process ends and is restarted, then the trial is killed."""
    program = (
        "import sys, time; from pathlib import Path; from fedjax_pfl.deploy import trial\n"
        "trial._RESTART_SECONDS = 0.0; folder = Path(sys.argv[1])\n"
        "with trial._locked(folder) as lock, trial._Processes(folder, folder, lock) as started:\n"
        "  started.start('one', sys.executable, '-c', 'import time; time.sleep(60)')\n"
        "  print(started.running['one'].pid, flush=True)\n"
        "  sys.stdin.readline(); started.running['one'].kill(); started.running['one'].wait()\n"
        "  print(*started.restart_ended(), flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        first = int(process.stdout.readline())
        assert wait_for_processes(tmp_path) == [first]
        assert guard.running_processes(tmp_path, "flwr-serverapp") == []
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "one\n"
        (again,) = wait_for_processes(tmp_path)
        assert again != first
        process.kill()
    with trial._locked(tmp_path):  # waits until the guard has ended all processes
        assert guard.running_processes(tmp_path) == []


def test_a_process_that_ends_after_each_restart_is_reported_once(tmp_path, monkeypatch):
    """Flower refuses a killed SuperNode for a minute."""
    current_time = [100.0]
    clock = SimpleNamespace(monotonic=lambda: current_time[0], sleep=time.sleep)
    monkeypatch.setattr(trial, "time", clock)
    with trial._locked(tmp_path) as lock, trial._Processes(tmp_path, tmp_path, lock) as started:
        started.start("one", sys.executable, "-c", "pass")
        restarted = []
        for seconds in (1, 15, 16, 40):
            started.running["one"].wait()
            current_time[0] += seconds
            restarted.append(started.restart_ended())
    assert restarted == [[], ["one"], [], ["one"]]


def test_a_second_trial_in_a_folder_is_refused(tmp_path):
    with trial._locked(tmp_path):
        assert "in use by another trial" in message(trial._locked(tmp_path, 0.3).__enter__)
