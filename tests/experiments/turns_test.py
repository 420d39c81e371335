"""What the benchmark makes of seconds: ratios of neighbours, tables, targets and the curve."""

import pytest

from experiments.libraries import picture, rivals, turns
from experiments.libraries.rivals import Gone
from experiments.libraries.turns import Turn
from fedjax_pfl.report import text_tables


def test_ratios_are_of_neighbours():
    """The machine slowed down within the second turn; medians of each side would say 20, not 2."""
    taken = [
        Turn(1.0, "b", 2.0, 1.0),
        Turn(1.0, "b", 20.0, 1.0),
        Turn(10.0, "b", 20.0, 1.0),
        Turn(1.0, "c", 7.0, 1.0),
    ]
    assert turns.faster(taken, "b") == (2.0, 2.0, 20.0)
    assert turns.faster(taken, "c") == (7.0, 7.0, 7.0)


def test_share_of_peak_is_of_neighbours():
    taken = [Turn(2.0, "", None, 100.0), Turn(1.0, "", None, 400.0), Turn(4.0, "", None, 10.0)]
    assert turns.of_peak(taken, 120.0) == (0.6, 0.3, 3.0)


def test_turns_alternate_and_whoever_ends_is_left_out():
    seen, left = [], iter([1.0])

    def mine():
        seen.append("ours")
        return 1.0

    def mortal():
        seen.append("mortal")
        for seconds in left:
            return seconds
        raise Gone("it died")

    def other():
        seen.append("other")
        return 3.0

    def peak():
        seen.append("peak")  # right after ours: a rival's turn may take minutes
        return 7.0

    taken, gone = turns.take(mine, {"mortal": mortal, "other": other}, peak, 3)
    mine_first = ["ours", "peak"]
    assert seen == 2 * [*mine_first, "mortal", *mine_first, "other"] + [*mine_first, "other"]
    assert gone == {"mortal": "it died"}
    assert [turn.rival for turn in taken] == ["mortal", "other", "", "other", "other"]
    assert {turn.peak for turn in taken} == {7.0}
    few = iter([2.0, 4.0, 6.0, 6.0])
    alone, _ = turns.take(mine, {}, lambda: 7.0, 2, lambda: next(few))
    assert alone == [Turn(1.0, "", None, 7.0, 3.0), Turn(1.0, "", None, 7.0, 6.0)]


def test_a_step_beside_one_with_few_clients():
    """20 steps in 4 seconds beside 10 in 2; then, on a machine half as fast, in 12 beside 4."""
    taken = [
        Turn(4.0, "", None, 1.0, 2.0),
        Turn(12.0, "", None, 1.0, 4.0),
        Turn(4.4, "", None, 1.0, 2.0),
    ]
    assert turns.step_ratio(taken, client_steps=20, few_steps=10) == pytest.approx((1.1, 1.0, 1.5))


def item(**changes):
    taken = [
        Turn(2.0, "torch", 3.0, 1e3),
        Turn(2.0, "torch", 5.0, 1e3),
        Turn(2.5, "torch", 5.0, 1e3),
    ]
    found = {
        "about": "LeNet",
        "clients": 10,
        "compile_seconds": 1.25,
        "who": turns.summary(taken, client_steps=200, operations=1000.0),
    }
    return {**found, **changes}


def test_summary_and_table():
    found = item()
    assert found["who"]["ours"] == {
        "seconds": 2.0,
        "ms_per_client_step": 10.0,
        "share_of_peak": [0.5, 0.4, 0.5],
        "all_seconds": [2.0, 2.0, 2.5],
    }
    assert found["who"]["torch"] == {
        "seconds": 5.0,
        "ms_per_client_step": 25.0,
        "times_faster": 2.0,
        "range": [1.5, 2.5],
        "all_seconds": [3.0, 5.0, 5.0],
    }
    shown = turns.table({"lenet-10": found}, rivals.NAMES)
    assert shown.rows == [
        ["LeNet: ours", "2", "10", "", "", "1.2", "50 %"],
        ["LeNet: PyTorch loop", "5", "25", "2.00 x", "1.50 to 2.50", "", ""],
    ]
    assert max(map(len, text_tables.text([shown]).splitlines())) <= 100


