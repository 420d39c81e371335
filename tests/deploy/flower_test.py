"""Flower: who is who, what its messages are read as, and a run over the real thing."""

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import guard, run, schema, storage, wire
from fedjax_pfl.runs import runner
from tests.deploy.run_test import CONFIG, close
from tests.runs.common import read_metrics

pytest.importorskip(
    "flwr", reason="Flower is not installed; pip install -e '.[dev]' brings it, as CI does"
)

from flwr.common.constant import ErrorCode

from fedjax_pfl.deploy import flower, keys, trial
from fedjax_pfl.deploy.flower import FlowerExchange

NODES = ("client-0", "client-1")


class Grid:
    """A SuperLink's side: nodes as registered, and answers that were put there."""

    def __init__(self, *nodes: tuple[int, str, bytes, str]) -> None:
        self.all, self.pushed = nodes, list[Any]()
        self.replies = list[list[Any]]()  # of each time that they are asked for
        self.since = "noon"

    def get_nodes(self) -> list[Any]:
        words = ("node_id", "name", "public_key", "status")
        since = {"last_activated_at": self.since}
        return [SimpleNamespace(**dict(zip(words, one, strict=True)), **since) for one in self.all]

    def push_messages(self, messages: list[Any]) -> list[str]:
        self.pushed += messages
        return [f"m{len(self.pushed)}"]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        return self.replies.pop(0) if self.replies else []


def refused(answer: bytes) -> str:
    """Why it was; no text of an error of Flower's is in it."""
    assert b"patients" not in answer
    return str(wire.decode(answer, 10_000, schema.RESPONSE).facts["why"])


def there(one: Any) -> dict[int, int]:
    """The nodes by client."""
    return {i: online.node for i, online in one.nodes().items()}


def by(grid: Grid, folder: Path) -> tuple[Any, list[str]]:
    said: list[str] = []
    return FlowerExchange(grid, folder / "run", 2, said.append), said  # type: ignore[arg-type]


def test_a_node_is_the_client_that_it_was_by_its_key(tmp_path: Path):
    one, said = by(Grid((7, NODES[0], b"a", "online"), (8, NODES[1], b"b", "online")), tmp_path)
    assert there(one) == {0: 7, 1: 8}
    again, _ = by(Grid((17, NODES[0], b"a", "online"), (18, NODES[1], b"b", "offline")), tmp_path)
    assert there(again) == {0: 17}
    other, said = by(Grid((7, NODES[0], b"c", "online"), (8, NODES[1], b"b", "online")), tmp_path)
    assert there(other) == {1: 8}
    assert there(other) == {1: 8}
    assert len(said) == 1
    assert "client-0 has another key" in said[0]


@pytest.mark.parametrize(
    "name", ["client-00", "client-01", "client-²", "client-9", "client-", "client-0\n", "client--0"]
)
def test_a_name_that_is_no_clients_is_refused_and_displaces_nobody(name: str, tmp_path: Path):
    grid = Grid((6, name, b"x", "online"), (7, NODES[0], b"a", "online"), (8, "me", b"d", "online"))
    one, said = by(grid, tmp_path)
    for _ in range(2):
        assert there(one) == {0: 7}
    assert said == [f"{name!a} is not a client's name: use client-0 to client-1; refused"]


def test_keys_that_were_changed_are_one_line(tmp_path: Path):
    (tmp_path / "run.keys.json").write_text('{"00": "a"}')
    with pytest.raises(UsageError, match=r"run\.keys\.json cannot be read"):
        there(by(Grid((7, NODES[0], b"a", "online")), tmp_path)[0])


INJECTED = "sorry\nThe run has ended: /srv\nerror: gone\x1b[2J"


