"""A search over settings: what is planned, run, printed and written, for all methods alike."""

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
    each: dict[str, ConfigDict],
    texts: Sequence[str],
    rounds: int | None,
    budget: int | None,
    seed: int = 0,
    words: Registry = BUILTINS,
    as_preset: bool = False,
) -> list[Trial]:
    """What is tried of each method, or UsageError for what cannot be.

    Args:
      each: configurations by method.
      texts: of grids.
      rounds: of the first method's runs, and of the others' in proportion; None: as configured.
      seed: of the draw where there is a budget.
      words: what names in the configurations mean.
      as_preset: each has the client visits of its preset, and need not have as many as the others.
    """
    found = grids.grids(texts, list(each), words)
    whole = {method: grids.points(method, grid) for method, grid in found.items()}
    points = grids.equal(whole, budget, seed)
    made = [Trial(m, config, points[m], len(whole[m]), words) for m, config in each.items()]
    trials.check(made, as_preset)
    if rounds is not None:
        trials.shorten(each, rounds, words)
    trials.evaluate_alike(each, words)
    return made


def text(found: Found, said: Sequence[str], form: str) -> str:
    """What is printed, in a format."""
    if form == "csv":
        return show.as_csv(found)
    first, *rest = said
    if form == "markdown":
        parts = [first, text_tables.markdown(show.tables(found)), "\n".join(f"- {x}" for x in rest)]
    else:
        shown = text_tables.text(show.tables(found))
        parts = [
            text_tables.fill_paragraph(first),
            shown,
            "\n".join(map(text_tables.fill_paragraph, rest)),
        ]
    return "\n\n".join(filter(None, parts))


def preset(found: Found, said: Sequence[str], what: str) -> str | None:
    """tuned.py, as soon as there is a choice for every method."""
    best = {method: choice.best_point(tried) for method, tried in found.items()}
    there = {method: one for method, one in best.items() if one is not None}
    if len(there) < len(best):
        return None
    metric = show.metric_in(found)
    unit = " %" if metric.unit == "%" else ""
    remarks = {}
    for method, one in there.items():
        score = f"{format_mean_std(choice.spread(one), metric)}{unit} on validation examples"
        remarks[method] = f"{score}, the best of {len(found[method])}: {grids.label(one.point)}."
    return choice.preset(there, remarks, "\n".join([what, *said]))


FORMATS = {"text": "txt", "markdown": "md", "csv": "csv"}


def write(found: Found, said: Sequence[str], what: str, out: Path, ours: bool = True) -> bool:
    """All files; whether there is a preset of what was chosen.

    ours: whether commands know all that is in the configurations; there is no preset else.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for form, suffix in FORMATS.items():
            (out / f"tune.{suffix}").write_text(text(found, said, form) + "\n", encoding="utf-8")
        picture = show.draw(found)
        made = preset(found, said, what) if ours else None
        for name, content in (
            ("tune.png", html_page.png(picture.figure) if picture else None),
            ("tuned.py", None if made is None else made.encode()),
        ):
            if content is None:  # what stands there is of another grid
                (out / name).unlink(missing_ok=True)
            else:
                (out / name).write_bytes(content)
        part = out / "tune.html.part"
        part.write_text(show.page(found, said, picture), encoding="utf-8")
        part.replace(out / "tune.html")
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror})") from None
    return made is not None


def tune(
    made: Sequence[Trial],
    *,
    seeds: int,
    out: Path,
    texts: Sequence[str] = (),
    budget: int | None = None,
    together: int | None = None,
    only_show: bool = False,
    form: str = "text",
) -> int:
    """Run, print, write; the exit status."""
    status = 0
    if not only_show:
        try:
            trials.run(made, seeds, out, together)
        except interrupt.Stopped as stopped:
            print(stopped, file=sys.stderr)
            status = stopped.code
    found = {trial.method: trials.collect(trial, seeds, out) for trial in made}
    first = made[0].config
    configs = {trial.method: trial.config for trial in made}
    said = [
        show.head(found, seeds, configs, made[0].words),
        *show.notes(found, {trial.method: trial.whole for trial in made}, budget),
    ]
    grid = "; ".join(" ".join(part.split()) for part in texts)
    last = first.seed + seeds - 1
    what = f"Grid: {grid}. Seeds {first.seed} to {last}." if seeds > 1 else f"Grid: {grid}."
    ours = made[0].words is BUILTINS
    chosen = write(found, said, what, out, ours) if not only_show else False
    print(text(found, said, form))
    if chosen and form == "text":  # other formats are for programs to read
        print(f"\nChosen: --config={out / 'tuned.py'}:METHOD\nPage: {out / 'tune.html'}")
    return status


def known(methods: Iterable[str], words: Registry = BUILTINS) -> list[str]:
    """Each of them once, or UsageError."""
    for method in methods:
        if method not in words.algorithm:
            hint = configuration.suggestion(method, words.algorithm)
            raise UsageError(f"there is no method {method!r}{hint}")
    return list(dict.fromkeys(methods))
