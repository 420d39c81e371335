"""Tuning from Python, for user-defined components."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs.tuning import choice, grids, search, trials
from fedjax_pfl.settings import configuration, custom, selection


def tune(
    config: Mapping[str, Any],
    grid: Mapping[str, Sequence[Any]],
    out: str | Path = "runs/tune",
    *,
    methods: Sequence[str] = (),
    seeds: int | None = None,
    rounds: int | None = None,
    budget: int | None = None,
    budget_seed: int = 0,
    together: int | None = None,
    **components: Unpack[custom.UserComponents],
) -> dict[str, dict[str, Any]]:
    """Runs a grid search, like the command `tune`.

    With user-defined components no tuned.py is written, because commands cannot load them.

    Args:
      config: Settings of all methods, as for `fedjax_pfl.run`.
      grid: Values by setting, such as {"learning_rate": [0.1, 0.01], "fedavgm.beta": [0.5, 0.9]}.
      out: Folder of the runs and of the report.
      methods: Methods to tune. Default: the method of the configuration.
      seeds: Number of seeds. Default: the setting `seeds`.
      rounds: Rounds of the first method's runs; those of others change in proportion.
      budget: Number of points to sample for each method. Default: all.
      budget_seed: Seed of the sample.
      together: Most runs in one program. Default: no limit.
      **components: User-defined components, as for `fedjax_pfl.run`.

    Returns:
      The selected settings by method. Pass them to `fedjax_pfl.run` with another seed.
    """
    minimum = {"seeds": 1, "rounds": 1, "budget": 1, "budget_seed": 0, "together": 1}
    counts = (seeds, rounds, budget, budget_seed, together)
    for (name, smallest), count in zip(minimum.items(), counts, strict=True):
        if count is not None and count < smallest:
            raise UsageError(f"{name} is {count}; it must be at least {smallest}")
    if isinstance(methods, str):
        raise UsageError(f"methods is {methods!r}; give a list of names")
    registry, settings = custom.register(config, **components)
    base = configuration.complete(settings, registry)
    if base.sweep:
        raise UsageError("the setting sweep cannot be combined with a grid; leave sweep out")
    configs = {}
    for method in search.known(methods or [base.algorithm], registry):
        configs[method] = base.copy_and_resolve_references()
        configs[method].algorithm = method
    selection.check_used(settings, list(configs.values()), registry)
    selection.check_owners(components.get("dataset"), configs.values())
    texts = [_text(key, values) for key, values in grid.items()]
    plan = search.plan(configs, texts, rounds, budget, budget_seed, registry)
    seeds, out = seeds or base.seeds, Path(out)
    search.tune(plan, seeds=seeds, out=out, texts=texts, budget=budget, together=together)
    selected = {}
    for trial in plan:
        best = choice.best_point(trials.collect(trial, seeds, out))
        if best is not None:
            changed = choice.changed_settings(best.config, registry)
            selected[trial.method] = {"algorithm": trial.method, **changed}
            selected[trial.method].pop("seed", None)
            choice.set_point(selected[trial.method], best.point)
    return selected


def _text(key: str, values: Sequence[Any]) -> str:
    """Returns a setting and its values in the format of the command."""
    if isinstance(values, str) or not isinstance(values, Iterable) or not list(values):
        raise UsageError(f"the grid has {values!r} for {key}; give a list of values")
    return f"{key}={','.join(map(grids.format_value, values))}"
