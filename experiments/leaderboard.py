"""All methods on fixed splits, each tuned with the same budget: one table for each split.

python -m experiments.leaderboard                           the digits, all methods
python -m experiments.leaderboard --columns=digits,mnist --methods=fedavg,ditto
python -m experiments.leaderboard --only_show               what there is so far

Of each method so many points of its grid are tried on validation examples, for one seed. The best
then runs anew with other seeds, and is scored on test examples before and after local training.
The same command goes on with what was cut, and only reads what is finished; the table is written
after every method, beside what earlier calls have put there. The folder --out gets all runs,
leaderboard.json, a text, a picture of each split, and a page whose table can be sorted.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict

from experiments.libraries import rivals
from fedjax_pfl.cli.command import run_script
from fedjax_pfl.cli.configs import define_data_dir
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.presets import baseline
from fedjax_pfl.report import leaderboard as board
from fedjax_pfl.report.comparison import Row, summary
from fedjax_pfl.runs import interrupt
from fedjax_pfl.runs.tuning import choice, grids, search, trials
from fedjax_pfl.runs.tuning.trials import Trial
from fedjax_pfl.settings import configuration
from fedjax_pfl.simulation.devices import prepare_devices


class Column(NamedTuple):
    """A split: the words of its preset, how long its runs are, and what else is set."""

    words: str
    rounds: int
    local_epochs: int
    settings: Mapping[str, Any] = MappingProxyType({})


# So that two cores will do.
_LITTLE = {"model": "small", "small.kernels": (4, 8)}
_MNIST = {**_LITTLE, "fraction": 0.2, "classes.examples": 200}
COLUMNS = {
    "digits": Column("digits-classes4-n10", 30, 2),
    "mnist": Column("mnist-classes4-n20", 30, 2, MappingProxyType(_MNIST)),
    "cifar10": Column(
        "cifar10-dirichlet0.3-n20", 30, 2, MappingProxyType({**_LITTLE, "fraction": 0.1})
    ),
}
RATES = "learning_rate=.02,.05,.1,.2"
# What is tried of a method's own, beside the rates.
GRIDS = {
    "apfl": "apfl.alpha=.25,.5,.75; apfl.alpha_rate=0,.05",
    "clustered_fl": "clustered_fl.mean_below=.2,.4,.8",
    "ditto": "ditto.penalty=.1,.5,2",
    "factorized_fl": "factorized_fl.share=u,all",
    "fedala": "fedala.layers=1,2; fedala.weight_rate=.3,1",
    "fedamp": "fedamp.sigma=5,20; fedamp.penalty=.2,1",
    "fedas": "fedas.align_rate=.01,.1",
    "fedbabu": "fedbabu.epochs=1,5; fedbabu.rate=.005,.02",
    "feddyn": "feddyn.alpha=.01,.1",
    "fedem": "fedem.components=2,3",
    "fedfomo": "fedfomo.peers=3,5",
    "fedpac": "fedpac.penalty=.1,1; fedpac.head_epochs=1,5",
    "fedprox": "fedprox.mu=.01,.1,1",
    "fedproto": "fedproto.penalty=.1,1; fedproto.decides=prototype,head",
    "fedrep": "fedrep.head_epochs=2,10",
    "l2gd": "l2gd.pull=.2,.5,.8",
    "per_fedavg": "per_fedavg.alpha=.01,.05",
    "pfedgraph": "pfedgraph.alpha=.1,.8; pfedgraph.penalty=0,.01",
    "pfedhn": "pfedhn.rate=.01,.05",
    "pfedhn_pc": "pfedhn_pc.rate=.01,.05",
    "pfedla": "pfedla.rate=.1,.5",
    "pfedme": "pfedme.penalty=5,15; pfedme.inner_rate=.02,.05",
    "pfedpara": "pfedpara.gamma=0,.5",
    "scaffold": "scaffold.server_rate=.5,1",
}
SEED = 100  # the first of those that are scored; settings are chosen with others


def configured(column: Column, methods: Sequence[str]) -> dict[str, ConfigDict]:
    """The configuration of each method on a split."""
    configs = {}
    for method in methods:
        config = baseline.get_config(f"{method}-{column.words}")
        config.rounds, config.local_epochs, config.eval_every = (
            column.rounds,
            column.local_epochs,
            10,
        )
        config.validation_fraction, config.evaluate_after = 0.2, False
        config.update_from_flattened_dict(column.settings)
        if method == "fedbn":  # which is for networks that have it
            config[config.model].batch_norm = True
        configs[method] = config
    return configs


def plan(configs: dict[str, ConfigDict], budget: int) -> list[Trial]:
    """Returns the trials of configs method, with the same number of grid points."""
    texts = [RATES, *(text for method, text in GRIDS.items() if method in configs)]
    return search.plan(configs, texts, None, budget)


def played(trial: Trial, seeds: int, out: Path, *, only_show: bool = False) -> dict[str, Any]:
    """A method's line: tuned, and what was chosen run with other seeds. Empty: not finished."""
    tuning, running = out / "tuning", out / "runs"
    if not only_show:
        trials.run([trial], 1, tuning, None)
    tried = trials.collect(trial, 1, tuning)
    best = choice.best_point(tried)
    if best is None:
        return {}
    config = trial.config.copy_and_resolve_references()
    config.seed, config.evaluate_after = SEED, True
    final = Trial(trial.method, config, [best.point], 1)
    if not only_show:
        trials.run([final], seeds, running, None)
    (finished,) = trials.collect(final, seeds, running)
    if not finished.complete:
        return {}
    row = Row(
        trial.method, finished.config, [finished.runs[seed] for seed in sorted(finished.runs)]
    )
    scores = summary(row)
    lasts = [run.metrics[-1] for run in row.runs]
    return {
        "settings": grids.label(best.point),
        "points": len(trial.points),
        "validation": choice.spread(best)["mean"],
        "seeds": sorted(finished.runs),
        "before": dict(scores.before),
        "after": dict(scores.after or {}),
        "worst tenth": dict(scores.worst10),
        "megabytes": scores.megabytes_down + scores.megabytes_up,
        "seconds": sum(line["seconds"] for line in lasts) / len(lasts),
    }


