"""Tests of rows, labels, means over seeds and paired tests on synthetic run directories."""

import csv
import json

import numpy as np
import pytest
from scipy.stats import wilcoxon

from fedjax_pfl.cli import compare
from fedjax_pfl.report import comparison, comparison_page
from fedjax_pfl.report import page as report
from fedjax_pfl.settings import configuration
from tests.commands import message, run_here

SCORES = {"fedavg": [[0.5, 0.6, 0.7], [0.4, 0.8, 0.9]], "local": [[0.7, 0.6, 0.9], [0.6, 0.9, 0.8]]}


def settings(algorithm="fedavg", **changes):
    """Returns a resolved configuration as a run directory stores it."""
    config = configuration.complete({"algorithm": algorithm, "clients": 3, **changes})
    return json.loads(json.dumps(configuration.resolve(config)))


def made(path, scores, config, finished=True, score="accuracy", rounds=(5, 10), after=True):
    """Writes a run directory; local training improves every client by 0.05."""
    path.mkdir()
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


def add_owners(path, names):
    """Adds owners to the rows of clients.csv and returns the path."""
    lines = (path / "clients.csv").read_text().splitlines()
    rows = [f"{line},{name}" for line, name in zip(lines, ["owner", *names], strict=True)]
    (path / "clients.csv").write_text("\n".join(rows) + "\n")
    return path


def rows_of(*paths):
    return comparison.group([comparison.read(path) for path in paths])


@pytest.fixture
def pair(tmp_path):
    """Returns rows of FedAvg and Local with two seeds each, from a mixed order."""
    order = [("fedavg", 1), ("local", 0), ("fedavg", 0), ("local", 1)]
    return rows_of(
        *(made(tmp_path / f"{a}{s}", SCORES[a][s], settings(a, seed=s)) for a, s in order)
    )


# Rows and labels.


def test_runs_that_differ_in_seed_and_resumable_settings_are_one_row(tmp_path):
    neutral = {"data_dir": "elsewhere", "chunk": 3, "devices": 2, "checkpoint_every": 7}
    for seed, changes in enumerate([{}, neutral]):
        made(tmp_path / f"{seed}", [0.5], settings(seed=seed, **changes))
    made(tmp_path / "2", [0.5], settings(seed=2, partition_seed=1))
    rows = rows_of(*(tmp_path / name for name in "102"))
    assert [[run.seed for run in row.runs] for row in rows] == [[0, 1], [2]]
    assert [row.label for row in rows] == ["partition_seed=0", "partition_seed=1"]
    assert [row.label for row in rows_of(tmp_path / "0")] == ["FedAvg"]


def test_settings_that_an_old_run_lacks_are_at_their_defaults(tmp_path):
    old = settings("pfedme", seed=1)
    del old["keep_head"], old["pfedme"]["beta"]
    paths = [
        made(tmp_path / "old", [0.5], old),
        made(tmp_path / "new", [0.5], settings("pfedme")),
        made(tmp_path / "other", [0.5], settings("pfedme", pfedme={"beta": 2.0})),
    ]
    rows = rows_of(*paths)
    assert [len(row.runs) for row in rows] == [2, 1]
    assert [row.label for row in rows] == ["pfedme.beta=1.0", "pfedme.beta=2.0"]


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
            [settings(model="mlp", momentum=0.9), settings("local", model="small", momentum=0.9)],
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
    (row,) = rows_of(made(tmp_path / "a", [0.2, 0.4], settings(), after=False))
    summary = comparison.summary(row)
    assert summary.before == pytest.approx({"mean": 0.3, "std": None, "seeds": 1})
    assert summary.after is None
    assert comparison_page.tables([row])[0].rows == [
        ["FedAvg", "30.00", "–", "20.00", "20", "5", "10", "1"]
    ]


def test_curve_has_means_over_seeds_at_common_rounds(tmp_path):
    paths = [
        made(tmp_path / "a", [0.4], settings(seed=0)),
        made(tmp_path / "b", [0.8], settings(seed=1), rounds=(5, 8, 10)),
    ]
    curve = comparison.curve(rows_of(*paths)[0])
    assert curve.rounds == [5, 10]
    assert curve.score == pytest.approx([(0.2 + 0.4) / 2, 0.6])
    assert curve.bytes_moved == [12_500_000, 25_000_000]


# Paired tests.


def with_digest(path, algorithm, digest):
    """Writes a run directory with the given digest of its examples, or without one."""
    made(path, [0.5, 0.6], settings(algorithm, dataset="csv:t.csv"))
    if digest is not None:
        (path / "data.json").write_text(json.dumps({"digest": digest}))
    return path