def run_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: Any) -> Any:
    """Runs as the server's app does, with a result in place of a run; its log and its outcome."""
    log = tmp_path / "run.log"
    flower.outcome_path(log).write_text('{"directory": "of an earlier run"}')

    def instead(config: Any, directory: Path, exchange: Any, waiting: Any, tell: Any) -> Any:
        assert not flower.outcome_path(log).exists()
        tell(f"client 1: {INJECTED}")
        if isinstance(result, Exception):
            raise result
        return SimpleNamespace(directory=result)

    monkeypatch.setattr(flower.run, "run", instead)
    monkeypatch.setattr(flower.FlowerExchange, "wait", lambda *_: 2)
    asked = {"config": {"clients": 2}, "workdir": str(tmp_path / "run"), "log": str(log)}
    (tmp_path / "s.json").write_text(json.dumps({**asked, "waiting": {"seconds": 1, "least": 1}}))
    with contextlib.nullcontext() if isinstance(result, Path) else pytest.raises(type(result)):
        flower.run_from_file(Grid(), str(tmp_path / "s.json"))  # type: ignore[arg-type]
    return log.read_text(), storage.read_json(flower.outcome_path(log), schema.OUTCOME)


def test_a_run_says_how_it_has_ended_in_a_file_that_no_node_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log, outcome = run_by(tmp_path, monkeypatch, tmp_path / "run")
    assert outcome == {"directory": str(tmp_path / "run")}
    assert log.splitlines()[2] == "client 1: sorry\\nThe run has ended: /srv\\nerror: gone\\x1b[2J"
    _, outcome = run_by(tmp_path, monkeypatch, UsageError(f"no {INJECTED}"))
    assert outcome == {"error": "no sorry\\nThe run has ended: /srv\\nerror: gone\\x1b[2J"}
    assert run_by(tmp_path, monkeypatch, RuntimeError("away"))[1] == {}


def test_a_trial_ends_by_the_outcome_and_by_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Lines that look like an end are told like others."""
    log, told, looks = tmp_path / "run.log", list[str](), [0]
    lines = ["The run has ended: /srv", "error: gone", "client 1: The run has ended:"]
    log.write_text("".join(f"{line}\n" for line in lines))
    outcome = trial.outcome_path(log)

    def wait(_: float) -> None:
        looks[0] += 1
        if looks[0] == 3:
            outcome.write_text(json.dumps(ending))

    monkeypatch.setattr(trial.guard, "running_processes", lambda *_: [1])
    monkeypatch.setattr(trial.time, "sleep", wait)
    started: Any = SimpleNamespace(home=tmp_path, folder=tmp_path, restart_ended=list)
    ending = {"directory": "/srv"}
    trial._follow(log, tmp_path / "wire", started, lambda: None, told.append)
    assert (told, looks) == (lines, [3])
    looks, ending = [0], {"error": "too few"}
    outcome.unlink()
    with pytest.raises(UsageError, match="too few"):
        trial._follow(log, tmp_path / "wire", started, lambda: None, told.append)


def test_a_trials_nodes_have_files_that_say_who_they_are(tmp_path: Path):
    config = {"dataset": "digits", "clients": 2, "partition": "iid", "seed": 3, "data_dir": None}
    assert trial._node_settings(1, {**config, "algorithm": "a:b"}, []) == {
        "dataset": "digits",
        "clients": 2,
        "partition": "iid",
        "client": 1,
        "code": ["a:b"],
    }
    (tmp_path / "mine.json").write_text('{"dataset": "csv:x", "client": 1}')
    own = [str(tmp_path / "mine.json")]
    assert trial._node_settings(1, config, own) == {"dataset": "csv:x", "client": 1, "code": []}
    with pytest.raises(UsageError, match="has client 1, and is given for client 0"):
        trial._node_settings(0, config, own)
    with pytest.raises(UsageError, match="one file for each node"):
        trial._node_settings(0, {**config, "dataset": "csv:x"}, [])


def test_two_names_with_one_key_are_one_client(tmp_path: Path):
    one, said = by(Grid((7, NODES[0], b"a", "online"), (8, NODES[1], b"a", "online")), tmp_path)
    assert there(one) == {0: 7}
    assert len(said) == 1


def reply(to: str, source: int, error: int = 0) -> Any:
    """As Flower gives it; the text of an error may be anything."""
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=to, src_node_id=source),
        error=SimpleNamespace(code=error, reason="/home/amsterdam/patients.csv"),
        has_error=lambda: error > 0,
        content=flower.to_record(b"an answer"),
    )


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Grid:
    """Of two nodes; Flower's own messages need a run of its own."""

    def message(content: Any, *_: Any, ttl: float) -> Any:
        return SimpleNamespace(content=content, ttl=ttl)

    monkeypatch.setattr(flower, "Message", message)
    monkeypatch.setattr(flower, "_POLL_SECONDS", 0.0)
    return Grid((7, NODES[0], b"a", "online"), (8, NODES[1], b"b", "online"))


