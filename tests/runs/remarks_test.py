"""What is allowed and may cost accuracy is said: BatchNorm and very short batches."""

import numpy as np
import pytest

from fedjax_pfl.runs import build, runner
from fedjax_pfl.settings import configuration
from tests.runs.common import other_lines

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")

# 120 examples, of which five clients train on 17 or so each.
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


def left_over(batch_size, **changes):
    """How many of the clients that train end an epoch with one or two examples, one by one."""
    federation = built(**changes).federation
    counts = federation.counts[federation.active]
    return [c for c in counts.tolist() if c > batch_size and c % batch_size in (1, 2)]


def test_a_remark_counts_the_clients_that_it_is_true_of():
    counts = built().federation.counts
    assert counts.tolist() == [17] * 5  # one of them does not train
    for size, hurt in ((16, 4), (15, 4), (14, 0), (17, 0), (18, 0), (8, 4), (5, 4)):
        remarks = built(batch_size=size).remarks
        assert len(left_over(size)) == hurt
        assert len(remarks) == (hurt > 0)
        assert all(f"an epoch of {hurt} of 4 clients ends with" in line for line in remarks)


def test_clients_of_different_sizes_are_counted_one_by_one():
    uneven = {"partition": "dirichlet", "dirichlet": {"alpha": 1.0}, "partition_seed": 0}
    hurt = len(left_over(4, **uneven))
    assert 0 < hurt < 4
    assert f"of {hurt} of 4 clients" in built(batch_size=4, **uneven).remarks[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"drop_last": True},
        {"local_steps": 3, "local_epochs": None},
        {"lenet": {"kernels": (2,), "dense": (4,)}},  # without BatchNorm
    ],
)
def test_no_remark_where_it_does_no_harm(changes):
    assert built(batch_size=16).remarks
    assert built(batch_size=16, **changes).remarks == ()


def test_an_only_batch_is_nobodys_last():
    """drop_last would not leave it out."""
    few = {"synthetic": {"shape": (12, 12, 1), "examples": 15, "test_examples": 0}}
    assert built(**few).federation.counts.tolist() == [2] * 5
    assert built(batch_size=16, **few).remarks == ()


def test_two_phases_make_one_remark():
    same = {"batch_size": 16, "phases": ({}, {"rounds": 1})}
    assert len(built(**same).remarks) == 1
    assert len(built(batch_size=32, phases=({}, {"batch_size": 15})).remarks) == 1


def test_a_run_says_it_once_and_leaves_the_batch_out(capsys):
    def run(**changes):
        return runner.run(configuration.complete({**BASE, "batch_size": 16} | changes))

    kept = run().metrics[-1]["train_loss"]
    assert capsys.readouterr().err.count("drop_last leaves it out") == 1
    dropped = run(drop_last=True).metrics[-1]["train_loss"]
    assert other_lines(capsys.readouterr().err) == []
    assert np.isfinite([kept, dropped]).all()
    assert kept != dropped
