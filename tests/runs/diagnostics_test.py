"""Tests of diagnostics in the metrics, remarks and report of a run."""

import html

import numpy as np
import pytest

import fedjax_pfl
from fedjax_pfl.core import diagnostics
from fedjax_pfl.report import page
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


def test_diagnostics_are_written_and_reported(run):
    assert read_metrics(run.directory) == run.metrics
    assert run.metrics[-1]["inactive"] == ["one_hot"]
    (remark,) = run.metrics[-1]["remarks"]
    report = (run.directory / "report.html").read_text()
    assert html.escape(remark) in report
    assert "<h2>Method</h2>" in report
    assert (run.directory / "figures" / "diagnostics.png").is_file()


def test_methods_without_diagnostics():
    settings = {"dataset": "synthetic", "model": "mlp", "clients": 2, "rounds": 1}
    (line,) = fedjax_pfl.run({**settings, "algorithm": "local"}).metrics
    assert not {"diagnostics", "inactive", "remarks"} & set(line)
