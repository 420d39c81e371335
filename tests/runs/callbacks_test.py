"""Tests of user functions that are called during a run."""

import numpy as np
import pytest

import fedjax_pfl as pfl

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

SETTINGS = {
    "dataset": "digits",
    "classes": {"per_client": 4, "examples": 40},
    "model": "mlp",
    "mlp": {"hidden": (4,)},
    "clients": 3,
    "rounds": 4,
    "eval_every": 2,
    "devices": 1,
}


def test_callbacks_receive_every_round_and_evaluation_and_can_stop_a_run(tmp_path):
    rounds, lines = [], []
    result = pfl.run(
        SETTINGS,
        on_round=lambda t, log: rounds.append((t, log.ids.tolist(), log.bytes_up)),
        on_evaluation=lines.append,
    )
    assert [(t, ids) for t, ids, _ in rounds] == [(t, [0, 1, 2]) for t in range(4)]
    assert sum(count for *_, count in rounds) == result.ledger.total_up
    assert lines == result.metrics

    stopped = pfl.run(SETTINGS, tmp_path / "run", on_evaluation=lambda line: line["round"] < 2)
    assert [line["round"] for line in stopped.metrics] == [2]
    assert (tmp_path / "run" / "clients.csv").is_file()
    (tmp_path / "run" / "report.html").write_text("report of two rounds")
    resumed = pfl.run(SETTINGS, tmp_path / "run")
    assert (resumed.resumed_at, [line["round"] for line in resumed.metrics]) == (2, [2, 4])
    assert [line["before"] for line in resumed.metrics] == [line["before"] for line in lines]
    assert (tmp_path / "run" / "report.html").read_text() != "report of two rounds"

    downloads = []

    def until_two(t, log):
        downloads.append(log.bytes_down)
        return np.less(t, 2)  # a False of NumPy

    stopped = pfl.run({**SETTINGS, "count_initial_download": False}, on_round=until_two)
    assert downloads == [0, *[stopped.ledger.total_down // 2] * 2]
    assert [line["round"] for line in stopped.metrics] == [2]
    assert stopped.ledger.total_up == sum(count for *_, count in rounds[:3])
    assert (stopped.round, stopped.phase) == (3, 0)
    assert repr(stopped).startswith("Result(fedavg, 3 rounds, ")
    phases = [{"algorithm": "fedrep"}, {}, {"algorithm": "fedper"}]
    text = repr(stopped._replace(config={**stopped.config, "phases": phases}))
    assert text.startswith("Result(fedrep then fedavg then fedper, 3 rounds, ")

    # Ended before the first evaluation: nothing to report.
    stopped = pfl.run(SETTINGS, tmp_path / "short", on_round=lambda t, log: False)
    assert (stopped.metrics, stopped.ledger.total_up) == ([], rounds[0][2])
    assert not (tmp_path / "short" / "report.html").exists()
    resumed = pfl.run(SETTINGS, tmp_path / "short")
    assert (resumed.resumed_at, [line["round"] for line in resumed.metrics]) == (1, [2, 4])


def test_callbacks_of_a_sweep_receive_the_name_of_the_run():
    names = []
    settings = {**SETTINGS, "seeds": 2, "rounds": 2}
    pfl.run_all(settings, on_evaluation=lambda name, line: names.append(name))
    assert names == ["seed=0", "seed=1"]
    settings["rounds"] = 4
    ended = pfl.run_all(settings, on_evaluation=lambda name, line: name != "seed=0")
    assert {name: result.round for name, result in ended.items()} == {"seed=0": 2, "seed=1": 2}
