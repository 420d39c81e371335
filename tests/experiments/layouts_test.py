"""Tests of the layouts: alternative settings for computing the same steps, and their times."""

import types

import jax

from experiments.libraries import layouts
from experiments.libraries.layouts import Layout, Size
from fedjax_pfl.settings.general import SETTINGS

SIZE = Size(clients=20, steps=2)


def test_each_layout_differs_from_the_default_in_one_field():
    default, *alternatives = layouts.layouts(SIZE).values()
    assert default == Layout()
    assert [
        sum(a != b for a, b in zip(layout, default, strict=True)) for layout in alternatives
    ] == [1] * 9
    assert {layout.conv for layout in alternatives} == set(SETTINGS["conv"].choices) - {"fused"}
    without_lowerings = layouts.layouts(Size(20, 2, lowerings=()))
    assert [layout.chunk for layout in without_lowerings.values()] == [None, 1, 10, None, None]


def test_a_gpu_also_measures_the_fused_block(monkeypatch):
    names = list(layouts.layouts(layouts.SIZES["lenet"]))
    monkeypatch.setattr(layouts.jax, "default_backend", lambda: "gpu")
    assert list(layouts.layouts(layouts.SIZES["lenet"])) == [*names, "conv=fused"]
    assert "conv=fused" not in layouts.layouts(layouts.SIZES["resnet9"])


def test_layouts_reach_the_compiled_programs(monkeypatch):
    compiled = {}

    def compile_workload(item):
        settings = item.settings
        layout = Layout(
            settings["conv"], settings["chunk"], jax.config.jax_default_matmul_precision
        )
        compiled[layout] = (item.network, item.clients, item.cohort, item.client_steps)
        return types.SimpleNamespace(run=lambda: None)

    monkeypatch.setattr(layouts.work, "compiled", compile_workload)
    before = jax.config.jax_default_matmul_precision
    layouts.measured("lenet", SIZE, repeats=1)
    assert set(compiled.values()) == {("lenet", 20, 20, 40)}
    expected = [Layout(name, 20, None) for name in ("auto", *layouts.LOWERINGS)]
    expected += [Layout("auto", chunk, None) for chunk in (1, 10)]
    expected += [Layout("auto", 20, name) for name in ("highest", "BF16_BF16_F32")]
    assert list(compiled) == expected
    assert jax.config.jax_default_matmul_precision == before


def test_each_layout_is_timed_in_turns_with_the_first_and_saved_at_once(monkeypatch):
    clock, calls, saved = [0.0], [], []
    seconds = {layout: 1.0 + i for i, layout in enumerate(layouts.layouts(SIZE).values())}

    def compiled(network, size, layout):
        def run():
            calls.append(layout)
            # One call in three is disturbed: a mean would show it.
            clock[0] += seconds[layout] * (10 if calls.count(layout) % 5 == 3 else 1)

        return run

    monkeypatch.setattr(layouts, "_compiled", compiled)
    monkeypatch.setattr(layouts.time, "perf_counter", lambda: clock[0])
    result = layouts.measured(
        "lenet", SIZE, 5, lambda partial: saved.append(len(partial["ms_per_client_step"]))
    )
    first, second, *_ = layouts.layouts(SIZE).values()
    assert calls[:22] == [first] * 11 + [second] + [first, second] * 5
    assert saved == list(range(1, 11))
    assert list(result["ms_per_client_step"].values()) == [25 * s for s in seconds.values()]
    assert result["times_the_first"][f"conv={layouts.LOWERINGS[0]}"] == 2.0
    rows = layouts.table({"lenet": result}).rows
    assert rows[0] == ["lenet: all 20 at a time, conv=auto, JAX's precision", "25", "1.00"]
    assert rows[1] == [f"lenet: conv={layouts.LOWERINGS[0]}", "50", "2.00"]
