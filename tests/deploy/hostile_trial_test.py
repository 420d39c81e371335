"""Trials of two nodes over Flower, with a node that lies and with a server that wants more."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedjax_pfl.deploy import assembly, guard, run, schema, storage, wire
from tests.deploy.hostile_server_test import COLUMNS, ID, RUN, SECRET, SENT, asked, forms, table
from tests.deploy.run_test import CONFIG
from tests.runs.common import read_metrics

pytest.importorskip(
    "flwr", reason="Flower is not installed; pip install -e '.[dev]' brings it, as CI does"
)

ROOT = Path(__file__).parents[2]
TWO = {**CONFIG, "clients": 2, "clients_per_round": 2, "rounds": 2, "evaluate_after": False}


def trial_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], data: Any = ()
) -> list[str]:
    """Runs a trial in `tmp_path`; returns the lines that it has told."""
    from fedjax_pfl.deploy import trial

    monkeypatch.chdir(ROOT)
    settings, words = assembly.complete(config)
    told: list[str] = []
    waiting = {"seconds": 600, "least": 1}
    plain = assembly.to_plain(settings, words)
    trial.run(plain, tmp_path / "run", tmp_path / "nodes", waiting, told.append, data)
    assert guard.running_processes(tmp_path / "nodes" / "flwr") == []
    return told


@pytest.mark.slow("a SuperLink and two nodes take minutes")
def test_a_node_that_lies_changes_nothing_for_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Client 1 lies at each step; the run ends, of client 0's uploads and scores alone."""
    from fedjax_pfl.deploy import trial

    start = trial._Processes.start

    def instead(self: Any, name: str, *words: Any) -> None:
        if name == "worker-1":
            words = tuple("tests.deploy.hostile_worker" if "worker" in str(w) else w for w in words)
        start(self, name, *words)

    monkeypatch.setattr(trial._Processes, "start", instead)
    told = trial_of(tmp_path, monkeypatch, TWO)
    wanted = [
        "client 1 cannot enrol: it has refused: sorry\\nThe run has ended: /srv\\nerror: gone\\x1b",
        "client 1 cannot enrol: message.described",
        "evaluate, round 1: client 1: its accuracy in before is not from",
        "evaluate, round 2: client 1: its accuracy in before is not from",
    ]
    for line in wanted:
        assert any(one.startswith(line) for one in told), (line, told)
    assert not any("Traceback" in line or "\n" in line for line in told)
    metrics = read_metrics(tmp_path / "run")
    assert [line["before"]["clients"] for line in metrics] == [1, 1]
    assert [line["rejected"] for line in metrics] == [1, 2]
    known = storage.read_json(tmp_path / "run" / run.DEPLOYED_FILE, schema.DEPLOYED)
    assert len(known["federation"]["counts"]) == 2
    assert (tmp_path / "run" / "report.html").is_file()


HOSTILE = """
import json
from pathlib import Path
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from fedjax_pfl.deploy import flower

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    asked = json.loads(Path(str(context.run_config["settings"])).read_text())
    place = Path(asked["workdir"])
    exchange = flower.ByFlower(grid, place, 2, print)
    exchange.wait(300)
    for number, path in enumerate(sorted(place.parent.glob("attack-*"))):
        for i, content in exchange.ask(dict.fromkeys((0, 1), path.read_bytes()), 300):
            (place.parent / f"answer-{number:02d}-{i}").write_bytes(content)
    outcome = flower.outcome_of(Path(asked["log"]))
    flower.whole(outcome, json.dumps({"directory": str(place)}).encode())
"""


@pytest.mark.slow("a SuperLink and two nodes take minutes")
def test_a_server_that_wants_more_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It asks for other files, other columns, other rows and other clients, and sends code."""
    from fedjax_pfl.deploy import trial

    files = []
    for i in range(2):
        data = table(tmp_path / f"own-{i}.csv")
        content = {"dataset": f"csv:{data}", "labels": ["no", "yes"], "words": {"nickname": 8}}
        files.append(tmp_path / f"node-{i}.json")
        files[-1].write_text(json.dumps(content))
    other = table(tmp_path / "other.csv", word="Popocatepetl")
    marker = tmp_path / "code-of-the-server-ran"
    app = shutil.copytree(trial.APP_FOLDER, tmp_path / "app")
    (app / "server_app.py").write_text(HOSTILE)
    (app / "client_app.py").write_text(f"app = open({str(marker)!r}, 'w').close()\n")
    monkeypatch.setattr(trial, "APP_FOLDER", app)
    attacks = [
        asked(),  # which binds node 0, and is for another client at node 1
        asked(client=1),
        asked(settings={**SENT, "csv": {"test": str(other)}}),
        asked(settings={**SENT, "csv": {"input": "socialno"}, "test_fraction": 0.949}),
        asked(settings={**SENT, "partition_seed": 7}),
        asked(settings={**SENT, "data_dir": str(tmp_path)}),
        asked(settings={**SENT, "algorithm": "os:getcwd"}),
        asked(run="aaaa", client=1),
        asked("train"),
        asked("train", run="bbbb", client=1),
        b"\x80\x04cos\nsystem\n",
    ]
    for number, content in enumerate(attacks):
        (tmp_path / f"attack-{number:02d}").write_bytes(content)
    config = {**TWO, "dataset": "digits", "partition": "iid"}
    trial_of(tmp_path, monkeypatch, config, [str(path) for path in files])
    answers = {path.name: path.read_bytes() for path in tmp_path.glob("answer-*")}
    assert len(answers) == 2 * len(attacks)
    kinds = {name: wire.decode(content, 10_000, schema.RESPONSE).facts["kind"]
             for name, content in answers.items()}  # fmt: skip
    enrolled = {"answer-00-0", "answer-01-1", "answer-07-1"}
    assert {name for name, kind in kinds.items() if kind == "enrol"} == enrolled
    assert {name for name, kind in kinds.items() if kind == "refused"} == set(kinds) - enrolled
    everything = b"\0".join(answers.values())
    words = [SECRET, "Person", "Popocatepetl", "own-", str(tmp_path), *COLUMNS]
    for planted in [word.encode() for word in words] + forms(ID):
        assert planted not in everything
    assert not marker.exists()
    folders = {path.name for path in (tmp_path / "nodes").glob("node-?/run-*")}
    assert folders == {f"run-{RUN}", "run-aaaa"}
