"""Tests of the differences between a run and its reference runs, and of the answer."""

import html
import re
from pathlib import Path

import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import answer, references, run_reader
from fedjax_pfl.report.numbers import metric_of
from fedjax_pfl.runs import reference_runs
from fedjax_pfl.settings import configuration
from tests.report.comparison_test import settings, write_run


def read_run(folder, name, scores, **changes):
    """Writes a run and reads it."""
    return run_reader.read(write_run(folder / name, scores, settings(clients=4, **changes)))


def test_runs_that_score_other_clients_are_not_comparable(tmp_path):
    run = read_run(tmp_path, "run", [0.5] * 4, algorithm="fedper")
    three_clients = read_run(tmp_path, "three clients", [0.5] * 3)
    assert references.training_differences(run, three_clients) == ["the clients that are scored"]
    without_rows = three_clients._replace(clients=[])
    assert references.training_differences(run, without_rows) == []
    sampled = read_run(tmp_path, "sampled", [0.5] * 3, evaluate_clients=3)
    assert references.training_differences(run, sampled) == ["evaluate_clients"]
    assert references.comparable(run, {"FedAvg": sampled, "Local": three_clients}) == {}
    assert "also differ in the clients that are scored" in references.settings_note(
        run, three_clients
    )


def test_runs_with_and_without_attackers_are_not_comparable(tmp_path):
    run = read_run(tmp_path, "run", [0.5] * 4, attack="sign_flip", attack_share=0.3)
    honest = read_run(tmp_path, "honest", [0.5] * 4)
    assert references.training_differences(run, honest) == ["attack", "attack_share"]


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([0.01 + 0.001 * i for i in range(20)], "Yes. "),
        ([-0.01 - 0.001 * i for i in range(20)], "No. "),
        ([-0.01 - 0.0001 * i for i in range(18)] + [0.8, 0.8], "Not clearly. "),
        ([0.01 + 0.0001 * i for i in range(18)] + [-0.4, -0.4], "Not clearly. "),
    ],
)
def test_the_answer_needs_ranks_and_mean_to_agree(tmp_path, gains, verdict):
    """A few large gains make the mean positive although most clients lose a little."""
    reference = read_run(tmp_path, "fedavg", [0.45] * 20)
    run = read_run(tmp_path, "run", [0.45 + gain for gain in gains], algorithm="fedper")
    text = html.unescape(answer.section(run, {"FedAvg": reference}, None))
    assert f"<p>{verdict}As served it is" in text
    assert float(re.search(r"p = ([\d.e-]+)\)", text).group(1)) < 0.05


def test_a_run_of_two_methods_is_compared_with_both(tmp_path):
    two = {"algorithm": "fedavg", "phases": ({}, {"algorithm": "local"}), "reference": True}
    for name, changes, missing in (
        ("two", two, ["fedavg", "local"]),
        ("one", {"algorithm": "fedavg", "reference": True}, ["local"]),
    ):
        config = configuration.complete(changes)
        resolved = run_reader.as_json(configuration.resolve(config))
        run = run_reader.Run(directory=Path(name), config=resolved, metrics=[])
        runs = reference_runs.missing_runs(run, config, configuration.BUILTINS)
        assert [path.name for path in runs] == missing
    read_run(tmp_path, "fedavg", [0.5] * 4)
    run = read_run(tmp_path, "run", [0.5] * 4, phases=({}, {"algorithm": "local"}))
    assert list(references.find(run)) == ["FedAvg"]
    assert "Did it help?" in answer.section(run, references.find(run), None)


def test_a_run_without_the_metric_is_no_reference(tmp_path):
    """Its accuracy would be drawn as if it was an F1 score."""
    changes = {"algorithm": "fedper", "metrics": "macro_f1"}
    config = settings(clients=4, **changes)
    run = run_reader.read(write_run(tmp_path / "run", [0.5] * 4, config, score="macro_f1"))
    accuracy = read_run(tmp_path, "fedavg", [0.5] * 4)
    assert references.find(run) == references.same_work(run, [accuracy]) == {}
    with pytest.raises(UsageError, match="cannot be compared with this run: it has no macro_f1"):
        references.check_metric("macro_f1", [accuracy])
    path = write_run(tmp_path / "f1", [0.5] * 4, settings(clients=4), score="macro_f1")
    assert references.find(run)["FedAvg"].directory == path
    references.check_metric("macro_f1", [run_reader.read(path)])


