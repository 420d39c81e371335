"""Ways to compute the same steps: which there are, and what is made of their seconds."""

import types

import jax

from experiments.libraries import layouts
from experiments.libraries.layouts import Layout, Size
from fedjax_pfl.settings.general import SETTINGS

SIZE = Size(clients=20, steps=2)


def test_each_way_differs_from_the_first_in_one():
    usual, *others = layouts.layouts(SIZE).values()
    assert usual == Layout()
    assert [sum(a != b for a, b in zip(one, usual, strict=True)) for one in others] == [1] * 9
    assert {one.conv for one in others} == set(SETTINGS["conv"].choices)
    plain = layouts.layouts(Size(20, 2, lowerings=()))
    assert [one.chunk for one in plain.values()] == [None, 1, 10, None, None]


def test_a_way_is_what_is_compiled(monkeypatch):
    seen = {}

    def ours(item):
        settings = item.settings
        way = Layout(settings["conv"], settings["chunk"], jax.config.jax_default_matmul_precision)
        seen[way] = (item.network, item.clients, item.cohort, item.client_steps)
        return types.SimpleNamespace(run=lambda: None)

    monkeypatch.setattr(layouts.work, "ours", ours)
    before = jax.config.jax_default_matmul_precision
    layouts.measured("lenet", SIZE, repeats=1)
    assert set(seen.values()) == {("lenet", 20, 20, 40)}
    ways = [Layout(name, 20, None) for name in ("auto", *layouts.LOWERINGS)]
    ways += [Layout("auto", chunk, None) for chunk in (1, 10)]
    ways += [Layout("auto", 20, name) for name in ("highest", "BF16_BF16_F32")]
    assert list(seen) == ways
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
