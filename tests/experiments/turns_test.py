"""Tests of the benchmark's statistics: ratios within turns, tables, targets and the curve."""

import pytest

from experiments import benchmark
from experiments.libraries import picture, rivals, turns, work
from experiments.libraries.rivals import Gone
from experiments.libraries.turns import Turn
from fedjax_pfl.report import text_tables


def test_ratio_compares_neighbouring_turns():
    """The machine slows down in the second turn: the ratio of the medians would be 20, not 2."""
    measured = [
        Turn(1.0, "b", 2.0, 1.0),
        Turn(1.0, "b", 20.0, 1.0),
        Turn(10.0, "b", 20.0, 1.0),
        Turn(1.0, "c", 7.0, 1.0),
    ]
    assert turns.faster(measured, "b") == (2.0, 2.0, 20.0)
    assert turns.faster(measured, "c") == (7.0, 7.0, 7.0)


def test_share_of_peak_uses_the_peak_of_the_same_turn():
    measured = [Turn(2.0, "", None, 100.0), Turn(1.0, "", None, 400.0), Turn(4.0, "", None, 10.0)]
    assert turns.of_peak(measured, 120.0) == (0.6, 0.3, 3.0)


def test_results_leave_out_a_rival_that_fails_after_a_turn(monkeypatch, capsys):
    class FailingChild:
        pid = "self"

        def __init__(self, *_):
            self.answers = iter([0.5])

        def wait_until_ready(self):
            return {}

        def go(self):
            for seconds in self.answers:
                return seconds
            raise Gone("it died")

        def close(self):
            pass

    def compiled(item):
        return work.Workload(
            run=lambda: None,
            compile_seconds=1.0,
            parameters=10,
            flops=1.0,
            plan="",
            program=str,
        )

    monkeypatch.setattr(benchmark, "Child", FailingChild)
    monkeypatch.setattr(benchmark.roofline, "bandwidth", lambda: 1e9)
    for name, replacement in {
        "compiled": compiled,
        "peak": lambda: 1e9,
        "busy_cores": lambda: 0.0,
    }.items():
        monkeypatch.setattr(work, name, replacement)
    commands = {"torch": ([], None)}
    results = benchmark.measured("mlp", work.WORKS["mlp"], commands, repeats=3, limit=1.0)
    assert list(results["who"]) == ["library"]
    assert results["missing"] == {"torch": "it died"}
    assert "was not timed: it died" in capsys.readouterr().err


def test_turns_alternate_and_a_failed_rival_is_left_out():
    calls, failing_times = [], iter([1.0])

    def library():
        calls.append("library")
        return 1.0

    def failing():
        calls.append("failing")
        for seconds in failing_times:
            return seconds
        raise Gone("it died")

    def steady():
        calls.append("steady")
        return 3.0

    def peak():
        calls.append("peak")  # right after the library: a rival's turn may take minutes
        return 7.0

    measured, gone = turns.take(library, {"failing": failing, "steady": steady}, peak, 3)
    library_turn = ["library", "peak"]
    assert calls == 2 * [*library_turn, "failing", *library_turn, "steady"] + [
        *library_turn,
        "steady",
    ]
    assert gone == {"failing": "it died"}
    assert [turn.rival for turn in measured] == ["failing", "steady", "", "steady", "steady"]
    assert {turn.peak for turn in measured} == {7.0}
    few = iter([2.0, 4.0, 6.0, 6.0])
    without_rivals, _ = turns.take(library, {}, lambda: 7.0, 2, lambda: next(few))
    assert without_rivals == [Turn(1.0, "", None, 7.0, 3.0), Turn(1.0, "", None, 7.0, 6.0)]


def test_step_ratio_against_few_clients():
    """20 steps in 4 s against 10 in 2 s; on a slower machine, in 12 s against 4 s."""
    measured = [
        Turn(4.0, "", None, 1.0, 2.0),
        Turn(12.0, "", None, 1.0, 4.0),
        Turn(4.4, "", None, 1.0, 2.0),
    ]
    assert turns.step_ratio(measured, client_steps=20, few_steps=10) == pytest.approx(
        (1.1, 1.0, 1.5)
    )


def item(**changes):
    measured = [
        Turn(2.0, "torch", 3.0, 1e3),
        Turn(2.0, "torch", 5.0, 1e3),
        Turn(2.5, "torch", 5.0, 1e3),
    ]
    result = {
        "about": "LeNet",
        "clients": 10,
        "compile_seconds": 1.25,
        "who": turns.summary(measured, client_steps=200, operations=1000.0),
    }
    return {**result, **changes}


def test_summary_and_table():
    result = item()
    assert result["who"]["library"] == {
        "seconds": 2.0,
        "ms_per_client_step": 10.0,
        "share_of_peak": [0.5, 0.4, 0.5],
        "all_seconds": [2.0, 2.0, 2.5],
    }
    assert result["who"]["torch"] == {
        "seconds": 5.0,
        "ms_per_client_step": 25.0,
        "times_faster": 2.0,
        "range": [1.5, 2.5],
        "all_seconds": [3.0, 5.0, 5.0],
    }
    table = turns.table({"lenet-10": result}, rivals.NAMES)
    assert table.rows == [
        ["LeNet: ours", "2", "10", "", "", "1.2", "50 %"],
        ["LeNet: PyTorch loop", "5", "25", "2.00 x", "1.50 to 2.50", "", ""],
    ]
    assert max(map(len, text_tables.text([table]).splitlines())) <= 100


