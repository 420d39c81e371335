"""Tests of rows, labels, means over seeds and paired tests on synthetic run directories."""

import csv
import json

import numpy as np
import pytest
from scipy.stats import wilcoxon

from fedjax_pfl.cli import compare
from fedjax_pfl.core.metrics import ACCURACY
from fedjax_pfl.report import answer, client_figures, comparison, comparison_page
from fedjax_pfl.settings import configuration
from tests.commands import message, run_here

SCORES = {"fedavg": [[0.5, 0.6, 0.7], [0.4, 0.8, 0.9]], "local": [[0.7, 0.6, 0.9], [0.6, 0.9, 0.8]]}


def settings(algorithm="fedavg", **changes):
    """Returns a resolved configuration as a run directory stores it."""
    config = configuration.complete({"algorithm": algorithm, "clients": 3, "rounds": 10, **changes})
    return json.loads(json.dumps(configuration.resolve(config)))


def write_run(path, scores, config, finished=True, score="accuracy", rounds=(5, 10), after=True):
    """Writes a run directory; local training improves every client by 0.05."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))

    def stage(gain):
        return {
            f"{score}_mean": float(np.mean(scores)) + gain,
            f"{score}_worst10": min(scores) + gain,
        }

    lines = [
        {
            "round": r,
            "before": {k: v * r / rounds[-1] for k, v in stage(0.0).items()},
            "after": stage(0.05) if after else None,
            "bytes_down": 2_000_000 * r,
            "bytes_up": 500_000 * r,
        }
        for r in rounds
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (path / "report.html").touch()
        with (path / "clients.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(
                ["client", "active", "test_examples", f"before_{score}", f"after_{score}"]
            )
            rows.writerow([99, 0, 7, 0.0, 1.0])  # not active
            rows.writerow([98, 1, 0, "", ""])  # without test examples
            for i, value in enumerate(scores):
                rows.writerow([i, 1, 10 + i, value, value + 0.05 if after else ""])
    return path


def rows_of(*paths):
    return comparison.group([comparison.read(path) for path in paths])


def compared(folder, baseline, scores, score="accuracy", **changes):
    """Returns the rows of a FedAvg run with the scores `baseline` and a Local run with `scores`."""
    runs = (("fedavg", baseline), ("local", scores))
    return rows_of(
        *(write_run(folder / a, s, settings(a, **changes), score=score) for a, s in runs)
    )


@pytest.fixture
def pair(tmp_path):
    """Returns rows of FedAvg and Local with two seeds each, from a mixed order."""
    order = [("fedavg", 1), ("local", 0), ("fedavg", 0), ("local", 1)]
    return rows_of(
        *(write_run(tmp_path / f"{a}{s}", SCORES[a][s], settings(a, seed=s)) for a, s in order)
    )


# Rows and labels.


def test_runs_that_differ_in_seed_and_resumable_settings_are_one_row(tmp_path):
    neutral = {"data_dir": "elsewhere", "chunk": 3, "devices": 2, "checkpoint_every": 7}
    for seed, changes in enumerate([{}, neutral]):
        write_run(tmp_path / f"{seed}", [0.5], settings(seed=seed, **changes))
    write_run(tmp_path / "2", [0.5], settings(seed=2, partition_seed=1))
    rows = rows_of(*(tmp_path / name for name in "102"))
    assert [[run.seed for run in row.runs] for row in rows] == [[0, 1], [2]]
    assert [row.label for row in rows] == ["partition_seed=0", "partition_seed=1"]
    assert [row.label for row in rows_of(tmp_path / "0")] == ["FedAvg"]


def test_seeds_with_their_own_partitions_are_one_row(tmp_path):
    for algorithm in ("fedavg", "local"):
        for seed in (4, 3):
            config = settings(algorithm, seed=seed, partition_seed=seed - 3)
            write_run(tmp_path / f"{algorithm}{seed}", SCORES[algorithm][seed - 3], config)
    rows = rows_of(*sorted(tmp_path.iterdir()))
    assert [(row.label, [run.seed for run in row.runs]) for row in rows] == [
        ("FedAvg", [3, 4]),
        ("Local", [3, 4]),
    ]
    assert [row.config["partition_seed"] for row in rows] == [0, 0]
    assert comparison.paired_test(*rows, "before").pairs == 3
    write_run(tmp_path / "other", [0.5], settings(seed=5, partition_seed=0))
    rows = rows_of(*sorted(tmp_path.iterdir()))
    assert [len(row.runs) for row in rows] == [2, 1, 2]
    for seed, partition_seed in ((7, 8), (8, 8), (8, 9)):
        config = settings("fedprox", seed=seed, partition_seed=partition_seed)
        write_run(tmp_path / f"fedprox{seed}{partition_seed}", [0.5], config)
    prox = [tmp_path / f"fedprox{seeds}" for seeds in ("78", "89")]
    assert [len(row.runs) for row in rows_of(*prox)] == [2]
    assert [len(row.runs) for row in rows_of(prox[0], tmp_path / "fedprox88")] == [2]
    assert [len(row.runs) for row in rows_of(prox[1], tmp_path / "fedprox88")] == [1, 1]


def test_settings_that_an_old_run_lacks_are_at_their_defaults(tmp_path):
    old = settings("pfedme", seed=1)
    del old["keep_head"], old["pfedme"]["beta"]
    configs = [old, settings("pfedme"), settings("pfedme", pfedme={"beta": 2.0})]
    rows = rows_of(*(write_run(tmp_path / str(i), [0.5], c) for i, c in enumerate(configs)))
    assert [len(row.runs) for row in rows] == [2, 1]
    assert [row.label for row in rows] == ["pfedme.beta=1.0", "pfedme.beta=2.0"]


def test_a_setting_of_another_version_is_a_label(tmp_path):
    configs = {"a": {**settings(), "gone": 3}, "b": settings()}
    rows = rows_of(*(write_run(tmp_path / name, [0.5], config) for name, config in configs.items()))
    assert [row.label for row in rows] == ["gone=3", "FedAvg"]


@pytest.mark.parametrize(
    ("configs", "labels"),
    [
        # Settings of one method do not distinguish it from another method.
        ([settings("fedavg"), settings("pfedla")], ["FedAvg", "pFedLA"]),
        (
            [settings(), settings("fedprox"), settings("fedprox", fedprox={"mu": 1.0})],
            ["FedAvg", "FedProx, fedprox.mu=0.1", "FedProx, fedprox.mu=1.0"],
        ),
        (
            [settings(model="mlp"), settings("local", model="small")],
            ["FedAvg, mlp", "Local, small"],
        ),
        (
            [settings(keep_head=True, batch_size=8), settings(batch_size=16)],
            ["batch_size=8, keep_head=true", "batch_size=16, keep_head=false"],
        ),
    ],
)
def test_labels_hold_the_differing_settings(configs, labels):
    assert comparison.labels(configs) == labels


# Means over seeds.


def test_summary_has_means_and_sample_deviations_over_seeds(pair):
    """The seeds have means 0.6 and 0.7, with std sqrt(2 · 0.05²), and worst scores 0.5 and 0.4."""
    fedavg, local = map(comparison.summary, pair)
    assert [row.label for row in pair] == ["FedAvg", "Local"]
    assert fedavg.before == pytest.approx({"mean": 0.65, "std": 0.005**0.5, "seeds": 2})
    assert fedavg.after == pytest.approx({"mean": 0.70, "std": 0.005**0.5, "seeds": 2})
    assert fedavg.worst10 == pytest.approx({"mean": 0.45, "std": 0.005**0.5, "seeds": 2})
    assert local.before["mean"] == pytest.approx((2.2 / 3 + 2.3 / 3) / 2)
    assert (fedavg.megabytes_down, fedavg.megabytes_up) == (20.0, 5.0)
    assert fedavg.rounds == (10, 10)


def test_summary_of_one_seed_without_evaluation_after_training(tmp_path):
    (row,) = rows_of(write_run(tmp_path / "a", [0.2, 0.4], settings(), after=False))
    summary = comparison.summary(row)
    assert summary.before == pytest.approx({"mean": 0.3, "std": None, "seeds": 1})
    assert summary.after is None
    assert comparison_page.tables([row])[0].rows == [
        ["FedAvg", "30.00", "–", "20.00", "20", "5", "10", "1"]
    ]


def test_curve_has_means_and_extremes_over_seeds_at_common_rounds(tmp_path):
    paths = [
        write_run(tmp_path / "a", [0.4], settings(seed=0)),
        write_run(tmp_path / "b", [0.8], settings(seed=1), rounds=(5, 8, 10)),
    ]
    curve = comparison.curve(rows_of(*paths)[0], ACCURACY)
    assert curve.rounds == [5, 10]
    assert curve.score == pytest.approx([(0.2 + 0.4) / 2, 0.6])
    assert curve.lowest == pytest.approx([0.2, 0.4])
    assert curve.highest == pytest.approx([0.4, 0.8])
    assert curve.bytes_moved == [12_500_000, 25_000_000]
    assert curve.seconds == []


# Paired tests.


def test_paired_test_equals_scipy(pair):
    """The differences are 0.2, 0, 0.2 with seed 0 and 0.2, 0.1, -0.1 with seed 1."""
    difference = np.asarray([0.2, 0.05, 0.05])
    test = comparison.paired_test(pair[1], pair[0], "before")
    assert isinstance(test, comparison.PairedTest)
    assert (test.pairs, test.better) == (3, 3)
    assert test.p == wilcoxon(difference).pvalue
    means = [comparison.summary(row).before["mean"] for row in pair]
    assert test.difference == pytest.approx(difference.mean()) == means[1] - means[0]


def test_p_of_five_gains_is_exact(tmp_path):
    """All of five pairs gain by different amounts, so p = 2 / 2^5."""
    rows = compared(tmp_path, [0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.4, 0.6, 0.8, 1.0])
    assert comparison.paired_test(rows[1], rows[0], "before") == pytest.approx(
        (0.3, 2 / 32, 5, 5, 15)
    )
    assert comparison.paired_test(rows[0], rows[1], "before") == pytest.approx(
        (-0.3, 2 / 32, 5, 0, -15)
    )
    assert comparison.paired_test(rows[0], rows[0], "before") == (0.0, 1.0, 5, 0, 0)


def test_seeds_of_a_client_count_as_one_pair(tmp_path):
    """Five clients gain under two seeds, so p = 2 / 2^5 instead of 2 / 2^10."""
    gains = ([0.01, 0.02, 0.03, 0.04, 0.05], [0.06, 0.07, 0.08, 0.09, 0.1])
    paths = []
    for seed, gain in enumerate(gains):
        for algorithm, scores in (("fedavg", [0.2] * 5), ("local", [0.2 + g for g in gain])):
            config = settings(algorithm, seed=seed)
            paths.append(write_run(tmp_path / f"{algorithm}{seed}", scores, config))
    rows = rows_of(*paths)
    test = comparison.paired_test(rows[1], rows[0], "before")
    assert test == pytest.approx((0.055, 2 / 32, 5, 5, 15))
    text = " ".join(comparison_page.text(rows).split())
    assert "over clients, each with its mean over seeds" in text


def test_differences_equal_up_to_rounding_are_ties(tmp_path):
    """Differences of 0.1, 0.1, 0.1 and -0.1 have one rank."""
    rows = compared(tmp_path, [0.8, 0.2, 0.5, 0.2], [0.9, 0.3, 0.6, 0.1])
    p = comparison.paired_test(rows[1], rows[0], "before").p
    assert p == wilcoxon([1, 1, 1, -1]).pvalue
    assert p != wilcoxon([0.9 - 0.8, 0.3 - 0.2, 0.6 - 0.5, 0.1 - 0.2]).pvalue


def test_differences_of_tiny_scores_are_no_ties(tmp_path):
    tiny = [1e-14, 2e-14, 3e-14, 5e-14, 7e-14]
    rows = compared(tmp_path, tiny, [2e-14, 4e-14, 6e-14, 9e-14, 12e-14], score="squared_error")
    test = comparison.paired_test(rows[1], rows[0], "before")
    np.testing.assert_allclose(test.difference, 3e-14, rtol=1e-9)
    assert (test.p, test.better) == (0.0625, 0)  # five of five are worse: 2 / 2^5


def test_held_out_clients_are_paired_if_they_train_in_the_last_phase(tmp_path):
    phases = [{}, {"participants": "held_out"}]
    rows = compared(tmp_path, [0.5, 0.6], [0.5, 0.6], held_out=1, phases=phases)
    assert comparison.paired_test(rows[1], rows[0], "before") == (0.0, 1.0, 1, 0, 0)
    (run,) = rows[0].runs
    assert [row["client"] for row in run.participants] == [99]
    assert answer.draw(run, {}).alt.endswith("1 better, 0 worse, 0 equal.")
    figure = client_figures.draw(run.clients, ACCURACY, held_out=run.on_held_out).figure
    lines = {line.get_label(): line.get_ydata().tolist() for line in figure.axes[0].lines}
    assert (lines["before"], lines["before, not taking part"]) == ([0.0], [0.5, 0.6])


def test_clients_that_attack_in_either_run_are_not_paired(tmp_path):
    """Clients 0 and 1 attack in one run each; the others gain 0.1 and 0.2."""
    write_run(tmp_path / "a", [0.5, 0.6, 0.7, 0.6], settings())
    write_run(tmp_path / "b", [0.1, 0.1, 0.8, 0.8], settings("local"))
    for i, name in enumerate("ab"):
        head, *lines = (tmp_path / name / "clients.csv").read_text().splitlines()
        lines = [f"{line},{int(line.startswith(f'{i},'))}" for line in lines]
        (tmp_path / name / "clients.csv").write_text("\n".join([f"{head},attacker", *lines]) + "\n")
    rows = rows_of(tmp_path / "a", tmp_path / "b")
    test = comparison.paired_test(rows[1], rows[0], "before")
    assert test == pytest.approx((0.15, 2 / 2**2, 2, 2, 3))
    assert comparison.share_better_than_local(rows[0], rows) == 0
    picture = answer.draw(rows[1].runs[0], {"FedAvg": rows[0].runs[0]})
    # Their means are over other clients, so the picture compares this run with itself.
    assert picture.alt.endswith("by local training: 3 better, 0 worse, 0 equal.")
    assert "3 better, 0 worse" in answer.draw(rows[1].runs[0], {}).alt  # one attacks in this run


def test_own_partitions_are_not_paired_with_one_partition(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"own{seed}", [0.5], settings(seed=seed, partition_seed=seed))
        write_run(tmp_path / f"same{seed}", [0.5], settings("local", seed=seed))
    rows = rows_of(*sorted(tmp_path.iterdir()))
    assert [[run.seed for run in row.runs] for row in rows] == [[0, 1], [0, 1]]
    assert comparison.paired_test(rows[0], rows[1], "before") == "other clients"
    assert comparison.share_better_than_local(rows[0], rows) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 1}, "other seeds"),
        ({"partition_seed": 1}, "other clients"),
        ({"classes": {"per_client": 2}}, "other clients"),
        ({"permute_labels": True}, "other clients"),
        ({"finished": False}, "unfinished"),
        ({"scores": [0.5, 0.6, 0.7, 0.8]}, "other clients"),
        ({"after": False}, "scores missing"),
    ],
)
def test_reasons_why_rows_are_not_paired(tmp_path, changes, reason):
    options = {key: changes.pop(key) for key in ("finished", "after") if key in changes}
    scores = changes.pop("scores", [0.5, 0.6, 0.7])
    rows = rows_of(
        write_run(tmp_path / "a", [0.5, 0.6, 0.7], settings()),
        write_run(tmp_path / "b", scores, settings("local", **changes), **options),
    )
    assert comparison.paired_test(rows[1], rows[0], "after") == reason
    cells = comparison_page.tables(rows)[1].rows[0]
    assert cells[4] == ("–" if reason == "scores missing" else "not paired")


def test_extremes_name_the_clients_that_gain_most_and_least(tmp_path):
    """The differences to FedAvg are 0.2, -0.1 and 0."""
    rows = compared(tmp_path, [0.5, 0.6, 0.7], [0.7, 0.5, 0.7])
    assert comparison.extremes(rows[1], rows[0], "before") is None  # clients without names
    for path in tmp_path.glob("*/clients.csv"):
        lines = zip(
            path.read_text().split(), ["owner", "idle", "none", "Aix", "Bern", "7"], strict=True
        )
        path.write_text("\n".join(map(",".join, lines)) + "\n")
    rows = rows_of(tmp_path / "fedavg", tmp_path / "local")
    best, worst = comparison.extremes(rows[1], rows[0], "before")
    assert best == ("Aix", pytest.approx(0.2))
    assert worst == ("Bern", pytest.approx(-0.1))
    assert "Aix +20.00" in comparison_page.text(rows)
    assert "Clients</h2>" in comparison_page.write(rows, tmp_path / "out").read_text()


def test_share_better_than_local(pair):
    fedavg, local = pair
    assert comparison.share_better_than_local(fedavg, pair) == 0
    assert comparison.share_better_than_local(local, pair) is None
    assert comparison.share_better_than_local(fedavg, [fedavg]) is None
    swapped = [
        fedavg._replace(config={**fedavg.config, "algorithm": "local"}),
        local._replace(config={**local.config, "algorithm": "fedavg"}),
    ]
    assert comparison.share_better_than_local(swapped[1], swapped) == 1


# Unfinished runs and refused directories.


def test_an_unfinished_run_is_marked(tmp_path):
    (row,) = rows_of(write_run(tmp_path / "a", [0.5], settings(), finished=False))
    assert comparison_page.tables([row])[0].rows[0][0] == "FedAvg (unfinished, round 10)"
    assert "unfinished, round 10" in comparison_page.as_csv([row])


def test_a_run_that_a_callback_ended_is_marked_and_paired(tmp_path):
    rows = compared(tmp_path, [0.5, 0.6, 0.7], [0.7, 0.7, 0.7], rounds=50)
    first = comparison_page.tables(rows)[0].rows[0][0]
    assert first == "FedAvg (ended at round 10 of 50)"
    assert comparison.paired_test(rows[1], rows[0], "before").pairs == 3
    ended = write_run(tmp_path / "seed", [0.5], settings(rounds=50, seed=1), rounds=(5, 30))
    (row,) = rows_of(tmp_path / "fedavg", ended)
    text = "seed 0 ended at round 10 of 50, seed 1 ended at round 30 of 50"
    assert comparison.unfinished(row) == text


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    assert message(comparison.read, tmp_path / "none").endswith(
        "is not a run directory: it lacks config.json and metrics.jsonl"
    )
    assert "name one run directory" in message(run_here, "compare")
    run = write_run(tmp_path / "a", [0.5], settings())
    assert "same settings and seed 0" in message(rows_of, run, run)
    other_score = write_run(tmp_path / "b", [0.5], settings(seed=1), score="negative_loss")
    line = message(rows_of, run, other_score)
    assert f"{run} is scored by accuracy and {other_score} by negative_loss" in line
    (run / "metrics.jsonl").write_text("")
    assert "no evaluation" in message(comparison.read, run)


def test_run_directories_of_a_sweep(tmp_path):
    (tmp_path / "two" / "compare").mkdir(parents=True)  # as a sweep has it
    paths = [write_run(tmp_path / "two" / f"seed={i}", [0.5], settings(seed=i)) for i in range(2)]
    assert compare.run_directories(tmp_path / "two") == paths
    assert compare.run_directories(paths[0]) == paths[:1]
    no_run = tmp_path / "two" / "compare"
    assert compare.run_directories(no_run) == [no_run]  # reading it raises an error
