"""Settings chosen on validation examples, with equal budgets for all methods.

python -m experiments.tune --config=experiments/configs/pfedla.py:digits \\
    --config.validation_fraction=.2 --methods=pfedla,fedavg,local --rounds=20 --seeds=2 \\
    --grid="learning_rate=.1,.03,.01" --grid="pfedla.rate=.05,.5; pfedla.normalise=softmax,relu" \\
    --budget=3 --out=runs/tune/digits

A key of a grid is a training setting, for all methods, or METHOD.SETTING, for one: its own setting,
or a training setting that has other values for this method. All combinations are tried, or as many
of each method as --budget says. Real-valued settings and seeds are one program; integers, words and
booleans (true, false) make programs of their own.

The highest accuracy on validation examples is chosen: mean over clients at a run's best evaluation,
mean over seeds; of equal ones the first in the grid's order. Test examples have no part in it.

The folder --out gets the runs, tables, a picture, a page and tuned.py, a configuration file with a
preset for each method: --config=FOLDER/tuned.py:METHOD. The same command goes on with what was cut
and only reads what is finished; so does one with another grid.
"""

import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from experiments import launch, render
from experiments.tune import choice, grids, show, trials
from experiments.tune.show import Found
from experiments.tune.trials import Trial
from fedjax_pfl import config as configuration
from fedjax_pfl import interrupt, report
from fedjax_pfl.config import OURS, Words
from fedjax_pfl.errors import UsageError


def plan(
    each: dict[str, ConfigDict], texts: Sequence[str], rounds: int | None, budget: int | None,
    seed: int = 0, words: Words = OURS, as_preset: bool = False,
) -> list[Trial]:  # fmt: skip
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
        parts = [first, render.markdown(show.tables(found)), "\n".join(f"- {x}" for x in rest)]
    else:
        wrap = lambda part: textwrap.fill(part, render.WIDTH, break_on_hyphens=False)
        parts = [wrap(first), render.text(show.tables(found)), "\n".join(map(wrap, rest))]
    return "\n\n".join(filter(None, parts))


def preset(found: Found, said: Sequence[str], what: str) -> str | None:
    """tuned.py, as soon as there is a choice for every method."""
    best = {method: choice.chosen(tried) for method, tried in found.items()}
    there = {method: one for method, one in best.items() if one is not None}
    if len(there) < len(best):
        return None
    name = show.name_of(found)
    unit = " %" if name == "accuracy" else ""
    remarks = {}
    for method, one in there.items():
        score = f"{show.shown(choice.spread(one), name)}{unit} on validation examples"
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
            ("tune.png", report.png(picture.figure) if picture else None),
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
    made: Sequence[Trial], *, seeds: int, out: Path, texts: Sequence[str] = (),
    budget: int | None = None, together: int | None = None, only_show: bool = False,
    form: str = "text",
) -> int:  # fmt: skip
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
    ours = made[0].words is OURS
    chosen = write(found, said, what, out, ours) if not only_show else False
    print(text(found, said, form))
    if chosen and form == "text":  # other formats are for programs to read
        print(f"\nChosen: --config={out / 'tuned.py'}:METHOD\nPage: {out / 'tune.html'}")
    return status


def known(methods: Iterable[str], words: Words = OURS) -> list[str]:
    """Each of them once, or UsageError."""
    for method in methods:
        if method not in words.algorithm:
            hint = configuration.nearest(method, words.algorithm)
            raise UsageError(f"there is no method {method!r}{hint}")
    return list(dict.fromkeys(methods))


def main(argv: Sequence[str]) -> None:
    """The command line."""
    chosen = flags.FLAGS
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; settings are given as --config.KEY=VALUE")
    if chosen.workdir is not None:
        raise UsageError("the runs, tables and preset are written to --out here; leave workdir out")
    base = chosen.config.copy_and_resolve_references()
    launch.replace_length(base, sys.argv[1:])
    if chosen.data_dir is not None:
        base.data_dir = chosen.data_dir
    if base.sweep:
        raise UsageError("what is tried is said by --grid here; leave sweep out")
    methods = known(chosen.methods or [base.algorithm])
    source = config_flags.get_config_filename(chosen["config"])
    changes = config_flags.get_override_values(chosen["config"])
    each = trials.configured(source, base, changes, methods)
    made = plan(each, chosen.grid, chosen.rounds, chosen.budget, chosen.budget_seed,
                as_preset=not set(trials.LENGTH) & set(changes))  # fmt: skip
    seeds = chosen.seeds or base.seeds
    sys.exit(
        tune(
            made, seeds=seeds, out=Path(chosen.out), texts=chosen.grid, budget=chosen.budget,
            together=chosen.together, only_show=chosen.only_show, form=chosen.format,
        )
    )  # fmt: skip


if __name__ == "__main__":
    # Here, because other commands have flags of these names too.
    flags.DEFINE_list("methods", [], "Methods to tune. Default: that of the configuration.")
    flags.DEFINE_multi_string("grid", [], "KEY=VALUE,VALUE; METHOD.KEY=VALUE,VALUE")
    flags.DEFINE_integer("budget", None, "Points of each method, drawn from its grid. Default: "
                         "all, and as many of each.", lower_bound=1)  # fmt: skip
    flags.DEFINE_integer("budget_seed", 0, "Of the draw.", lower_bound=0)
    flags.DEFINE_integer(
        "seeds", None, "From config.seed on. Default: config.seeds.", lower_bound=1
    )
    flags.DEFINE_integer("rounds", None, "Of the first method's runs, with all phases; the others' "
                         "are shortened in proportion.", lower_bound=1)  # fmt: skip
    flags.DEFINE_integer("together", None, "Most runs in one program. Default: all.", lower_bound=1)
    flags.DEFINE_string("out", "runs/tune", "Folder of the runs, tables and tuned.py.")
    flags.DEFINE_bool("only_show", False, "Run nothing: print what there is.")
    flags.DEFINE_enum("format", "text", list(FORMATS), "Of what is printed.")
    launch.prepare_devices()
    launch.command(main, config="baseline")
