"""User functions that are called while a run trains."""

import fedjax_pfl as pfl

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


def test_callbacks_get_every_round_and_every_evaluation(tmp_path):
    rounds, lines = [], []
    result = pfl.run(
        SETTINGS,
        tmp_path / "run",
        on_round=lambda t, log: rounds.append((t, log.ids.tolist(), log.bytes_up)),
        on_evaluation=lines.append,
    )
    assert [t for t, _, _ in rounds] == [0, 1, 2, 3]
    assert all(ids == [0, 1, 2] for _, ids, _ in rounds)
    assert sum(count for _, _, count in rounds) == result.ledger.total_up
    assert lines == result.metrics
    without = pfl.run(SETTINGS)
    assert [line["before"] for line in without.metrics] == [line["before"] for line in lines]


def test_a_callback_that_returns_false_ends_the_run_and_the_same_call_continues_it(tmp_path):
    ended = pfl.run(SETTINGS, tmp_path / "run", on_evaluation=lambda line: line["round"] < 2)
    assert [line["round"] for line in ended.metrics] == [2]
    assert (tmp_path / "run" / "clients.csv").is_file()
    resumed = pfl.run(SETTINGS, tmp_path / "run")
    assert (resumed.resumed_at, [line["round"] for line in resumed.metrics]) == (2, [2, 4])
    whole = pfl.run(SETTINGS)
    assert resumed.metrics[-1]["before"] == whole.metrics[-1]["before"]


def test_a_round_can_end_a_run_between_evaluations():
    ended = pfl.run(SETTINGS, on_round=lambda t, log: t < 2)
    assert [line["round"] for line in ended.metrics] == [2]
    assert ended.ledger.total_up == 3 * ended.ledger.total_up // 3 > 0


def test_runs_of_a_sweep_are_called_back_by_name():
    names = []
    pfl.run_all(
        {**SETTINGS, "seeds": 2, "rounds": 2}, on_evaluation=lambda name, line: names.append(name)
    )
    assert names == ["seed=0", "seed=1"]
