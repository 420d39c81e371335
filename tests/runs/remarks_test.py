"""Tests of remarks on settings that may cost accuracy: BatchNorm with very short batches."""

import numpy as np
import pytest

from fedjax_pfl.runs import build, runner
from fedjax_pfl.settings import configuration
from tests.runs.common import other_lines

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

# Four of five clients train, on 17 of 120 examples each.
BASE = {
    "algorithm": "fedavg",
    "model": "lenet",
    "dataset": "synthetic",
    "partition": "iid",
    "lenet": {"kernels": (2,), "dense": (4,), "batch_norm": True},
    "clients": 5,
    "rounds": 1,
    "synthetic": {"shape": (12, 12, 1), "examples": 120, "test_examples": 0},
    "held_out": 1,
}


def built(**changes):
    return build.build(configuration.complete({**BASE, **changes}))


@pytest.mark.parametrize(("batch_size", "affected"), [(16, 4), (15, 4), (14, 0), (17, 0), (8, 4)])
def test_a_remark_counts_clients_with_a_short_last_batch(batch_size, affected):
    experiment = built(batch_size=batch_size)
    assert experiment.federation.counts.tolist() == [17] * 5
    assert len(experiment.remarks) == (affected > 0)
    for line in experiment.remarks:
        assert f"an epoch of {affected} of 4 clients ends with" in line


def test_a_remark_counts_clients_of_different_sizes():
    uneven = {"partition": "dirichlet", "dirichlet": {"alpha": 1.0}, "partition_seed": 0}
    experiment = built(batch_size=4, **uneven)
    counts = experiment.federation.counts[experiment.federation.active]
    affected = sum(count > 4 and count % 4 in (1, 2) for count in counts.tolist())
    assert 0 < affected < 4
    assert f"of {affected} of 4 clients" in experiment.remarks[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"drop_last": True},
        {"local_steps": 3, "local_epochs": None},
        {"lenet": {"kernels": (2,), "dense": (4,)}},  # without BatchNorm
        # A single batch, which drop_last would keep.
        {"synthetic": {"shape": (12, 12, 1), "examples": 15, "test_examples": 0}},
    ],
)
def test_no_remark_on_harmless_settings(changes):
    assert built(batch_size=16, **changes).remarks == ()


def test_a_remark_on_validation_without_examples():
    (line,) = built(batch_size=17, validate_after=True).remarks
    assert "validate_after has no effect without validation examples" in line
    assert built(batch_size=17, validate_after=True, validation_fraction=0.2).remarks == ()


def test_two_phases_give_one_remark():
    assert len(built(batch_size=16, phases=({}, {"rounds": 1})).remarks) == 1
    assert len(built(batch_size=32, phases=({}, {"batch_size": 15})).remarks) == 1


def test_a_run_prints_its_remark_once_and_drop_last_avoids_it(capsys):
    def loss(**changes):
        settings = {**BASE, "batch_size": 16, **changes}
        return runner.run(configuration.complete(settings)).metrics[-1]["train_loss"]

    with_short_batch = loss()
    assert capsys.readouterr().err.count("drop_last leaves it out") == 1
    without = loss(drop_last=True)
    assert other_lines(capsys.readouterr().err) == []
    assert np.isfinite([with_short_batch, without]).all()
    assert with_short_batch != without