def test_a_run_with_transforms_is_no_reference(tmp_path):
    """FedPer would be compared with FedAvg of two bits, and FedAvg would not be trained."""
    run = read_run(tmp_path, "run", [0.5] * 4, algorithm="fedper", keep_head=False)
    coarse = read_run(tmp_path, "coarse", [0.2] * 4, upload_bits=2)
    assert references.find(run) == {}
    plain = read_run(tmp_path, "plain", [0.6] * 4)
    assert references.find(run) == {"FedAvg": plain}
    assert references.same_work(run, [coarse]) == {"FedAvg": coarse}  # the user names it


def test_named_runs_of_one_method_have_labels_of_their_own(tmp_path):
    run = read_run(tmp_path, "run", [0.5] * 4, algorithm="fedper")
    slow, fast = (
        read_run(tmp_path, n, [0.5] * 4, learning_rate=r) for n, r in (("a", 1), ("b", 2))
    )
    local = read_run(tmp_path, "c", [0.5] * 4, algorithm="local")
    assert references.same_work(run, [slow, fast, local]) == {
        "FedAvg, a": slow, "FedAvg, b": fast, "Local": local,
    }  # fmt: skip
    other = read_run(tmp_path / "other", "a", [0.5] * 4)
    labels = list(references.same_work(run, [slow, other]))
    assert labels == [str(tmp_path / "a"), str(tmp_path / "other" / "a")]


def test_reference_runs_keep_the_attack():
    """Scores of all clients, attackers among them, would be other means."""
    config = configuration.complete(
        {"algorithm": "fedprox", "attack": "label_flip", "robust_rule": "median", "reference": True}
    )
    run = run_reader.Run(
        directory=Path("run"),
        config=run_reader.as_json(configuration.resolve(config)),
        metrics=[],
    )
    for reference in reference_runs.missing_runs(run, config, configuration.BUILTINS).values():
        assert (reference.attack, reference.robust_rule) == ("label_flip", "mean")


def test_a_reference_run_is_paired_by_the_metric_of_the_run(tmp_path):
    """The first metric of FedAvg's run is the F1 score; its second, the accuracy, is equal."""
    run = read_run(tmp_path, "run", [0.5, 0.7, 0.9], algorithm="fedper")
    read_run(tmp_path, "fedavg", [0.5, 0.7, 0.9])
    lines = (tmp_path / "fedavg" / "metrics.jsonl").read_text()
    (tmp_path / "fedavg" / "metrics.jsonl").write_text(
        lines.replace('"accuracy_mean"', '"macro_f1_mean": 0.1, "accuracy_mean"')
    )
    head, *rows = (tmp_path / "fedavg" / "clients.csv").read_text().splitlines()
    rows = [f"{head},before_macro_f1", *(f"{row},0.1" for row in rows)]
    (tmp_path / "fedavg" / "clients.csv").write_text("\n".join(rows) + "\n")
    reference = run_reader.read(tmp_path / "fedavg")
    assert metric_of(reference.metrics).name == "macro_f1"
    sentence = references.stage_sentence(run, "FedAvg", reference, "before", "It")
    assert sentence.endswith("better for 0 of 3 clients, p = 1.0000).")


def test_late_updates_of_local_may_differ(tmp_path):
    """Local cannot use partial work, so `reference` trains it with late=missing."""
    partial = read_run(tmp_path, "run", [0.5] * 4, algorithm="fedprox", late="partial")
    local = read_run(tmp_path, "local", [0.5] * 4, algorithm="local", late="missing")
    fedavg = read_run(tmp_path, "fedavg", [0.5] * 4, late="missing")
    assert references.comparable(partial, {"Local": local, "FedAvg": fedavg}) == {"Local": local}
    assert references.training_differences(local, partial) == []
