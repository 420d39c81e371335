"""Grid search over settings: plan, runs and results of all methods."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report import html_page, text_tables
from fedjax_pfl.report.numbers import format_mean_std
from fedjax_pfl.runs import interrupt
from fedjax_pfl.runs.tuning import choice, grids, show, trials
from fedjax_pfl.runs.tuning.show import Found
from fedjax_pfl.runs.tuning.trials import Trial
from fedjax_pfl.settings import configuration
from fedjax_pfl.settings.configuration import BUILTINS, Registry


def plan(
    configs: dict[str, ConfigDict],
    texts: Sequence[str],
    rounds: int | None,
    budget: int | None,
    seed: int = 0,
    words: Registry = BUILTINS,
    as_preset: bool = False,
) -> list[Trial]:
    """Returns the points of each method. Raises UsageError if methods cannot be compared.

    Args:
      configs: Configuration of each method; the number of rounds is changed in place.
      texts: Grids.
      rounds: Rounds of the first method's runs; those of others change in proportion. Default: as
        configured.
      budget: Number of points to sample for each method. Default: all.
      seed: Seed of the sample.
      words: Components by name.
      as_preset: True if client visits may differ between methods, as in their presets.
    """
    all_points = {
        method: grids.points(method, grid)
        for method, grid in grids.grids(texts, list(configs), words).items()
    }
    points = grids.equal(all_points, budget, seed)
    planned = [
        Trial(method, config, points[method], len(all_points[method]), words)
        for method, config in configs.items()
    ]
    trials.check(planned, as_preset)
    if rounds is not None:
        trials.shorten(configs, rounds, words)
    trials.evaluate_alike(configs, words)
    return planned


def text(results: Found, lines: Sequence[str], form: str) -> str:
    """Formats the results for printing.

    Args:
      results: Results by method.
      lines: Heading and notes.
      form: "text", "markdown" or "csv".
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


def preset(results: Found, lines: Sequence[str], header: str) -> str | None:
    """Returns the content of tuned.py, or None if a method has no best point.

    Args:
      results: Results by method.
      lines: Heading and notes.
      header: Description of the grid.
    """
    best = {}
    for method, points in results.items():
        if (point := choice.best_point(points)) is None:
            return None
        best[method] = point
    metric = show.metric_in(results)
    unit = " %" if metric.unit == "%" else ""
    remarks = {}
    for method, point in best.items():
        score = f"{format_mean_std(choice.spread(point), metric)}{unit} on validation examples"
        count = len(results[method])
        remarks[method] = f"{score}, the best of {count}: {grids.label(point.point)}."
    return choice.preset(best, remarks, "\n".join([header, *lines]))


FORMATS = {"text": "txt", "markdown": "md", "csv": "csv"}


def write(
    results: Found, lines: Sequence[str], header: str, out: Path, with_preset: bool = True
) -> bool:
    """Writes all files of the results. Returns True if they include tuned.py.

    Args:
      results: Results by method.
      lines: Heading and notes.
      header: Description of the grid.
      out: Folder of the files.
      with_preset: False if commands cannot load the configurations.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for form, suffix in FORMATS.items():
            content = text(results, lines, form) + "\n"
            (out / f"tune.{suffix}").write_text(content, encoding="utf-8")
        picture = show.draw(results)
        code = preset(results, lines, header) if with_preset else None
        for name, data in (
            ("tune.png", html_page.png(picture.figure) if picture else None),
            ("tuned.py", None if code is None else code.encode()),
        ):
            if data is None:  # removes the file of an earlier grid
                (out / name).unlink(missing_ok=True)
            else:
                (out / name).write_bytes(data)
        temporary = out / "tune.html.part"
        temporary.write_text(show.page(results, lines, picture), encoding="utf-8")
        temporary.replace(out / "tune.html")
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror})") from None
    return code is not None


def tune(
    planned: Sequence[Trial],
    *,
    seeds: int,
    out: Path,
    texts: Sequence[str] = (),
    budget: int | None = None,
    together: int | None = None,
    only_show: bool = False,
    form: str = "text",
) -> int:
    """Runs a grid search, prints the results and writes them. Returns the exit status.

    Args:
      planned: Result of `plan`.
      seeds: Number of seeds.
      out: Folder of the runs and of the results.
      texts: Grids, for the header of tuned.py.
      budget: Number of points that were sampled.
      together: Most runs in one program. Default: no limit.
      only_show: True to print the results of finished runs only.
      form: Format to print: "text", "markdown" or "csv".
    """
    status = 0
    if not only_show:
        try:
            trials.run(planned, seeds, out, together)
        except interrupt.Stopped as stopped:
            print(stopped, file=sys.stderr)
            status = stopped.code
    results = {trial.method: trials.collect(trial, seeds, out) for trial in planned}
    configs = {trial.method: trial.config for trial in planned}
    lines = [
        show.head(results, seeds, configs, planned[0].words),
        *show.notes(results, {trial.method: trial.whole for trial in planned}, budget),
    ]
    grid = "; ".join(" ".join(part.split()) for part in texts)
    first = planned[0].config.seed
    last = first + seeds - 1
    header = f"Grid: {grid}. Seeds {first} to {last}." if seeds > 1 else f"Grid: {grid}."
    has_preset = False
    if not only_show:
        has_preset = write(results, lines, header, out, planned[0].words is BUILTINS)
    print(text(results, lines, form))
    if has_preset and form == "text":  # programs read the other formats
        print(f"\nChosen: --config={out / 'tuned.py'}:METHOD\nPage: {out / 'tune.html'}")
    return status


def known(methods: Iterable[str], words: Registry = BUILTINS) -> list[str]:
    """Returns the methods without repetitions. Raises UsageError for an unknown one."""
    for method in methods:
        if method not in words.algorithm:
            hint = configuration.suggestion(method, words.algorithm)
            raise UsageError(f"there is no method {method!r}{hint}")
    return list(dict.fromkeys(methods))
