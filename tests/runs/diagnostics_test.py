"""Diagnostics on their way from a run's evaluations to its lines, its remarks and its report."""

import html
import json

import numpy as np
import pytest

import fedjax_pfl
from fedjax_pfl.core import diagnostics
from fedjax_pfl.report import page

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")


@pytest.fixture(scope="module")
def run(tmp_path_factory, write_page):
    """A rate at which α is one-hot from the first round on; and what was said."""
    given = {
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
        return fedjax_pfl.run(given, tmp_path_factory.mktemp("run") / "one")


def test_each_line_has_the_signs_of_what_was_observed(run):
    rounds, alphas = run.observations["alpha"]
    assert [line["round"] for line in run.metrics] == rounds
    for n, line in enumerate(run.metrics):
        peers = diagnostics.effective_number(alphas[n]).mean(0)
        np.testing.assert_allclose(list(line["observed"]["peers"].values()), peers)
        assert list(line["observed"]["peers"]) == list(run.ledger.down)
        assert line["observed"]["one_hot"] == diagnostics.one_hot_fraction(alphas[n])
        if n:
            moved = diagnostics.moving_fraction(alphas[n], alphas[n - 1])
            assert line["observed"]["moving"] == moved
    assert "moving" not in run.metrics[0]["observed"]


def test_what_is_written_and_shown(run):
    written = (run.directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["observed"] for line in written] == [
        line["observed"] for line in run.metrics
    ]
    assert run.metrics[-1]["dead"] == ["one_hot"]
    (remark,) = run.metrics[-1]["remarks"]
    report = (run.directory / "report.html").read_text()
    assert html.escape(remark) in report
    assert "What was learned" in report
    assert (run.directory / "figures" / "diagnostics.png").is_file()


def test_a_method_without_signs_has_lines_without_them():
    given = {"dataset": "synthetic", "model": "mlp", "clients": 2, "rounds": 1}
    (line,) = fedjax_pfl.run({**given, "algorithm": "local"}).metrics
    assert not {"observed", "dead", "remarks"} & set(line)
