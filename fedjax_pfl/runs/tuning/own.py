"""The command from Python, for a method or examples of your own."""

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
    **brought: Unpack[custom.UserComponents],
) -> dict[str, dict[str, Any]]:
    """What the command `tune` does, by the arguments that it has for flags.

    Args:
      config: settings that all methods have, as for `fedjax_pfl.run`.
      grid: values by setting, such as {"learning_rate": [0.1, 0.01], "fedavgm.beta": [0.5, 0.9]}.
      methods: to tune; none: that of the configuration.
      brought: your own dataset, algorithm and so on, as for `fedjax_pfl.run`; commands know none
        of them, so that there is no tuned.py.

    Returns:
      The settings that were chosen, by method, to be given to `fedjax_pfl.run` with another seed.
    """
    least = {"seeds": 1, "rounds": 1, "budget": 1, "budget_seed": 0, "together": 1}
    counts = (seeds, rounds, budget, budget_seed, together)
    for (name, smallest), count in zip(least.items(), counts, strict=True):
        if count is not None and count < smallest:
            raise UsageError(f"{name} is {count}; it must be at least {smallest}")
    if isinstance(methods, str):
        raise UsageError(f"methods is {methods!r}; give a list of names")
    words, given = custom.register(config, **brought)
    base = configuration.complete(given, words)
    if base.sweep:
        raise UsageError("what is tried is said by the grid here; leave sweep out")
    each = {}
    for method in search.known(methods or [base.algorithm], words):
        each[method] = base.copy_and_resolve_references()
        each[method].algorithm = method
    selection.check_used(given, list(each.values()), words)
    selection.check_owners(brought.get("dataset"), each.values())
    texts = [_text(key, values) for key, values in grid.items()]
    made = search.plan(each, texts, rounds, budget, budget_seed, words)
    seeds, out = seeds or base.seeds, Path(out)
    search.tune(made, seeds=seeds, out=out, texts=texts, budget=budget, together=together)
    best = {trial.method: choice.best_point(trials.collect(trial, seeds, out)) for trial in made}
    found = {}
    for method, one in best.items():
        if one is not None:
            found[method] = {"algorithm": method, **choice.changed_settings(one.config, words)}
            found[method].pop("seed", None)
            choice.set_point(found[method], one.point)
    return found


def _text(key: str, values: Sequence[Any]) -> str:
    """A setting and its values as the command has them."""
    if isinstance(values, str) or not isinstance(values, Iterable) or not list(values):
        raise UsageError(f"the grid has {values!r} for {key}; give a list of values")
    return f"{key}={','.join(map(grids.format_value, values))}"
