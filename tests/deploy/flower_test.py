"""Flower: who is who, what its messages are read as, and a run over the real thing."""

import contextlib
import json
import os
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedjax_pfl.deploy import own_state, run
from fedjax_pfl.runs import runner
from tests.deploy.run_test import CONFIG, close
from tests.runs.common import read_metrics

pytest.importorskip(
    "flwr", reason="Flower is not installed; pip install -e '.[dev]' brings it, as CI does"
)

NODES = ("client-0", "client-1")


class Grid:
    """A SuperLink's side: nodes as registered, and answers that were put there."""

    def __init__(self, *nodes: tuple[int, str, bytes, str]) -> None:
        self.all, self.pushed, self.replies = nodes, list[Any](), list[Any]()

    def get_nodes(self) -> list[Any]:
        words = ("node_id", "name", "public_key", "status")
        return [SimpleNamespace(**dict(zip(words, one, strict=True))) for one in self.all]

    def push_messages(self, messages: list[Any]) -> list[str]:
        self.pushed += messages
        return [f"m{len(self.pushed)}"]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        now, self.replies = self.replies, []
        return now


def by(grid: Grid, folder: Path) -> tuple[Any, list[str]]:
    from fedjax_pfl.deploy.flower import ByFlower

    said: list[str] = []
    return ByFlower(grid, folder / "run", 2, said.append), said  # type: ignore[arg-type]


def test_a_node_is_the_client_that_it_was_by_its_key(tmp_path: Path):
    one, said = by(Grid((7, NODES[0], b"a", "online"), (8, NODES[1], b"b", "online")), tmp_path)
    assert one.nodes() == {0: 7, 1: 8}
    again, _ = by(Grid((17, NODES[0], b"a", "online"), (18, NODES[1], b"b", "offline")), tmp_path)
    assert again.nodes() == {0: 17}
    other, said = by(Grid((7, NODES[0], b"c", "online"), (8, NODES[1], b"b", "online")), tmp_path)
    assert other.nodes() == {1: 8}
    assert other.nodes() == {1: 8}
    assert len(said) == 1
    assert "client-0 has another key" in said[0]
    wrong = Grid((7, "client-9", b"c", "online"), (8, "somebody", b"d", "online"))
    assert by(wrong, tmp_path)[0].nodes() == {}


def test_two_names_with_one_key_are_one_client(tmp_path: Path):
    one, said = by(Grid((7, NODES[0], b"a", "online"), (8, NODES[1], b"a", "online")), tmp_path)
    assert one.nodes() == {0: 7}
    assert len(said) == 1


def test_what_is_not_an_answer_of_the_node_that_was_asked_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from fedjax_pfl.deploy import flower, wire

    def message(content: Any, *_: Any, ttl: float) -> Any:  # Flower's own needs a run of its own
        return SimpleNamespace(content=content, ttl=ttl)

    monkeypatch.setattr(flower, "Message", message)
    grid = Grid((7, NODES[0], b"a", "online"), (8, NODES[1], b"b", "online"))
    one, _ = by(grid, tmp_path)

    def reply(to: str, source: int, error: Any = None) -> Any:
        facts = SimpleNamespace(reply_to_message_id=to, src_node_id=source)
        return SimpleNamespace(
            metadata=facts,
            error=error,
            has_error=lambda: error is not None,
            content=flower.packed(b"an answer"),
        )

    secret = SimpleNamespace(code=2, reason="/home/amsterdam/patients.csv")
    grid.replies = [reply("m1", 8), reply("m2", 8, secret), reply("m9", 7)]
    answers = dict(one.ask({0: b"x", 1: b"y"}, 30))
    assert [flower.unpacked(m.content) for m in grid.pushed] == [b"x", b"y"]
    assert "another node" in wire.decode(answers[0], 10_000).facts["refused"]
    assert "patients" not in str(wire.decode(answers[1], 10_000))
    grid.replies = [reply("m3", 7), reply("m4", 8)]
    assert dict(one.ask({0: b"x", 1: b"y"}, 30)) == {0: b"an answer", 1: b"an answer"}
    assert dict(one.ask({0: b"x"}, 0.3)) == {}


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
    from fedjax_pfl.deploy import trial

    paths = trial.certificates(tmp_path)
    public = trial.node_key(tmp_path / "client-0.key")
    there = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert trial.certificates(tmp_path) == paths
    assert trial.node_key(tmp_path / "client-0.key") == public
    assert there == {path: path.read_bytes() for path in tmp_path.iterdir()}
    handshake(*paths)
    for name in ("server.key", "client-0.key"):
        assert os.stat(tmp_path / name).st_mode & 0o77 == 0


def test_what_a_trial_has_started_is_found_by_its_environment(tmp_path: Path):
    from fedjax_pfl.deploy import trial

    with trial._Processes(tmp_path, tmp_path / "flwr") as started:
        started.start("one", sys.executable, "-c", "import time; time.sleep(60)")
        assert trial.left(tmp_path / "flwr") == [started.running["one"].pid]
        started.running["one"].kill()
        started.running["one"].wait()
        assert started.again() == ["one"]
        assert trial.left(tmp_path / "flwr") == [started.running["one"].pid]
    assert trial.left(tmp_path / "flwr") == []


@pytest.mark.slow("a SuperLink and three nodes, which are fifteen processes, take minutes")
def test_a_run_over_flower_is_what_the_simulation_is(tmp_path: Path):
    from fedjax_pfl.deploy import trial

    settings = {"rounds": 2, "eval_every": 1, "clients_per_round": 3}
    simulated = runner.run({**CONFIG, **settings}, tmp_path / "simulated")
    config = tmp_path / "config.py"
    config.write_text(
        "from fedjax_pfl.config import configuration\n"
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
    lines = [json.loads(x) for x in (tmp_path / "real" / run.WIRE).read_text().splitlines()]
    assert sum(line["ledger_up"] for line in lines) == simulated.ledger.total_up
    keys = own_state.describe(tmp_path / "real.keys.json")
    assert len(set(keys.values())) == 3
    assert len(list((tmp_path / "nodes").glob("node-*/run-*/model.safetensors"))) == 3
    assert len(lines) == 2
    assert trial.left(tmp_path / "nodes" / "flwr") == []