def test_what_is_not_an_answer_of_the_node_that_was_asked_is_a_refusal(grid: Grid, tmp_path: Path):
    one, _ = by(grid, tmp_path)
    grid.replies = [[reply("m1", 8), reply("m9", 7), reply("m2", 8)]]
    answers = dict(one.ask({0: b"x", 1: b"y"}, 30))
    assert [flower.from_record(m.content) for m in grid.pushed] == [b"x", b"y"]
    assert "another node" in refused(answers[0])
    assert answers[1] == b"an answer"
    assert dict(one.ask({0: b"x"}, 0.3)) == {}


def test_a_node_that_comes_back_is_sent_its_request_again(grid: Grid, tmp_path: Path):
    one, _ = by(grid, tmp_path)
    grid.replies = [[reply("m1", 0, ErrorCode.NODE_UNAVAILABLE), reply("m2", 8)], [], []]
    asked = one.ask({0: b"x", 1: b"y"}, 30)
    assert next(asked) == (1, b"an answer")
    assert [flower.from_record(m.content) for m in grid.pushed] == [b"x", b"y"]
    grid.since = "one o'clock"
    grid.replies = [[], [reply("m3", 7)]]
    assert next(asked) == (0, b"an answer")
    assert [flower.from_record(m.content) for m in grid.pushed] == [b"x", b"y", b"x"]
    assert list(asked) == []


