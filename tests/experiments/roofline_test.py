"""Tests of the roofline: bytes by hand, and the slower one of operations and bytes."""

import pytest

from experiments.libraries import roofline
from fedjax_pfl.networks import MLP


def test_bytes_of_an_mlp_by_hand():
    # Images of 3,072 numbers are read twice. The 200 hidden values are written and read twice,
    # their gradient is written and read. 3,072 x 200 + 200 + 200 x 10 + 10 parameters move 3 times.
    parameters = 616_610
    expected = 4 * (32 * (2 * 3072 + 5 * 200) + 3 * parameters)
    assert roofline.least_bytes(MLP(outputs=10, hidden=(200,)), batch=32) == expected


@pytest.mark.parametrize(
    ("flops", "rate", "expected"),
    [
        (4e9, 1e15, 0.4),  # 4 GFLOP at 10 TFLOP/s: 0.4 of 1 ms
        (1.0, 8_313_752 / 0.25e-3, 0.25),  # the bytes of the MLP in 0.25 of 1 ms
    ],
)
def test_share_takes_the_slower_one_of_operations_and_bytes(flops, rate, expected):
    item = {
        "peak_gflops": [9e3, 1e4, 2e4],  # the median counts
        "flops_per_client_step": flops,
        "bytes_per_second": rate,
        "batch": 32,
        "who": {"library": {"ms_per_client_step": 1.0}},
    }
    assert roofline.share("mlp", item, "cpu") == pytest.approx(expected, rel=1e-4)


def test_share_without_a_bandwidth_is_none_unless_the_data_sheet_has_it():
    item = {
        "peak_gflops": [1e4],
        "flops_per_client_step": 1e9,
        "batch": 32,
        "who": {"library": {"ms_per_client_step": 1.0}},
    }
    assert roofline.share("mlp", item, "cpu") is None
    assert roofline.share("mlp", item, "NVIDIA H200") == pytest.approx(0.1)