def select(requested: Sequence[str], existing: Mapping[str, Any], flag: str) -> list[str]:
    """Names, all where none is given, or UsageError."""
    for name in requested:
        if name not in existing:
            raise UsageError(f"--{flag} has {name!r}{configuration.suggestion(name, existing)}")
    return list(dict.fromkeys(requested)) or list(existing)


def main(argv: Sequence[str]) -> None:
    """Tune, run, write, print."""
    given = flags.FLAGS
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag")
    columns = select(given.columns, COLUMNS, "columns")
    methods = select(given.methods, configuration.ALGORITHMS, "methods")
    out, status = Path(given.out), 0
    commit, boards, planned = rivals.commit(str(Path(__file__).parent)), board.read(out), {}
    for name in columns:
        configs = configured(COLUMNS[name], methods)
        for config in configs.values():
            config.data_dir = given.data_dir
        planned[name] = plan(configs, given.budget)
    try:
        for name, method_trials in planned.items():
            column_settings = COLUMNS[name]
            about = {
                **column_settings._asdict(),
                "settings": dict(column_settings.settings),
                "budget": given.budget,
            }
            lines = board.column(boards, name, about)["methods"]
            for trial in method_trials:
                try:
                    line = played(trial, given.seeds, out / name, only_show=given.only_show)
                except UsageError as error:  # of this method; the others go on
                    line = {"cannot": str(error)}
                if line:
                    lines[trial.method] = board.with_commit(line, commit, lines.get(trial.method))
                    board.write(boards, out)
    except interrupt.Stopped as stopped:
        print(stopped, file=sys.stderr)
        status = stopped.code
    print(board.text(boards))
    sys.exit(status)


if __name__ == "__main__":
    flags.DEFINE_list("columns", ["digits"], f"Splits, of {', '.join(COLUMNS)}.")
    flags.DEFINE_list("methods", [], "Some of them. Default: all.")
    flags.DEFINE_integer("budget", 4, "Points that are tried of each method.", lower_bound=1)
    flags.DEFINE_integer("seeds", 3, "With which what was chosen is scored.", lower_bound=1)
    flags.DEFINE_string("out", "runs/leaderboard", "Folder of the runs and tables.")
    flags.DEFINE_bool("only_show", False, "Run nothing: print what there is.")
    define_data_dir(flags.FLAGS)
    prepare_devices()
    run_script(main, __doc__)
