"""Tests of tuning on validation examples: grids, equal budgets, and the choice of a point."""

import csv
import math
import re
from pathlib import Path

import pytest

from fedjax_pfl.report import comparison
from fedjax_pfl.runs.tuning import choice, grids, show
from fedjax_pfl.runs.tuning.choice import PointResult
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.general import settings_with
from tests.commands import message

# Grids.


def test_keys_apply_to_all_methods_or_to_one():
    texts = [
        "learning_rate=.1,.03; batch_size=8",
        "pfedla.rate=.5, 1,.5;pfedla.normalise=relu",
        "local.learning_rate=1; clip_norm=unset,2; keep_head=true,false",
    ]
    common = {
        "learning_rate": (0.1, 0.03),
        "batch_size": (8,),
        "clip_norm": (None, 2.0),
        "keep_head": (True, False),
    }
    parsed = grids.grids(texts, ["pfedla", "local"])
    assert parsed == {
        "pfedla": {**common, "pfedla.rate": (0.5, 1.0), "pfedla.normalise": ("relu",)},
        "local": {**common, "learning_rate": (1.0,)},
    }
    assert [type(v) for v in parsed["pfedla"]["pfedla.rate"]] == [float, float]
    # A method's own setting takes precedence over the training setting of the same name.
    assert grids.grids(["pfedhn.momentum=.5"], ["pfedhn"]) == {
        "pfedhn": {"pfedhn.momentum": (0.5,)}
    }


def test_points_are_in_the_order_of_the_grid():
    assert grids.points("fedavg", {"a": (1, 2), "b": (3, 4)}) == [
        {"a": 1, "b": 3},
        {"a": 1, "b": 4},
        {"a": 2, "b": 3},
        {"a": 2, "b": 4},
    ]
    assert grids.points("fedavg", {}) == [{}]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 'there is nothing to tune; give a grid, such as "learning_rate=0.1,0.01; '),
        ("learning_rat=.1", "there is no setting learning_rat; did you mean learning_rate?"),
        ("pfedla.rat=.1", "there is no setting pfedla.rat; did you mean pfedla.rate?"),
        ("pfedl.rate=.1", "there is no setting pfedl.rate; did you mean pfedla.rate?"),
        ("fedprox.mu=.1", "fedprox is none of the methods (pfedla, local); name it in methods"),
        ("pfedla=.1", "pfedla, which is no METHOD.SETTING"),
        ("learning_rate", "'learning_rate', which is no KEY=VALUE,VALUE"),
        ("learning_rate=", "which is no KEY=VALUE,VALUE"),
        ("learning_rate=.1,,2", "which is no KEY=VALUE,VALUE"),
        ("learning_rate=.1;learning_rate=2", "has learning_rate twice"),
        ("learning_rate=fast", "learning_rate=fast; it must be of type float"),
        ("learning_rate=nan", "learning_rate=nan; it must be a finite number"),
        ("learning_rate=unset", "learning_rate=unset; it must be of type float"),
        ("batch_size=1.5", "batch_size=1.5; it must be of type int"),
        ("keep_head=1", "keep_head=1; it must be true or false"),
        ("fedmn.layout=2", "fedmn.layout is a tuple, which cannot be tuned"),
        ("rounds=5", "rounds cannot be tuned: it is a part of the budget; set it outside the grid"),
        ("seed=1,2", "seed cannot be tuned"),
        ("clients=5", "clients cannot be tuned: the problem and the measurements are the same"),
        ("partition=iid", "partition cannot be tuned"),
        ("dataset=digits", "dataset cannot be tuned"),
        ("algorithm=local", "algorithm cannot be tuned"),
        ("dirichlet.alpha=.1", "dirichlet.alpha cannot be tuned"),
        ("validation_fraction=.1", "validation_fraction cannot be tuned"),
        ("eval_every=1", "eval_every cannot be tuned"),
    ],
)
def test_invalid_grids_are_refused(text, line):
    methods = ["fedmn"] if "fedmn" in text else ["pfedla", "local"]
    error = message(grids.grids, [text], methods)
    assert line in error
    assert "--" not in error  # the Python function `tune` raises it too, and has no flags


# Budgets.


def rate_points(count, name="learning_rate"):
    return [{name: float(i)} for i in range(count)]


def test_without_a_budget_grids_must_have_equal_size():
    points = {"fedavg": rate_points(3), "pfedla": rate_points(6), "local": rate_points(3)}
    line = message(grids.equal, points, None, 0)
    assert "(fedavg and local 3, pfedla 6)" in line
    assert line.endswith("give fedavg more values, or sample the same number with a budget of 3")
    equal_points = {"fedavg": rate_points(3), "local": rate_points(3)}
    assert grids.equal(equal_points, None, 0) == equal_points


