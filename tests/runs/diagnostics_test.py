"""Tests of diagnostics in the metrics, remarks and report of a run."""

import html

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import fedjax_pfl
from fedjax_pfl.core import diagnostics
from fedjax_pfl.report import page
from fedjax_pfl.report.run_reader import OWN_FIGURES
from fedjax_pfl.runs import run_directory
from fedjax_pfl.runs.run_state import SweepRun, append_evaluation
from tests.runs.common import read_metrics

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")


@pytest.fixture(scope="module")
def run(tmp_path_factory, write_page):
    """A run with a learning rate at which α is one-hot from the first round."""
    settings = {
        "algorithm": "pfedla",
        "pfedla": {"rate": 1e6},
        "dataset": "synthetic",
        "model": "mlp",
        "clients": 3,
        "rounds": 5,
        "eval_every": 1,
        "evaluate_after": False,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "write", write_page)
        return fedjax_pfl.run(settings, tmp_path_factory.mktemp("run") / "one")


def test_metrics_contain_diagnostics_of_the_recorded_arrays(run):
    rounds, alphas = run.observations["alpha"]
    assert [line["round"] for line in run.metrics] == rounds
    for n, line in enumerate(run.metrics):
        peers = diagnostics.effective_number(alphas[n]).mean(0)
        np.testing.assert_allclose(list(line["diagnostics"]["peers"].values()), peers)
        assert list(line["diagnostics"]["peers"]) == list(run.ledger.down)
        assert line["diagnostics"]["one_hot"] == diagnostics.one_hot_fraction(alphas[n])
        if n:
            moved = diagnostics.moving_fraction(alphas[n], alphas[n - 1])
            assert line["diagnostics"]["moving"] == moved
    assert "moving" not in run.metrics[0]["diagnostics"]


def test_only_arrays_with_a_number_per_client_are_columns():
    def weighted(model, training, federation):
        arrays = {"client_weights": jnp.zeros((3, 2)), "client_age": jnp.arange(3)}
        method = fedjax_pfl.fedavg(model, training, federation)
        return method._replace(observe=lambda state: arrays | {"client_any": jnp.zeros(())})

    settings = {"dataset": "synthetic", "model": "mlp", "clients": 3, "rounds": 1}
    result = fedjax_pfl.run(settings, algorithm=weighted)
    assert [row["age"] for row in result.clients] == [0.0, 1.0, 2.0]
    assert not {"weights", "any"} & set(result.clients[0])
    assert result.observations["client_weights"][1][0].shape == (3, 2)


def test_diagnostics_are_written_and_reported(run):
    assert read_metrics(run.directory) == run.metrics
    assert run.metrics[-1]["inactive"] == ["one_hot"]
    (remark,) = run.metrics[-1]["remarks"]
    report = (run.directory / "report.html").read_text()
    assert html.escape(remark) in report
    assert "<h2>Method</h2>" in report
    figures = {path.stem for path in (run.directory / "figures").iterdir()}
    assert "diagnostics" in figures
    assert figures - {*run.observations} <= OWN_FIGURES


def test_methods_without_diagnostics():
    settings = {"dataset": "synthetic", "model": "mlp", "clients": 2, "rounds": 1}
    (line,) = fedjax_pfl.run({**settings, "algorithm": "local"}).metrics
    assert not {"diagnostics", "inactive", "remarks"} & set(line)


@pytest.mark.parametrize(
    ("second", "shape", "rounds"),
    [("pfedla", (3, 2, 3), [3, 4]), ("ifca", (3,), [3, 4]), ("apfl", (3,), [1, 2, 3, 4])],
)
def test_arrays_of_another_method_do_not_continue_those_of_an_earlier_phase(
    second, shape, rounds, tmp_path
):
    config = {"algorithm": "apfl", "phases": [{"rounds": 2}, {"algorithm": second, "rounds": 2}]}
    (tmp_path / "config.json").write_text("{}")
    run = SweepRun("", ConfigDict(), config, tmp_path)
    for t in range(1, 5):
        phase = int(t > 2)
        line = {"round": t, "phase": phase}
        run.at = run.at._replace(round=t, phase=phase, metrics=(*run.at.metrics, line))
        alpha = np.full(shape if phase else (3,), t)
        append_evaluation(run, {"alpha": alpha, f"only{phase}": np.float32(t)}, line)
    saved = run_directory.read_observations(tmp_path, 4)
    expected = {"alpha": rounds, "only0": [1, 2], "only1": [3, 4]}
    assert {name: rounds for name, (rounds, _) in saved.items()} == expected
    assert [array.max() for array in saved["alpha"][1]] == rounds
