"""The log of a round in the training loop, from the compiled logs of two groups, by hand."""

import numpy as np

from fedjax_pfl.simulation.records import Log
from fedjax_pfl.simulation.simulation import round_log

NONE, LOSSES = [False] * 3, [9.0] * 3  # of the first of two rounds


def group_log(ids, present, dropped, rejected, metrics, bytes_down, bytes_up):
    """Returns the log of two rounds of three slots; the arguments are of the second."""
    flags = [np.array([NONE, flag], bool) for flag in (present, dropped, rejected)]
    traffic = [
        {layer: np.array([[7] * 3, counts], np.int32) for layer, counts in layers.items()}
        for layers in (bytes_down, bytes_up)
    ]
    metrics = {name: np.array([LOSSES, values]) for name, values in metrics.items()}
    return Log(np.array([[0] * 3, ids], np.int32), *flags, metrics, *traffic)


def test_the_clients_of_two_groups_are_joined_by_id():
    """Client 4 drops out, the update of client 1 is rejected, and one slot is empty."""
    first = group_log(
        [4, 1, 0], [1, 1, 0], [1, 0, 0], [0, 1, 0], {"loss": [0, 0, 0]},
        {"fc": [3, 3, 0]}, {"fc": [0, 3, 0]},
    )  # fmt: skip
    second = group_log(
        [3, 2, 5], [1, 1, 1], NONE, NONE, {"loss": [1, 2, 6], "beta": [0.25, 0.5, 0.75]},
        {"fc": [4, 4, 4], "wide": [5, 5, 5]}, {"fc": [4, 4, 4]},
    )  # fmt: skip
    log = round_log((first, second), 1)
    assert log.ids.tolist() == [1, 2, 3, 4, 5]
    assert log.arrived.tolist() == [False, True, True, False, True]
    assert log.rejected.tolist() == [True, False, False, False, False]
    np.testing.assert_array_equal(log.metrics["loss"], [np.nan, 2, 1, np.nan, 6])
    np.testing.assert_array_equal(log.metrics["beta"], [np.nan, 0.5, 0.25, np.nan, 0.75])
    assert log.loss == 3
    assert log.bytes_down_by_layer == {"fc": 18, "wide": 15}
    assert (log.bytes_down, log.bytes_up) == (33, 15)
    assert (log.seconds, log.late) == (None, None)