def test_a_budget_samples_the_same_points_for_equal_grids():
    points = {
        "fedavg": rate_points(9),
        "local": rate_points(9),
        "pfedla": rate_points(2, "pfedla.rate"),
    }
    sampled = grids.equal(points, 4, 0)
    assert sampled["fedavg"] == sampled["local"]
    assert len(sampled["fedavg"]) == 4
    assert sampled["pfedla"] == points["pfedla"]
    rates = [point["learning_rate"] for point in sampled["fedavg"]]
    assert rates == sorted(rates)
    assert grids.equal(points, 4, 1)["fedavg"] != sampled["fedavg"]


def test_sampling_is_nested_and_uniform():
    few, more = (grids.sample(rate_points(20), n, 3) for n in (5, 12))
    assert all(point in more for point in few)
    count = [0] * 5
    for seed in range(1000):
        for point in grids.sample(rate_points(5), 2, seed):
            count[int(point["learning_rate"])] += 1
    assert sum(count) == 2000
    named_twice = grids.points("pfedhn", {"clip_norm": (None, 2.0), "pfedhn.clip_norm": (2.0,)})
    assert grids.sample(named_twice, 2, 0) == named_twice
    assert max(abs(n - 400) for n in count) < 65  # four deviations of a binomial: 4 * 15.5


def test_steps_replace_epochs():
    config = configuration.complete({"local_epochs": 5})
    changed = grids.apply(config, {"local_steps": 3, "learning_rate": 1.0, "pfedla.rate": 2.0})
    assert (changed.local_epochs, changed.local_steps, changed.learning_rate) == (None, 3, 1.0)
    assert (changed.pfedla.rate, config.local_epochs, config.pfedla.rate) == (2.0, 5, 0.5)


# The choice of a point.


def scored_run(validation, test=0.5, *, phases=None):
    """Returns a run with given accuracies at rounds 1, 2, ..., and the best round so far."""
    lines, best = [], None
    for i, value in enumerate(validation):
        phase = phases[i] if phases else 0
        if i and phase != lines[-1]["phase"]:
            best = None
        if value is not None and (best is None or value > validation[best - 1]):
            best = i + 1
        lines.append(
            {
                "round": i + 1,
                "phase": phase,
                "best_round": best,
                "before": {"accuracy_mean": test},
                "after": {"accuracy_mean": test},
                "validation": {"accuracy_mean": value},
            }
        )
    return comparison.Run(Path("nowhere"), {}, lines, [], True)


def scored(*scores, seeds=None, test=0.5, **point):
    runs = {seed: scored_run([value], test) for seed, value in enumerate(scores)}
    return PointResult(point, configuration.complete({}), runs, seeds or len(scores))


def test_score_is_the_best_round_of_the_last_phase():
    assert choice.score(scored_run([0.5, 0.7, 0.6])) == 0.7
    assert choice.score(scored_run([0.9, 0.4, 0.6, 0.5], phases=[0, 1, 1, 1])) == 0.6
    assert math.isnan(choice.score(scored_run([None, None])))
    without = scored_run([0.5])
    without.metrics[0].update(validation=None, best_round=None)
    assert math.isnan(choice.score(without))


def test_the_highest_mean_validation_score_is_chosen():
    points = [
        scored(0.4, 0.9, learning_rate=1.0, test=0.9),  # .65
        scored(0.7, 0.8, learning_rate=0.1, test=0.1),  # .75
        scored(None, 0.99, learning_rate=9.0, test=0.99),
        scored(0.6, 0.7, learning_rate=0.5, test=0.8),  # .65, except for rounding
    ]
    order = [result.point["learning_rate"] for result in choice.ranked(points)]
    assert order == [0.1, 1.0, 0.5, 9.0]
    assert choice.best_point(points) is points[1]
    assert choice.spread(points[1]) == {
        "mean": 0.75,
        "std": pytest.approx(0.1 / math.sqrt(2)),
        "seeds": 2,
    }


def test_ties_go_to_the_first_point_of_the_grid():
    """The sums as floats are 1.2 and 1.2000000000000002."""
    assert (0.9 + 0.3) / 2 < (0.8 + 0.4) / 2
    first, second = scored(0.9, 0.3, learning_rate=1.0), scored(0.8, 0.4, learning_rate=2.0)
    assert choice.best_point([first, second]) is first
    assert choice.best_point([second, first]) is second


