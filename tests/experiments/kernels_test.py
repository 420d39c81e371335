"""Device time by kernel, and the list of measurements for a GPU."""

import pytest

from experiments import benchmark
from experiments.libraries import device_list, kernels, work
from fedjax_pfl.core.errors import UsageError

pytestmark = pytest.mark.slow("profiles of programs")


def test_time_is_summed_by_kernel_longest_first():
    profile = kernels.summary([("a", 1e9), ("b", 3e9), ("a", 1e9)], seconds=10.0)
    assert profile["device_seconds"] == 5.0
    assert profile["fraction_in_use"] == 0.5
    assert profile["launches"] == 3
    assert profile["kernels"] == [
        {"name": "b", "seconds": 3.0, "launches": 1},
        {"name": "a", "seconds": 2.0, "launches": 2},
    ]
    rows = kernels.table({"mlp": {**profile, "client_steps": 1000}}).rows
    assert rows[0] == ["mlp: b", "3e+03", "60.0 %"]
    events = [("k" * 60 + end, seconds) for end, seconds in (("1", 6e9), ("2", 4e9))]
    both = {**kernels.summary(events, seconds=10.0), "client_steps": 1000}
    assert [row[2] for row in kernels.table({"mlp": both}).rows] == ["60.0 %", "40.0 %"]


_PROGRAM = """\
%fused (p: f32[4]) -> f32[4] {
  ROOT %inner.1 = f32[4]{0} dot(f32[4,4] %p, f32[4] %p), lhs_contracting_dims={1}
}

ENTRY %main.2 (x: f32[4]) -> f32[4] {
  %gather.3 = f32[4]{0} gather(%x), metadata={op_name="jit(run)/while/body/batch/gather"}
  %ynn_fusion = f32[4]{0} fusion(%x), kind=kCustom, calls=%fused
  %dot.4 = f32[4]{0} dot(%x, %x), metadata={op_name="jvp(M)/conv1/dot_general"}
  %stack.5 = f32[4]{0} concatenate(%x), metadata={op_name="transpose(jvp(M))/conv1/stack"}
  %max.6 = f32[4]{0} select(%x), metadata={op_name="transpose(jvp(M))/max_pool/select_n"}
  %relu.7 = f32[4]{0} maximum(%x), metadata={op_name="jvp(M)/jit(relu)/max"}
  %sub.8 = f32[4]{0} subtract(%x, %x), metadata={op_name="while/body/optimizer/add"}
  ROOT %copy.9 = f32[4]{0} copy(%x)
}
"""


def test_time_is_summed_by_part_of_the_work():
    parts = kernels.parts_of_program(_PROGRAM)
    assert {name: part.split(":")[0] for name, part in parts.items()} == {
        "inner.1": "matrix products",
        "gather.3": "batches",
        "ynn_fusion": "matrix products",
        "dot.4": "matrix products",
        "stack.5": "convolutions without products",
        "max.6": "pooling",
        "relu.7": "other layers, loss",
        "sub.8": "optimiser",
        "copy.9": "rest",
    }
    events = [("dot.4", 1e9), ("copy.9", 4e9), ("ynn_fusion", 1e9), ("unknown", 2e9)]
    seconds = kernels.by_part(events, parts)
    assert seconds == {kernels.OTHER_WORK: 6.0, kernels.PRODUCTS: 2.0}
    profile = {**kernels.summary(events, seconds=10.0), "parts": seconds, "client_steps": 1000}
    rows = kernels.table({"mlp": profile}).rows
    assert rows[1] == ["mlp: matrix products", "2e+03", "25.0 %"]


def test_only_the_longest_kernels_are_named():
    profile = kernels.summary([(f"k{i}", 1e9 * (i + 1)) for i in range(22)], seconds=1.0)
    assert len(profile["kernels"]) == 20
    assert profile["other_seconds"] == 1.0 + 2.0


def test_a_profile_names_the_products_of_a_network():
    item = work.Work("small", network="mlp", clients=2, cohort=2, examples=32)
    profile = kernels.profile(item)
    assert profile["client_steps"] == 2
    assert profile["launches"] > 0
    assert any(
        "dot" in kernel["name"] or "fusion" in kernel["name"] for kernel in profile["kernels"]
    )
    assert {kernels.PRODUCTS, "optimiser", "batches: gather, normalise"} <= profile["parts"].keys()
    assert sum(profile["parts"].values()) == pytest.approx(profile["device_seconds"])


def test_items_that_hang_or_fail_do_not_stop_the_list(monkeypatch, capsys, tmp_path):
    program = {
        "hangs": device_list.Item(("-c", "import time; time.sleep(60)"), 0.5),
        "fails": device_list.Item(("-c", "raise SystemExit('no room')"), 20),
        "works": device_list.Item(("-c", "print('done')"), 20),
    }
    monkeypatch.setattr(device_list, "ITEMS", program)
    device_list.run_all(str(tmp_path / "out.json"), seconds=100.0)
    hangs, fails, works = capsys.readouterr().out.splitlines()
    assert hangs.startswith("hangs: stopped after")
    assert fails.startswith("fails: status 1")
    assert fails.endswith(": no room")
    assert works.startswith("works: status 0")
    device_list.run_all(str(tmp_path / "out.json"), seconds=1.0)
    assert capsys.readouterr().out.count("not started") == 3
    with pytest.raises(UsageError, match="needs --out"):
        device_list.run_all(None, 1.0)


def test_every_item_is_known_to_the_benchmark():
    for name, item in device_list.ITEMS.items():
        workloads = [word for word in item.arguments if word.startswith("--work=")]
        is_test = "pytest" in item.arguments
        assert is_test or workloads == [f"--work={name}"]
        assert is_test or benchmark.select_workloads([name]) == [name]