def test_a_node_that_stays_away_or_always_fails_is_given_up(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one, _ = by(grid, tmp_path)
    failed = ErrorCode.CLIENT_APP_CRASHED
    grid.replies = [[reply("m1", 7, failed)], [reply("m2", 7, failed)], [reply("m3", 7, failed)]]
    ((_, said),) = one.ask({0: b"x"}, 30)
    assert refused(said) == f"Flower reports error {failed} of its node"
    assert len(grid.pushed) == 3
    monkeypatch.setattr(flower, "_RETURN_SECONDS", 0.5)
    grid.replies = [[reply("m4", 0, ErrorCode.NODE_UNAVAILABLE)]]
    ((_, said),) = one.ask({0: b"x"}, 30)
    assert "went offline for more than" in refused(said)
    assert len(grid.pushed) == 4


def handshake(authority: Path, certificate: Path, key: Path) -> None:
    """As strictly as Python 3.13 looks at certificates."""
    ours = ssl.create_default_context(cafile=str(authority))
    ours.verify_flags |= ssl.VERIFY_X509_STRICT
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(certificate, key)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ours.wrap_bio(back, there, server_hostname="127.0.0.1")
    server = theirs.wrap_bio(there, back, server_side=True)
    for one in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            one.do_handshake()
    assert client.getpeercert()["subjectAltName"] == (
        ("IP Address", "127.0.0.1"),
        ("DNS", "localhost"),
    )


def test_certificates_and_keys_are_made_once_and_are_the_owners(tmp_path: Path):
    paths = keys.ensure_certificates(tmp_path)
    public = keys.ensure_node_key(tmp_path / "client-0.key")
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert keys.ensure_certificates(tmp_path) == paths
    assert keys.ensure_node_key(tmp_path / "client-0.key") == public
    assert files == {path: path.read_bytes() for path in tmp_path.iterdir()}
    handshake(*paths)
    for name in ("server.key", "client-0.key"):
        assert os.stat(tmp_path / name).st_mode & 0o77 == 0


def soon_left(home: Path) -> list[int]:
    """What has this home; a process that is just being started has no environment for a moment."""
    until = time.monotonic() + 30
    while not (found := guard.running_processes(home)) and time.monotonic() < until:
        time.sleep(0.01)
    return found


def test_the_guard_looks_again_for_what_is_just_being_started(monkeypatch: pytest.MonkeyPatch):
    waited, killed = list[float](), list[tuple[int, int]]()
    monkeypatch.setattr(
        guard, "running_processes", lambda home: [7] if waited and not killed else []
    )
    monkeypatch.setattr(guard.os, "kill", lambda *one: killed.append(one))
    monkeypatch.setattr(guard.time, "sleep", waited.append)
    guard.end_processes("home")
    assert killed == [(7, signal.SIGKILL)]


def test_what_a_trial_has_started_ends_with_it_however_that_ends(tmp_path: Path):
    """One process ends by itself and is started again; the trial is killed; nothing is left."""
    program = (
        "import sys, time; from pathlib import Path; from fedjax_pfl.deploy import trial\n"
        "trial._RESTART_SECONDS = 0.0; folder = Path(sys.argv[1])\n"
        "with trial._locked(folder) as lock, trial._Processes(folder, folder, lock) as started:\n"
        "  started.start('one', sys.executable, '-c', 'import time; time.sleep(60)')\n"
        "  print(started.running['one'].pid, flush=True)\n"
        "  sys.stdin.readline(); started.running['one'].kill(); started.running['one'].wait()\n"
        "  print(*started.restart_ended(), flush=True); time.sleep(60)\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True) as one:
        assert one.stdin is not None
        assert one.stdout is not None
        first = int(one.stdout.readline())
        assert soon_left(tmp_path) == [first]
        assert guard.running_processes(tmp_path, "flwr-serverapp") == []
        one.stdin.write("\n")
        one.stdin.flush()
        assert one.stdout.readline() == "one\n"
        (again,) = soon_left(tmp_path)
        assert again != first
        one.kill()
    with trial._locked(tmp_path):  # waits until the guard has ended what was left
        assert guard.running_processes(tmp_path) == []


def test_a_process_that_ends_is_named_and_not_again_where_it_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Which a SuperNode does that Flower refuses for a minute after it was killed."""
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(trial, "time", clock)
    with trial._locked(tmp_path) as lock, trial._Processes(tmp_path, tmp_path, lock) as started:
        started.start("one", sys.executable, "-c", "pass")
        found = []
        for after in (1, 15, 16, 40):
            started.running["one"].wait()
            now[0] += after
            found.append(started.restart_ended())
    assert found == [[], ["one"], [], ["one"]]


def test_two_trials_in_one_folder(tmp_path: Path):
    with trial._locked(tmp_path):
        other = trial._locked(tmp_path, 0.3)
        with pytest.raises(UsageError, match="in use by another trial"):
            other.__enter__()


@pytest.mark.slow("a SuperLink and three nodes, which are fifteen processes, take minutes")
def test_a_run_over_flower_is_what_the_simulation_is(tmp_path: Path):
    settings = {"rounds": 2, "eval_every": 1, "clients_per_round": 3}
    simulated = runner.run({**CONFIG, **settings}, tmp_path / "simulated")
    config = tmp_path / "config.py"
    config.write_text(
        "from fedjax_pfl.settings import configuration\n"
        f"def get_config():\n    return configuration.complete({ {**CONFIG, **settings}!r})\n"
    )
    words = ["--nodes=3", "--workdir", tmp_path / "real", "--folder", tmp_path / "nodes"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.deploy", f"--config={config}", *map(str, words)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    close(read_metrics(tmp_path / "real"), simulated.metrics)
    lines = [json.loads(x) for x in (tmp_path / "real" / run.WIRE_FILE).read_text().splitlines()]
    assert sum(line["ledger_up"] for line in lines) == simulated.ledger.total_up
    keys = storage.read_json(tmp_path / "real.keys.json", schema.KEYS)
    assert len(set(keys.values())) == 3
    assert len(list((tmp_path / "nodes").glob("node-*/run-*/model.safetensors"))) == 3
    assert len(lines) == 2
    assert guard.running_processes(tmp_path / "nodes" / "flwr") == []