def test_no_choice_with_missing_runs_or_without_finite_scores():
    points = [scored(0.5, seeds=2, learning_rate=1.0), scored(0.4, 0.4, learning_rate=2.0)]
    assert choice.best_point(points) is None
    assert choice.ranked(points) == points[::-1]
    assert choice.best_point([scored(None, learning_rate=1.0)]) is None

    def notes(results):
        return show.notes({"fedavg": results}, {"fedavg": len(results)}, None)

    assert notes(points) == ["fedavg: 1 of its runs are missing, so none is chosen yet."]
    assert "no point has a finite score" in notes([scored(None, learning_rate=1.0)])[0]


def test_values_at_the_edge_of_a_grid_are_reported():
    grid = {
        "a": (0.1, 0.2, 0.3),
        "b": (0.0, 0.9),
        "c": ("x",),
        "d": (3.0,),
        "e": (1, 2),
        "f": (None, 2.0, 4.0),
    }
    points = grids.points("fedavg", grid)

    def at(**values):
        return choice.edges({**points[0], **values}, points)

    assert at(a=0.2, b=0.0, e=1, f=None) == []  # no smaller value is possible
    assert at(a=0.3, f=2.0) == ["a 0.3 is the largest tried", "f 2.0 is the smallest tried"]
    assert at(a=0.1, b=0.9, e=2, f=4.0) == [
        "a 0.1 is the smallest tried",
        "b 0.9 is the largest tried",
        "e 2 is the largest tried",
        "f 4.0 is the largest tried",
    ]


RESULTS = {
    "fedavg": [scored(0.5, 0.7, learning_rate=r, momentum=0.5) for r in (1.0, 0.1)]
    + [scored(0.8, 0.9, learning_rate=0.01, momentum=0.5)],
    "pfedla": [
        scored(r - 0.7, r - 0.8, **{"learning_rate": 0.1, "pfedla.rate": r}) for r in (1.5, 1.0)
    ],
}


def test_tables_and_csv():
    fedavg, pfedla = show.tables(RESULTS)
    assert fedavg == (
        "fedavg",
        ["validation", "best round", "seeds", "rounds", ""],
        [
            ["learning_rate=0.01, momentum=0.5", "85.00 ± 7.07", "1, 1", "2", "1", "chosen"],
            ["learning_rate=1.0, momentum=0.5", "60.00 ± 14.14", "1, 1", "2", "1", ""],
            ["learning_rate=0.1, momentum=0.5", "60.00 ± 14.14", "1, 1", "2", "1", ""],
        ],
        (),
        "",
        (),
    )
    assert [row[-1] for row in pfedla.rows] == ["chosen", ""]
    rows = list(csv.DictReader(show.as_csv(RESULTS).splitlines()))
    assert rows[0] == {
        "method": "fedavg",
        "rank": "1",
        "learning_rate": "0.01",
        "momentum": "0.5",
        "pfedla.rate": "",
        "validation_mean": "0.8500000000000001",
        "validation_std": str(choice.spread(RESULTS["fedavg"][2])["std"]),
        "seeds": "2",
        "chosen": "1",
    }
    assert show.notes(RESULTS, {"fedavg": 9, "pfedla": 2}, 3) == [
        "fedavg: 3 of 9 points were sampled; learning_rate 0.01 is the smallest tried.",
        "pfedla: it has 2 points, fewer than the budget of 3: give its grid more values, or it has "
        "been tried less than the others; pfedla.rate 1.5 is the largest tried.",
    ]
    unfinished = show.tables({"local": [scored(learning_rate=1.0, seeds=2)]})
    assert unfinished[0].rows == [["learning_rate=1.0", "not run", "", "", "", ""]]


def test_head_counts_points_seeds_and_evaluations():
    configs = {method: configuration.complete({"rounds": 10}) for method in RESULTS}
    text = show.head(RESULTS, 2, configs)
    assert "Each method has at most 3 points, 2 seeds and 2 evaluations to be best in." in text
    assert text.endswith("Client updates of a run: fedavg, pfedla 100 (10 rounds of 10).")
    pfedla_only = {"pfedla": RESULTS["pfedla"]}
    assert "Each method has 2 points, 1 seed and" in show.head(pfedla_only, 1, configs)


def test_rising_curves_are_reported():
    def notes(*scores):
        runs = {seed: scored_run(curve) for seed, curve in enumerate(scores)}
        result = PointResult({"learning_rate": 1.0}, configuration.complete({}), runs, len(runs))
        return show.notes({"local": [result]}, {"local": 1}, None)

    rising = "local: its best rounds are the last ones; with more rounds the choice may differ."
    assert notes([0.5, 0.6], [0.1, 0.2, 0.3]) == [rising]
    assert notes([0.5, 0.6], [0.4, 0.3]) == notes([0.5]) == []