def test_how_constant_a_client_step_is():
    found = {"lenet-10": item(), "mlp": item(), "lenet-100": item(clients=100)}
    found["lenet-100"]["who"]["ours"]["ms_per_client_step"] = 11.0
    assert turns.curve(found) == {"ours": {10: 10.0, 100: 11.0}, "torch": {10: 20.0, 100: 22.0}}
    assert turns.constant(found) == turns.constant({}) == ""
    found["lenet-100"]["step_beside_few"] = [1.02, 0.98, 1.25]
    assert turns.constant(found) == (
        "Beside a client step of LeNet with 10 clients, one takes 1.02 times (0.98 to 1.25) with "
        "100 clients."
    )
    seeds = item(seeds=8, step_beside_few=[0.5, 0.4, 0.6])
    assert turns.constant({"seeds-8": seeds}).endswith(
        "0.50 times (0.40 to 0.60) with 8 seeds at once."
    )
    figure = picture.draw(turns.curve(found), rivals.NAMES, "2 cores")
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn == {"fedjax_pfl": [10.0, 10.2], "PyTorch loop": [20.0, 20.4]}


def test_targets_say_what_was_not_measured():
    found = {"lenet-10": item(), "lenet-1000": item(clients=1000), "mlp": item()}
    found["lenet-1000"]["step_beside_few"] = [1.11, 1.0, 1.2]
    found["mlp"]["who"]["torch"]["times_faster"] = 1.49
    whole = {"machine": {"backend": "cpu"}, "items": found, "compile_seconds": {"pfedla": 15.0}}
    rows = {row[0]: row[1:] for row in turns.targets(whole, rivals.NAMES).rows}
    assert rows["CPU, lenet-10: 1.5 x PyTorch loop"] == ["2.00 x", "met"]
    assert rows["CPU, mlp: 1.5 x PyTorch loop"] == ["1.49 x", "missed"]
    assert rows["CPU, resnet9: 1.2 x PyTorch loop"] == ["", "not measured"]
    assert rows["same time per client step with 1,000 and 10 clients, within 10 %"] == [
        "11 % apart",
        "missed",
    ]
    assert rows["default configuration of pfedla compiles in 15 s"] == ["15.0 s", "missed"]
    assert sum(verdict == "not measured" for _, verdict in rows.values()) == 3 + 3
    whole["machine"]["backend"] = "gpu"
    rows = {row[0]: row[1:] for row in turns.targets(whole, rivals.NAMES).rows}
    assert rows["GPU, lenet-10: 10 x PyTorch loop"] == ["2.00 x", "missed"]
    assert rows["GPU, lenet-100: 30 x PyTorch loop"] == ["", "not measured"]
    assert not any(name.startswith("CPU") for name in rows)


@pytest.mark.parametrize(
    ("what", "busy"),
    [
        ({"load_average": [2.1, 0.0]}, True),
        ({"load_average": [1.9, 9.0]}, False),
        ({"cores_of_others": [0.1, 0.6], "load_average": [0.0, 0.0]}, True),
        ({"cores_of_others": [0.1, 0.4], "load_average": [3.0, 3.0]}, False),  # our own load
        ({"cores_of_others": [None, None], "load_average": [3.0, 3.0]}, True),
    ],
)
def test_on_a_busy_machine_nothing_is_met_or_missed(what, busy):
    found = {"lenet-10": item(**what), "lenet-1000": item(clients=1000, **what)}
    found["lenet-1000"]["step_beside_few"] = [1.01, 1.0, 1.2]
    whole = {
        "machine": {"backend": "cpu", "cores": 2},
        "items": found,
        "compile_seconds": {"pfedla": 15.0},
        "compile": what,
    }
    rows = {row[0]: row[1:] for row in turns.targets(whole, rivals.NAMES).rows}

    def told(text, verdict):
        return [f"{text}, busy machine", "not measured"] if busy else [text, verdict]

    assert rows["CPU, lenet-10: 1.5 x PyTorch loop"] == told("2.00 x", "met")
    assert rows["CPU, lenet-1000: 1 x PyTorch loop"] == told("2.00 x", "met")
    step = "same time per client step with 1,000 and 10 clients, within 10 %"
    assert rows[step] == told("1% apart".replace("%", " %"), "met")
    assert rows["default configuration of pfedla compiles in 15 s"] == told("15.0 s", "missed")