@pytest.mark.parametrize("digests", [("a", "b"), ("a", None)])
def test_runs_on_other_examples_of_one_file_are_not_paired(tmp_path, digests):
    paths = [tmp_path / name for name in ("fedavg", "local")]
    for path, digest in zip(paths, digests, strict=True):
        with_digest(path, path.name, digest)
    rows = rows_of(*paths)
    assert comparison.paired_test(rows[1], rows[0], "before") == "other examples"
    assert "other examples" in comparison_page.text(rows)


def test_runs_are_paired_only_if_their_examples_are_known_and_equal(tmp_path):
    same = rows_of(*(with_digest(tmp_path / name, name, "a") for name in ("fedavg", "local")))
    assert comparison.paired_test(same[1], same[0], "before") == (0.0, 1.0, 2, 0)
    unknown = rows_of(*(with_digest(tmp_path / f"{n}-lost", n, None) for n in ("fedavg", "local")))
    assert comparison.paired_test(unknown[1], unknown[0], "before") == "examples unknown"


def test_equal_settings_on_other_examples_are_two_rows(tmp_path):
    rows = rows_of(*(with_digest(tmp_path / digest, "fedavg", digest) for digest in "ab"))
    assert [row.label for row in rows] == ["examples=a", "examples=b"]


@pytest.mark.parametrize("stage", ["before", "after"])
def test_paired_test_equals_scipy(pair, stage):
    """The differences are 0.2, 0, 0.2 with seed 0 and 0.2, 0.1, -0.1 with seed 1."""
    difference = np.asarray([0.2, 0.05, 0.05])
    test = comparison.paired_test(pair[1], pair[0], stage)
    assert isinstance(test, comparison.PairedTest)
    assert (test.pairs, test.better) == (3, 3)
    assert test.difference == pytest.approx(difference.mean())
    assert test.p == wilcoxon(difference).pvalue
    means = [comparison.summary(row).before["mean"] for row in pair]
    assert test.difference == pytest.approx(means[1] - means[0])


def test_p_of_five_gains_is_exact(tmp_path):
    """All of five pairs gain by different amounts, so p = 2 / 2^5."""
    low, high = [0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.4, 0.6, 0.8, 1.0]
    rows = rows_of(
        made(tmp_path / "a", low, settings()), made(tmp_path / "b", high, settings("local"))
    )
    assert comparison.paired_test(rows[1], rows[0], "before") == pytest.approx((0.3, 2 / 32, 5, 5))
    assert comparison.paired_test(rows[0], rows[1], "before") == pytest.approx((-0.3, 2 / 32, 5, 0))
    assert comparison.paired_test(rows[0], rows[0], "before") == (0.0, 1.0, 5, 0)


def test_seeds_of_a_client_count_as_one_pair(tmp_path):
    """Five clients gain under two seeds, so p = 2 / 2^5 instead of 2 / 2^10."""
    gains = {0: [0.01, 0.02, 0.03, 0.04, 0.05], 1: [0.06, 0.07, 0.08, 0.09, 0.1]}
    paths = [made(tmp_path / f"old{seed}", [0.2] * 5, settings(seed=seed)) for seed in gains]
    for seed, gain in gains.items():
        better = [0.2 + g for g in gain]
        paths.append(made(tmp_path / f"new{seed}", better, settings("local", seed=seed)))
    rows = rows_of(*paths)
    assert comparison.paired_test(rows[1], rows[0], "before") == pytest.approx(
        (0.055, 2 / 32, 5, 5)
    )
    assert "over clients, each with its mean over seeds" in " ".join(
        comparison_page.text(rows).split()
    )


def test_differences_equal_up_to_rounding_are_ties(tmp_path):
    """Differences of 0.1, 0.1, 0.1 and -0.1 have one rank."""
    rows = rows_of(
        made(tmp_path / "a", [0.8, 0.2, 0.5, 0.2], settings()),
        made(tmp_path / "b", [0.9, 0.3, 0.6, 0.1], settings("local")),
    )
    p = comparison.paired_test(rows[1], rows[0], "before").p
    assert p == wilcoxon([1, 1, 1, -1]).pvalue
    assert p != wilcoxon([0.9 - 0.8, 0.3 - 0.2, 0.6 - 0.5, 0.1 - 0.2]).pvalue


def test_held_out_clients_are_paired_if_they_train_in_the_last_phase(tmp_path):
    held_out = {"held_out": 1, "phases": [{}, {"participants": "held_out"}]}
    rows = rows_of(
        *(made(tmp_path / a, [0.5, 0.6], settings(a, **held_out)) for a in ("fedavg", "local"))
    )
    assert comparison.paired_test(rows[1], rows[0], "before") == (0.0, 1.0, 1, 0)


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
        made(tmp_path / "a", [0.5, 0.6, 0.7], settings()),
        made(tmp_path / "b", scores, settings("local", **changes), **options),
    )
    assert comparison.paired_test(rows[1], rows[0], "after") == reason
    cells = comparison_page.tables(rows)[1].rows[0]
    assert cells[4] == ("–" if reason == "scores missing" else "not paired")