def test_close_points_are_reported():
    """Leads per seed: (.1, .1), (.3, -.1) and (.2, 0) have deviations of 0, .28 and .14."""
    best = scored(0.6, 0.8, learning_rate=0.3)
    behind = [
        scored(0.5, 0.7, learning_rate=0.2),
        scored(0.3, 0.9, learning_rate=0.1),
        scored(0.4, 0.8, learning_rate=0.01),
        scored(None, 0.7, learning_rate=9.0),
    ]
    assert choice.close(best, [*behind, best]) == behind[1:3]
    notes = show.notes({"local": [best, *behind[:3]]}, {"local": 4}, None)
    over = "learning_rate=0.1 and over learning_rate=0.01"
    assert notes == [
        f"local: learning_rate 0.3 is the largest tried; its lead over {over} is within the "
        "differences between seeds."
    ]
    single = [scored(0.5, learning_rate=r) for r in (0.1, 0.2)]
    assert choice.close(single[0], single) == []
    one_seed = "One seed cannot rank close points: --seeds=3 shows how much seeds differ."
    assert show.notes({"local": single}, {"local": 2}, None)[-1] == one_seed
    assert show.notes({"local": single[:1]}, {"local": 1}, None) == []


def test_picture_has_a_panel_per_setting_and_a_line_per_method():
    figure = show.draw_scores(RESULTS).figure
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_xlabel() for axes in panels] == ["learning_rate", "pfedla.rate"]
    assert [axes.get_xscale() for axes in panels] == ["log", "linear"]
    best = panels[0].lines[1]
    assert best.get_xdata().tolist() == [0.01, 0.1, 1.0]
    assert best.get_ydata().tolist() == pytest.approx([0.85, 0.6, 0.6])
    assert panels[0].lines[4].get_ydata().tolist() == pytest.approx([0.75])  # the better of two
    assert show.draw_scores({"local": [scored(0.5, learning_rate=1.0)]}) is None


def load_preset(text):
    names = {}
    exec(text, names)
    return names["get_config"]


def portable(config):
    """Returns all settings except those that depend on the machine."""
    left_out = settings_with("resumable")
    return {k: v for k, v in configuration.resolve(config).items() if k not in left_out}


def test_preset_has_the_chosen_settings():
    base = configuration.complete(
        {
            "data_dir": "/x",
            "memory_gb": 3.0,
            "devices": 7,
            "chunk": 2,
            "conv": "xla",
            "log_to": "tensorboard",
            "checkpoint_every": 3,
            "dataset": "synthetic",
            "synthetic": {"shape": (3, 3, 1)},
            "clients": 7,
            "phases": ({"algorithm": "fedavg", "rounds": 3}, {}),
            "model": "mlp",
            "local_steps": 2,
        }
    )
    points = {
        "fedavg": {"learning_rate": 0.01, "clip_norm": None, "keep_head": True},
        "pfedla": {"learning_rate": 0.2, "pfedla.rate": 0.05, "pfedla.normalise": "relu"},
        "pfedme": {"learning_rate": 0.01, "local_epochs": 4},
    }
    best = {}
    for method, point in points.items():
        base.algorithm = method
        best[method] = PointResult(point, grids.apply(base, point), {}, 1)
    text = choice.preset(best, dict.fromkeys(best, "It won."), 'From """this"""\n{and} that.')
    get_config = load_preset(text)
    for method, result in best.items():
        assert portable(get_config(method)) == portable(result.config)
        defaults = configuration.complete({})
        assert all(get_config(method)[key] == defaults[key] for key in settings_with("resumable"))
    assert not [key for key in settings_with("resumable") if f"'{key}'" in text]
    assert "# fedavg: It won.\n" in text
    assert "'learning_rate': 0.01" in text  # chosen, although it is the default
    assert message(get_config, "pfedl") == "there is no preset 'pfedl'; did you mean pfedla?"


def test_page_has_a_heading_for_each_part():
    picture = show.draw_scores(RESULTS)
    text = show.page(RESULTS, ["a note"], picture)
    heads = re.findall(r"<section>\s*<h2>(.*?)</h2>", text)
    assert heads == [*RESULTS, "Score by setting"]
    assert text.count("<figure") == 1
    assert "Score by setting" not in show.page(RESULTS, ["a note"], None)
