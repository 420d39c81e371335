"""Grid search over settings: plan, runs and results of all methods."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError, require_at_least
from fedjax_pfl.report import html_page, loggers, text_tables
from fedjax_pfl.report.numbers import format_mean_std
from fedjax_pfl.runs import interrupt
from fedjax_pfl.runs.tuning import choice, grids, show, trials
from fedjax_pfl.runs.tuning.show import Results
from fedjax_pfl.runs.tuning.trials import Trial
from fedjax_pfl.settings import configuration, custom, selection
from fedjax_pfl.settings.configuration import BUILTINS, Registry

FORMATS = {"text": "txt", "markdown": "md", "csv": "csv"}  # suffix of each format's file


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
    runs_per_program: int | None = None,
    **components: Unpack[custom.UserComponents],
) -> dict[str, dict[str, Any]]:
    """Trains every point of a grid, and selects the best of each method by validation score.

    Writes tables and a page to `out`, and presets to tuned.py, like the command `tune`. With
    user-defined components no tuned.py is written, because commands cannot load them. The first
    Ctrl-C saves the rounds being computed and raises `Stopped` after the results are printed; the
    same call resumes.

    Args:
      config: Settings of all methods, as for `fedjax_pfl.run`.
      grid: Values by setting, such as {"learning_rate": [0.1, 0.01], "fedavgm.beta": [0.5, 0.9]}. A
        point is a combination of one value of each.
      out: Folder of the runs and of the report.
      methods: Methods to tune. Default: the method of the configuration.
      seeds: Number of seeds. Default: the setting `seeds`.
      rounds: Rounds of the first method's runs; other methods' rounds change in proportion.
      budget: Number of points to sample for each method. Default: all.
      budget_seed: Seed of the sample.
      runs_per_program: Largest number of runs in one program. Default: no limit.
      **components: User-defined components, as for `fedjax_pfl.run`.

    Returns:
      The selected settings by method, nested, without the seed: pass them to `fedjax_pfl.run` with
      another one. With several seeds and `own_partitions` they keep both settings: pass them to
      `fedjax_pfl.run_all`. A method is missing if one of its runs is, or if no score is finite.
    """
    counts = {
        "seeds": seeds,
        "rounds": rounds,
        "budget": budget,
        "runs_per_program": runs_per_program,
    }
    for name, count in counts.items():
        require_at_least(name, count, 1)
    require_at_least("budget_seed", budget_seed, 0)
    if isinstance(methods, str):
        raise UsageError(f"methods is {methods!r}; give a list of names")
    registry, settings = custom.register(config, **components)
    base = configuration.complete(settings, registry)
    if base.sweep:
        raise UsageError("the setting sweep cannot be combined with a grid; leave sweep out")
    configs = {}
    for method in check_methods(methods or [base.algorithm], registry):
        configs[method] = base.copy_and_resolve_references()
        configs[method].algorithm = method
    selection.check_used(settings, list(configs.values()), registry)
    selection.check_owners(components.get("dataset"), configs.values())
    texts = [_grid_text(key, values) for key, values in grid.items()]
    trials_to_run = plan(configs, texts, rounds, budget, budget_seed, registry)
    seeds, out = seeds or base.seeds, Path(out)
    run_search(
        trials_to_run, seeds=seeds, out=out, texts=texts, budget=budget, max_runs=runs_per_program
    )
    selected = {}
    for trial in trials_to_run:
        best = choice.best_point(trials.collect(trial, seeds, out))
        if best is not None:
            changed = choice.changed_settings(best.config, registry)
            selected[trial.method] = {"algorithm": trial.method, **changed}
            selected[trial.method].pop("seed", None)
            for name, value in best.point.items():
                configuration.set_by_name(selected[trial.method], name, value)
    return selected


def _grid_text(key: str, values: Sequence[Any]) -> str:
    """Returns a setting and its values as "KEY=VALUE,VALUE"."""
    if isinstance(values, str) or not isinstance(values, Iterable) or not list(values):
        raise UsageError(f"the grid has {values!r} for {key}; give a list of values")
    return f"{key}={','.join(map(grids.format_value, values))}"


def check_methods(methods: Iterable[str], registry: Registry = BUILTINS) -> list[str]:
    """Returns the methods without repetitions. Raises UsageError for an unknown one."""
    for method in methods:
        if method not in registry.algorithm:
            hint = configuration.suggestion(method, registry.algorithm)
            raise UsageError(f"there is no method {method!r}{hint}")
    return list(dict.fromkeys(methods))


def plan(
    configs: dict[str, ConfigDict],
    texts: Sequence[str],
    rounds: int | None,
    budget: int | None,
    seed: int = 0,
    registry: Registry = BUILTINS,
    as_preset: bool = False,
) -> list[Trial]:
    """Returns the points to run of each method.

    Raises UsageError if methods cannot be compared, or if a setting has no effect.

    Args:
      configs: Configuration of each method; `rounds`, `phases` and `eval_every` change in place.
      texts: Grids, as for `grids`.
      rounds: Rounds of the first method's runs; other methods' rounds change in proportion.
        None: as configured.
      budget: Number of points to sample for each method. None: all.
      seed: Seed of the sample.
      registry: Components by name.
      as_preset: True if client updates may differ between methods, as in their presets.
    """
    for config in configs.values():
        for name in ("reference", "reference_runs"):
            if config[name]:
                raise UsageError(
                    f"the setting {name} cannot be combined with a grid; leave {name} out"
                )
    if len(configs) > 1:
        for method, config in configs.items():
            if config.phases and all("algorithm" in phase for phase in config.phases):
                raise UsageError(
                    f"every phase of {method} names its algorithm, so methods would not "
                    "differ; tune one method, or leave algorithm out of a phase"
                )
    all_points = {
        method: grids.points(method, grid)
        for method, grid in grids.grids(texts, list(configs), registry).items()
    }
    points = grids.equal(all_points, budget, seed)
    planned = [
        Trial(
            method=method,
            config=config,
            points=points[method],
            grid_size=len(all_points[method]),
            registry=registry,
        )
        for method, config in configs.items()
    ]
    trials.check_trials(planned, as_preset)
    for method, config in configs.items():
        trials.check_grid(config, all_points[method], registry)
    if rounds is not None:
        trials.shorten(configs, rounds, registry)
    trials.equalize_evaluations(configs, registry)
    return planned


def run_search(
    planned: Sequence[Trial],
    *,
    seeds: int,
    out: Path,
    texts: Sequence[str] = (),
    budget: int | None = None,
    max_runs: int | None = None,
    only_show: bool = False,
    form: str = "text",
    stop: interrupt.Stop | None = None,
) -> None:
    """Runs a grid search, prints the results and writes them to `out`.

    If a stop is requested, does so with the runs that are finished, and raises Stopped.

    Args:
      planned: Result of `plan`.
      seeds: Number of seeds.
      out: Folder of the runs and of the results.
      texts: Grids, for the header of tuned.py.
      budget: As for `plan`.
      max_runs: Largest number of runs in one program. None: no limit.
      only_show: True to train and write nothing: prints the results of finished runs.
      form: Format to print: "text", "markdown" or "csv".
      stop: Request to stop. Default: set by Ctrl-C.
    """
    stopped = None
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; choose a folder for the runs and tables")
    if not only_show:
        for trial in planned:
            loggers.from_setting(trial.config.log_to, out)
        try:
            trials.run(planned, seeds, out, max_runs, stop)
        except interrupt.Stopped as exception:
            stopped = exception
    registry, first_seed = planned[0].registry, planned[0].config.seed
    results = {trial.method: trials.collect(trial, seeds, out) for trial in planned}
    configs = {trial.method: trial.config for trial in planned}
    lines = [
        show.head(results, seeds, configs, registry),
        *show.notes(results, {trial.method: trial.grid_size for trial in planned}, budget),
    ]
    header = f"Grid: {'; '.join(' '.join(part.split()) for part in texts)}."
    if seeds > 1:
        header += f" Seeds {first_seed} to {first_seed + seeds - 1}."
    has_preset = False
    if not only_show:
        # Commands cannot load user-defined components.
        code = _preset(results, lines, header) if registry is BUILTINS else None
        has_preset = code is not None
        _write(results, lines, code, out)
    print(format_results(results, lines, form))
    if has_preset and form == "text":  # programs read the other formats
        path = shlex.quote(str(out / "tuned.py"))
        print(f"\nChosen: --config={path}:METHOD\nPage: {out / 'tune.html'}")
    if stopped is not None:
        raise stopped


def format_results(results: Results, lines: Sequence[str], form: str) -> str:
    """Formats results as `form`, which is "text", "markdown" or "csv".

    `lines` are the heading and the notes, which CSV leaves out.
    """
    if form == "csv":
        return show.as_csv(results)
    head, *notes = lines
    tables = show.tables(results)
    if form == "markdown":
        parts = [head, text_tables.markdown(tables), "\n".join(f"- {note}" for note in notes)]
    else:
        filled = "\n".join(map(text_tables.fill_paragraph, notes))
        parts = [text_tables.fill_paragraph(head), text_tables.text(tables), filled]
    return "\n\n".join(filter(None, parts))


def _preset(results: Results, lines: Sequence[str], header: str) -> str | None:
    """Returns the content of tuned.py, presets with the best points; None if a method has none.

    Its comment has `header`, a description of the grid, and `lines`, the heading and the notes.
    """
    metric = show.metric_in(results)
    unit = " %" if metric.unit == "%" else ""
    best_points, remarks = {}, {}
    for method, points in results.items():
        if (best := choice.best_point(points)) is None:
            return None
        best_points[method] = best
        remarks[method] = (
            f"{format_mean_std(choice.spread(best), metric)}{unit} on validation examples, the "
            f"best of {len(points)}: {grids.label(best.point)}."
        )
    return choice.preset(best_points, remarks, "\n".join([header, *lines]))


def _write(results: Results, lines: Sequence[str], code: str | None, out: Path) -> None:
    """Writes tune.txt, .md, .csv, .png and .html and tuned.py to `out`.

    `lines` are heading and notes; `code` is the content of tuned.py. If it is None, or if there is
    nothing to draw, removes this file of an earlier search.
    """
    picture = show.draw_scores(results)
    texts = {form: format_results(results, lines, form) + "\n" for form in FORMATS}
    files = {
        **{f"tune.{FORMATS[form]}": text for form, text in texts.items()},
        "tune.png": html_page.png(picture.figure) if picture else None,
        "tuned.py": code,
        "tune.html": show.page(results, lines, picture),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if content is None:
                (out / name).unlink(missing_ok=True)
            else:
                data = content.encode() if isinstance(content, str) else content
                (out / f"{name}.part").write_bytes(data)
                (out / f"{name}.part").replace(out / name)
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror})") from None