# Unfinished and damaged runs.


def test_an_unfinished_run_is_marked(tmp_path):
    path = made(tmp_path / "a", [0.5], settings(), finished=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 15, "bef')  # being written
    (row,) = rows_of(path)
    assert comparison_page.tables([row])[0].rows[0][0] == "FedAvg (unfinished, round 10)"
    assert "unfinished, round 10" in comparison_page.as_csv([row])
    (path / "report.html").touch()
    assert "damaged" in message(comparison.read, path)


def test_directories_without_a_run_are_refused(tmp_path):
    assert message(comparison.read, tmp_path / "none").endswith(
        "is not a run directory: it lacks config.json and metrics.jsonl"
    )
    path = made(tmp_path / "a", [0.5], settings())
    (path / "metrics.jsonl").write_text("")
    assert "no evaluation" in message(comparison.read, path)
    (path / "config.json").write_text("[1")
    assert "damaged" in message(comparison.read, path)


def test_runs_with_other_metrics_are_refused(tmp_path):
    paths = [
        made(tmp_path / "a", [0.5], settings()),
        made(tmp_path / "b", [0.5], settings(seed=1), score="negative_loss"),
    ]
    line = message(rows_of, *paths)
    assert f"{paths[0]} is scored by accuracy and {paths[1]} by negative_loss" in line


def test_run_directories_of_a_sweep(tmp_path):
    (tmp_path / "two" / "compare").mkdir(parents=True)  # as a sweep has it
    paths = [made(tmp_path / "two" / f"seed={i}", [0.5], settings(seed=i)) for i in range(2)]
    assert compare.run_directories(tmp_path / "two") == paths
    assert compare.run_directories(paths[0]) == paths[:1]
    no_run = tmp_path / "two" / "compare"
    assert compare.run_directories(no_run) == [no_run]  # reading it raises an error


def test_a_repeated_run_is_refused(tmp_path):
    path = made(tmp_path / "a", [0.5], settings())
    assert "same settings and seed 0" in message(rows_of, path, path)


def test_command_without_arguments_is_refused():
    assert "name one run directory" in message(run_here, "compare")


def test_flatten_settings():
    assert dict(report.flatten({"a": {"b": (1, 2)}, "c": True})) == {"c": "true", "a.b": "[1, 2]"}


def test_extremes_name_the_clients_that_gain_most_and_least(tmp_path):
    """The differences to FedAvg are 0.2, -0.1 and 0."""
    paths = [
        add_owners(made(tmp_path / a, scores, settings(a)), ["idle", "none", "Aix", "Bern", "7"])
        for a, scores in (("fedavg", [0.5, 0.6, 0.7]), ("local", [0.7, 0.5, 0.7]))
    ]
    first, row = rows_of(*paths)
    best, worst = comparison.extremes(row, first, "before")
    assert best == ("Aix", pytest.approx(0.2))
    assert worst == ("Bern", pytest.approx(-0.1))
    assert "Aix +20.00" in comparison_page.text([first, row])
    assert "Clients</h2>" in comparison_page.write([first, row], tmp_path / "out").read_text()
    (tmp_path / "unnamed").mkdir()
    unnamed = rows_of(
        *(made(tmp_path / "unnamed" / a, [0.5], settings(a)) for a in ("local", "fedavg"))
    )
    assert comparison.extremes(unnamed[1], unnamed[0], "before") is None


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


def test_differences_of_tiny_scores_are_no_ties(tmp_path):
    tiny = [1e-14, 2e-14, 3e-14, 5e-14, 7e-14]
    larger = [2e-14, 4e-14, 6e-14, 9e-14, 12e-14]
    paths = [
        made(tmp_path / name, scores, settings(name), score="mse")
        for name, scores in (("fedavg", tiny), ("local", larger))
    ]
    first, second = rows_of(*paths)
    test = comparison.paired_test(second, first, "before")
    np.testing.assert_allclose(test.difference, 3e-14, rtol=1e-9)
    assert test.p == 0.0625  # five of five are worse: 2 / 2^5


def test_labels_differ_by_a_setting_of_another_version(tmp_path):
    old = {**settings(), "gone": 3}
    rows = rows_of(made(tmp_path / "a", [0.5], old), made(tmp_path / "b", [0.6], settings()))
    assert [row.label for row in rows] == ["gone=3", "FedAvg"]
