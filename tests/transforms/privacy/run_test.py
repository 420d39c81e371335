"""Tests of whole runs with privacy: the stated ε, and resuming."""

import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import checkpoints, runner
from fedjax_pfl.transforms.privacy.accounting import Sampling, epsilon
from tests.runs import common

CLIENT = {
    **common.BASE,
    # Random sampling requires that clients keep nothing.
    "algorithm": "fedavg",
    "keep_optimizer": False,
    "privacy": "client",
    "privacy_clip_norm": 0.5,
    "privacy_epsilon": 20.0,
    "privacy_quantile": 0.5,
}

BANDS = {
    **CLIENT,
    "algorithm": "fedper",
    "clients": 6,
    "sampling": "cyclic",
    "privacy_quantile": None,
    "privacy_bands": 3,
}


@pytest.mark.slow("three runs")
@pytest.mark.parametrize(
    ("config", "sampling"),
    [(CLIENT, Sampling(2, 3)), (BANDS, Sampling(2, 6, is_cyclic=True, bands=3))],
)
def test_epsilon_is_stated_before_the_run_and_at_every_evaluation(config, sampling, tmp_path):
    lines: list[str] = []
    result = runner.run_all(config, tmp_path / "run", tell=lines.append)[""]
    (stated,) = [line for line in lines if line.startswith("privacy: client level, epsilon = ")]
    noise = float(stated.rpartition(" ")[2])
    for line in result.metrics:
        expected = epsilon(sampling, noise, 1e-5, line["round"])
        assert line["epsilon"] == pytest.approx(expected, rel=1e-3)
        assert line["delta"] == 1e-5
    assert 19.9 < result.metrics[-1]["epsilon"] <= 20
    report = (tmp_path / "run" / "report.html").read_text()
    assert "ε = 20" in report
    with common.kill(checkpoints.Store, "save", common.at_step(3), after=True):
        runner.run(config, tmp_path / "stopped")
    resumed = runner.run(config, tmp_path / "stopped")
    assert resumed.resumed_at == 3
    common.assert_same_run(resumed, result)


def test_a_run_without_noise_states_no_guarantee():
    lines: list[str] = []
    changes = {"privacy": "local", "privacy_clip_norm": 1.0, "privacy_noise": 0.0}
    config = {**common.BASE, **changes, "rounds": 2}
    result = runner.run_all(config, tell=lines.append)[""]
    assert any("so there is no guarantee" in line for line in lines)
    assert result.metrics[-1]["epsilon"] is None


def test_noise_that_is_too_small_for_the_accounting_is_refused():
    config = {**common.BASE, "privacy": "local", "privacy_clip_norm": 1.0, "privacy_noise": 1e-200}
    with pytest.raises(UsageError, match="privacy_noise is 1e-200; use 0, or at least 1e-09"):
        runner.run(config)