def test_client_step_time_against_number_of_clients():
    items = {"lenet-10": item(), "mlp": item(), "lenet-100": item(clients=100)}
    items["lenet-100"]["who"]["library"]["ms_per_client_step"] = 11.0
    assert turns.curve(items) == {"library": {10: 10.0, 100: 11.0}, "torch": {10: 20.0, 100: 22.0}}
    assert turns.constant(items) == turns.constant({}) == ""
    items["lenet-100"]["step_ratio"] = [1.02, 0.98, 1.25]
    assert turns.constant(items) == (
        "Beside a client step of LeNet with 10 clients, one takes 1.02 times (0.98 to 1.25) with "
        "100 clients."
    )
    seeds = item(seeds=8, step_ratio=[0.5, 0.4, 0.6])
    assert turns.constant({"seeds-8": seeds}).endswith(
        "0.50 times (0.40 to 0.60) with 8 seeds at once."
    )
    figure = picture.draw(turns.curve(items), rivals.NAMES, "2 cores")
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    curves = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert curves == {"fedjax_pfl": [10.0, 10.2], "PyTorch loop": [20.0, 20.4]}


def test_targets_say_what_was_not_measured():
    items = {"lenet-10": item(), "lenet-1000": item(clients=1000), "mlp": item()}
    items["lenet-1000"]["step_ratio"] = [1.11, 1.0, 1.2]
    items["lenet-10"]["who"]["torch"]["times_faster"] = 3.0
    items["mlp"]["who"]["torch"]["times_faster"] = 2.49
    record = {"machine": {"backend": "cpu"}, "items": items, "compile_seconds": {"pfedla": 5.0}}
    rows = {row[0]: row[1:] for row in turns.targets(record, rivals.NAMES).rows}
    assert rows["CPU, lenet-10: 3 x PyTorch loop"] == ["3.00 x", "met"]
    assert rows["CPU, mlp: 2.5 x PyTorch loop"] == ["2.49 x", "missed"]
    assert rows["CPU, resnet9: 1.6 x PyTorch loop"] == ["", "not measured"]
    step = "lenet: time of a client step with 1,000 clients, relative to 10, at most 1.1 x"
    assert rows[f"CPU, {step}"] == ["1.11 x", "missed"]
    assert rows["default configuration of pfedla compiles in 5 s"] == ["5.0 s", "missed"]
    assert sum(verdict == "not measured" for _, verdict in rows.values()) == 4 + 3
    record["machine"]["backend"] = "gpu"
    items["lenet-10"]["who"]["library"]["ms_per_client_step"] = 0.051
    items["mlp"]["who"]["library"]["ms_per_client_step"] = 0.006
    items["resnet9"] = {"who": {"library": {"ms_per_client_step": 1, "share_of_peak": [0.3]}}}
    rows = {row[0]: row[1:] for row in turns.targets(record, rivals.NAMES).rows}
    assert rows["GPU, lenet-10: a client step in 50 us"] == ["51 us", "missed"]
    assert rows["GPU, mlp: a client step in 6 us"] == ["6 us", "met"]
    assert rows["GPU, lenet-100: a client step in 12 us"] == ["", "not measured"]
    assert rows["GPU, resnet9: 30 % of the peak"] == ["30 %", "met"]
    assert rows[f"GPU, {step}"] == ["1.11 x", "missed"]
    items["lenet-1000"]["step_ratio"] = [0.3, 0.2, 0.4]
    rows = {row[0]: row[1:] for row in turns.targets(record, rivals.NAMES).rows}
    assert rows[f"GPU, {step}"] == ["0.30 x", "met"]
    assert not any(name.startswith("CPU") for name in rows)


@pytest.mark.parametrize(
    ("load", "busy"),
    [
        ({"load_average": [2.1, 0.0]}, True),
        ({"load_average": [1.9, 9.0]}, False),
        ({"cores_of_others": [0.1, 0.6], "load_average": [0.0, 0.0]}, True),
        ({"cores_of_others": [0.1, 0.4], "load_average": [3.0, 3.0]}, False),  # our own load
        ({"cores_of_others": [None, None], "load_average": [3.0, 3.0]}, True),
    ],
)
def test_on_a_busy_machine_nothing_is_met_or_missed(load, busy):
    items = {"lenet-10": item(**load), "lenet-1000": item(clients=1000, **load)}
    items["lenet-10"]["who"]["torch"]["times_faster"] = 3.5
    items["lenet-1000"]["step_ratio"] = [1.01, 1.0, 1.2]
    record = {
        "machine": {"backend": "cpu", "cores": 2},
        "items": items,
        "compile_seconds": {"pfedla": 5.0},
        "compile": load,
    }
    rows = {row[0]: row[1:] for row in turns.targets(record, rivals.NAMES).rows}

    def expected(text, verdict):
        return [f"{text}, busy machine", "not measured"] if busy else [text, verdict]

    assert rows["CPU, lenet-10: 3 x PyTorch loop"] == expected("3.50 x", "met")
    step = "CPU, lenet: time of a client step with 1,000 clients, relative to 10, at most 1.1 x"
    assert rows[step] == expected("1.01 x", "met")
    assert rows["default configuration of pfedla compiles in 5 s"] == expected("5.0 s", "missed")
