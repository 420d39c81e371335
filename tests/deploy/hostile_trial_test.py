"""Trials over Flower with a hostile node and with a hostile server."""

import json
import shutil
from pathlib import Path

import pytest

from fedjax_pfl.deploy import assembly, guard, run, schema, storage, wire
from tests.deploy.hostile_server_test import RUN, SETTINGS, planted_values, request, write_table
from tests.deploy.run_test import CONFIG
from tests.runs.common import read_metrics

pytest.importorskip(
    "flwr", reason="Flower is not installed; pip install -e '.[dev]' brings it, as CI does"
)

ROOT = Path(__file__).parents[2]
TWO_CLIENTS = {**CONFIG, "clients": 2, "clients_per_round": 2, "rounds": 2, "evaluate_after": False}


def run_trial(tmp_path, monkeypatch, config, data=()):
    """Runs a trial in `tmp_path`; returns its log lines."""
    from fedjax_pfl.deploy import trial

    monkeypatch.chdir(ROOT)
    settings, registry = assembly.complete(config)
    log_lines = []
    waiting = {"seconds": 600, "min_answers": 1}
    config = assembly.to_plain(settings, registry)
    trial.run(config, tmp_path / "run", tmp_path / "nodes", waiting, log_lines.append, data)
    assert guard.running_processes(tmp_path / "nodes" / "flwr") == []
    return log_lines


@pytest.mark.slow("a SuperLink and two nodes take minutes")
def test_a_hostile_node_does_not_affect_the_other(tmp_path, monkeypatch):
    """Client 1 sends wrong responses at each step; only client 0 counts."""
    from fedjax_pfl.deploy import trial

    start = trial._Processes.start

    def instead(self, name, *arguments):
        if name == "worker-1":
            arguments = tuple(
                "tests.deploy.hostile_worker" if "worker" in str(w) else w for w in arguments
            )
        start(self, name, *arguments)

    monkeypatch.setattr(trial._Processes, "start", instead)
    log_lines = run_trial(tmp_path, monkeypatch, TWO_CLIENTS)
    expected = [
        "client 1 cannot enrol: it has refused: sorry\\nThe run has ended: /srv\\nerror: gone\\x1b",
        "client 1 cannot enrol: message.described",
        "evaluate, round 1: client 1: its accuracy in before is not from",
        "evaluate, round 2: client 1: its accuracy in before is not from",
    ]
    for line in expected:
        assert any(logged.startswith(line) for logged in log_lines), (line, log_lines)
    assert not any("Traceback" in line or "\n" in line for line in log_lines)
    metrics = read_metrics(tmp_path / "run")
    assert [line["before"]["clients"] for line in metrics] == [1, 1]
    assert [line["rejected"] for line in metrics] == [1, 2]
    start_record = storage.read_json(tmp_path / "run" / run.DEPLOYED_FILE, schema.DEPLOYED)
    assert len(start_record["federation"]["counts"]) == 2
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
    exchange = flower.FlowerExchange(grid, place, 2, print)
    exchange.wait(300)
    for number, path in enumerate(sorted(place.parent.glob("attack-*"))):
        for i, content in exchange.ask(dict.fromkeys((0, 1), path.read_bytes()), 300):
            (place.parent / f"answer-{number:02d}-{i}").write_bytes(content)
    outcome = flower.outcome_path(Path(asked["log"]))
    flower.write_json(outcome, {"directory": str(place)})
"""


@pytest.mark.slow("a SuperLink and two nodes take minutes")
def test_a_hostile_server_gets_no_data(tmp_path, monkeypatch):
    """It requests other files, columns, rows and clients, and sends code."""
    from fedjax_pfl.deploy import trial

    files = []
    for i in range(2):
        data = write_table(tmp_path / f"own-{i}.csv")
        content = {"dataset": f"csv:{data}", "labels": ["no", "yes"], "words": {"nickname": 8}}
        files.append(tmp_path / f"node-{i}.json")
        files[-1].write_text(json.dumps(content))
    other_table = write_table(tmp_path / "other.csv", word="Popocatepetl")
    marker = tmp_path / "code-of-the-server-ran"
    app = shutil.copytree(trial.APP_FOLDER, tmp_path / "app")
    (app / "server_app.py").write_text(HOSTILE)
    (app / "client_app.py").write_text(f"app = open({str(marker)!r}, 'w').close()\n")
    monkeypatch.setattr(trial, "APP_FOLDER", app)
    attacks = [
        request(),  # which binds node 0, and is for another client at node 1
        request(client=1),
        request(settings={**SETTINGS, "csv": {"test": str(other_table)}}),
        request(settings={**SETTINGS, "csv": {"input": "socialno"}, "test_fraction": 0.949}),
        request(settings={**SETTINGS, "partition_seed": 7}),
        request(settings={**SETTINGS, "data_dir": str(tmp_path)}),
        request(settings={**SETTINGS, "algorithm": "os:getcwd"}),
        request(run="aaaa", client=1),
        request("train"),
        request("train", run="bbbb", client=1),
        b"\x80\x04cos\nsystem\n",
    ]
    for number, content in enumerate(attacks):
        (tmp_path / f"attack-{number:02d}").write_bytes(content)
    config = {**TWO_CLIENTS, "dataset": "digits", "partition": "iid"}
    run_trial(tmp_path, monkeypatch, config, [str(path) for path in files])
    responses = {path.name: path.read_bytes() for path in tmp_path.glob("answer-*")}
    assert len(responses) == 2 * len(attacks)
    kinds = {name: wire.decode(content, 10_000, schema.RESPONSE).facts["kind"]
             for name, content in responses.items()}  # fmt: skip
    enrolled = {"answer-00-0", "answer-01-1", "answer-07-1"}
    assert {name for name, kind in kinds.items() if kind == "enrol"} == enrolled
    assert {name for name, kind in kinds.items() if kind == "refused"} == set(kinds) - enrolled
    everything = b"\0".join(responses.values())
    for planted in planted_values("Popocatepetl", "own-", str(tmp_path)):
        assert planted not in everything
    assert not marker.exists()
    folders = {path.name for path in (tmp_path / "nodes").glob("node-?/run-*")}
    assert folders == {f"run-{RUN}", "run-aaaa"}
