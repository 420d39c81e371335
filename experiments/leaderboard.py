"""All methods on fixed splits, each tuned with the same budget: a table for each split.

python -m experiments.leaderboard                           the digits, all methods
python -m experiments.leaderboard --columns=digits,mnist --methods=fedavg,ditto
python -m experiments.leaderboard --only_show               prints existing results

Each method is tried with --budget points of its grid on validation examples, for one seed. The best
point is run with other seeds and scored on test examples before and after local training. Run the
same command again to resume. Results of earlier calls stay, and each method is added when it is
finished. All methods of a split have the same budget; give another --out for another budget. The
folder --out has all runs, leaderboard.json, a text, a picture of each split, and a page with
sortable tables.
"""

import json
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
    """A split: its preset, the length of its runs, and further settings."""

    preset: str  # without the method
    rounds: int
    local_epochs: int
    settings: Mapping[str, Any] = MappingProxyType({})


# Small enough for two cores.
_SMALL = {"model": "small", "small.kernels": (4, 8)}
_MNIST = {**_SMALL, "fraction": 0.2, "classes.examples": 200}
COLUMNS = {
    "digits": Column("digits-classes4-n10", 30, 2),
    "mnist": Column("mnist-classes4-n20", 30, 2, MappingProxyType(_MNIST)),
    "cifar10": Column(
        "cifar10-dirichlet0.3-n20", 30, 2, MappingProxyType({**_SMALL, "fraction": 0.1})
    ),
}
RATES = "learning_rate=.02,.05,.1,.2"
# Grids of the methods' own settings, in addition to the learning rates.
GRIDS = {
    "apfl": "apfl.alpha=.25,.5,.75; apfl.alpha_rate=0,.05",
    "clustered_fl": "clustered_fl.mean_below=.2,.4,.8",
    "ditto": "ditto.penalty=.1,.5,2",
    "factorized_fl": "factorized_fl.share=u,all",
    "fedala": "fedala.layers=1,2; fedala.weight_rate=.3,1",
    "fedamp": "fedamp.sigma=5,20; fedamp.penalty=.2,1",
    "fedas": "fedas.align_rate=.01,.1",
    "fedbabu": "fedbabu.epochs=1,5; fedbabu.rate=.005,.02",
    "fedcac": "fedcac.critical_share=.3,.5,.7; fedcac.alone_after=15,60",
    "fedcp": "fedcp.penalty=.1,1,5",
    "feddbe": "feddbe.penalty=.01,.1,1,10,50",
    "feddyn": "feddyn.alpha=.01,.1",
    "fedem": "fedem.components=2,3",
    "fedfomo": "fedfomo.peers=3,5",
    "fedgh": "fedgh.rate=.01,.1",
    "fedlc": "fedlc.tau=.5,1,2",
    "fedpac": "fedpac.penalty=.1,1; fedpac.head_epochs=1,5",
    "fedprox": "fedprox.mu=.01,.1,1",
    "fedproto": "fedproto.penalty=.1,1; fedproto.decides=prototype,head",
    "fedrep": "fedrep.head_epochs=2,10",
    "floco": "floco.place_after=2,10; floco.radius=.1,.5",
    "flute": "flute.collapse=.05,.25; flute.head_epochs=0,9",
    "fedtgp": "fedtgp.penalty=.1,1; fedtgp.rate=.01,.1; fedtgp.decides=prototype,head",
    "fml": "fml.alpha=.5,.8; fml.beta=.5,.8",
    "gpfl": "gpfl.penalty=.0001,.01; gpfl.decay=0,.01,.1",
    "ifca": "ifca.clusters=2,3; ifca.cluster_layers=unset,1",
    "knn_per": "knn_per.neighbours=5,10; knn_per.weight=.25,.5,.75",
    "l2gd": "l2gd.pull=.2,.5,.8",
    "moon": "moon.mu=.1,1,5",
    "pefll": "pefll.rate=.0002,.001,.005",
    "per_fedavg": "per_fedavg.alpha=.01,.05",
    "pfedfda": "pfedfda.ridge=.01,.1,1",
    "pfedgraph": "pfedgraph.alpha=.1,.8; pfedgraph.penalty=0,.01",
    "pfedhn": "pfedhn.rate=.01,.05",
    "pfedhn_pc": "pfedhn_pc.rate=.01,.05",
    "pfedla": "pfedla.rate=.1,.5",
    "pfedme": "pfedme.penalty=5,15; pfedme.inner_rate=.02,.05",
    "pfedpara": "pfedpara.gamma=0,.5",
    "scaffold": "scaffold.server_rate=.5,1",
}
SEED = 100  # first seed of the scored runs; settings are chosen with other seeds


def configured(column: Column, methods: Sequence[str]) -> dict[str, ConfigDict]:
    """Returns the configuration of each method on a split, by method."""
    configs = {}
    for method in methods:
        config = baseline.get_config(f"{method}-{column.preset}")
        config.update(rounds=column.rounds, local_epochs=column.local_epochs, eval_every=10)
        config.update(validation_fraction=0.2, evaluate_after=False)
        config.update_from_flattened_dict(column.settings)
        if method == "fedbn":  # needs BatchNorm
            config[config.model].batch_norm = True
        configs[method] = config
    return configs


def plan(configs: dict[str, ConfigDict], budget: int) -> list[Trial]:
    """Returns a trial per method, with at most `budget` points of its grid."""
    texts = [RATES, *(text for method, text in GRIDS.items() if method in configs)]
    return search.plan(configs, texts, None, budget)


def run_trial(trial: Trial, seeds: int, out: Path, *, only_show: bool = False) -> dict[str, Any]:
    """Tunes a method, runs the best point with other seeds, and returns its line of the table.

    Returns {} if a run is not finished. With `only_show` it only reads the runs in `out`.
    """
    tuning, running = out / "tuning", out / "runs"
    if not only_show:
        _train(trial, 1, tuning)
    points = trials.collect(trial, 1, tuning)
    best = choice.best_point(points)
    if best is None:
        has_run = all(point.complete for point in points)
        return {"cannot": "no point of its grid has a finite score"} if has_run else {}
    config = trial.config.copy_and_resolve_references()
    config.seed, config.evaluate_after = SEED, True
    final = Trial(trial.method, config, [best.point], 1)
    if not only_show:
        _train(final, seeds, running)
    (finished,) = trials.collect(final, seeds, running)
    if not finished.complete:
        return {}
    runs = [finished.runs[seed] for seed in sorted(finished.runs)]
    row = Row(trial.method, finished.config, runs)
    scores = summary(row)
    seconds = [run.metrics[-1]["seconds"] for run in runs]
    return {
        "settings": grids.label(best.point),
        "points": len(trial.points),
        "validation": choice.spread(best)["mean"],
        "seeds": sorted(finished.runs),
        "before": dict(scores.before),
        "after": dict(scores.after or {}),
        "worst tenth": dict(scores.worst10),
        "megabytes": scores.megabytes_down + scores.megabytes_up,
        "seconds": sum(seconds) / len(seconds),
    }


def _train(trial: Trial, seeds: int, folder: Path) -> None:
    """Trains the missing runs of a trial; after a signal, saves them and raises Stopped."""
    with interrupt.on_signals() as stop:
        trials.run([trial], seeds, folder, None, stop)


def select(requested: Sequence[str], existing: Mapping[str, Any], flag: str) -> list[str]:
    """Returns the requested names, or all if there are none; raises UsageError for unknown ones."""
    for name in requested:
        if name not in existing:
            raise UsageError(f"--{flag} has {name!r}{configuration.suggestion(name, existing)}")
    return list(dict.fromkeys(requested)) or list(existing)


def require_recorded(
    leaderboard: Mapping[str, Any], name: str, about: Mapping[str, Any], out: Path
) -> None:
    """Raises UsageError if results of the split `name` have other settings than `about`."""
    column = leaderboard["columns"].get(name, {"methods": {}})
    if not column["methods"]:
        return
    for key, value in json.loads(json.dumps(about)).items():
        if (recorded := column["about"].get(key)) != value:
            remedy = f"--budget={recorded} or another" if key == "budget" else "another"
            raise UsageError(
                f"{out} has results of {name} with {key} {recorded}, not {value}; give "
                f"{remedy} --out"
            )


def require_no_more_seeds(
    leaderboard: Mapping[str, Any], name: str, methods: Sequence[str], seeds: int, out: Path
) -> None:
    """Raises UsageError if a method's results of the split `name` have more seeds than `seeds`."""
    lines = leaderboard["columns"].get(name, {"methods": {}})["methods"]
    for method in methods:
        if (recorded := len(lines.get(method, {}).get("seeds", []))) > seeds:
            raise UsageError(
                f"{out} has results of {method} on {name} with {recorded} seeds, not {seeds}; give "
                f"--seeds={recorded}, other --methods or another --out"
            )


def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    flag_values = flags.FLAGS
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag")
    columns = select(flag_values.columns, COLUMNS, "columns")
    methods = select(flag_values.methods, configuration.ALGORITHMS, "methods")
    out, status = Path(flag_values.out), 0
    commit, boards = rivals.commit(str(Path(__file__).parents[1])), board.read(out)
    planned, about_columns = {}, {}
    for name in columns:
        column = COLUMNS[name]
        about_columns[name] = about = {
            "words": column.preset,
            "rounds": column.rounds,
            "local_epochs": column.local_epochs,
            "settings": dict(column.settings),
            "budget": flag_values.budget,
        }
        require_recorded(boards, name, about, out)
        if not flag_values.only_show:
            require_no_more_seeds(boards, name, methods, flag_values.seeds, out)
        configs = configured(column, methods)
        for config in configs.values():
            config.data_dir = flag_values.data_dir
        planned[name] = plan(configs, flag_values.budget)
    try:
        for name, method_trials in planned.items():
            for trial in method_trials:
                try:
                    line = run_trial(
                        trial, flag_values.seeds, out / name, only_show=flag_values.only_show
                    )
                except UsageError as error:  # of this method; the others continue
                    line = {"cannot": str(error)}
                    print(f"{name}: {trial.method}: {error}", file=sys.stderr)
                if not flag_values.only_show:
                    boards = board.read(out)  # with lines that other calls added meanwhile
                lines = board.column(boards, name, about_columns[name])["methods"]
                if "cannot" in line and "seeds" in lines.get(trial.method, {}):
                    continue  # the scores stay: data may be missing on this machine only
                if line:
                    lines[trial.method] = board.with_commit(line, commit, lines.get(trial.method))
                if line and not flag_values.only_show:
                    board.write(boards, out)
    except interrupt.Stopped as stopped:
        print(stopped, file=sys.stderr)
        status = stopped.code
    print(board.text(boards))
    sys.exit(status)


if __name__ == "__main__":
    flags.DEFINE_list("columns", ["digits"], f"Splits, of {', '.join(COLUMNS)}.")
    flags.DEFINE_list("methods", [], "Methods. Default: all.")
    flags.DEFINE_integer("budget", 4, "Points of the grid to try per method.", lower_bound=1)
    flags.DEFINE_integer("seeds", 3, "Seeds of the scored runs.", lower_bound=1)
    flags.DEFINE_string("out", "runs/leaderboard", "Folder of the runs and tables.")
    flags.DEFINE_bool("only_show", False, "Print existing results and run nothing.")
    define_data_dir(flags.FLAGS)
    prepare_devices()
    run_script(main, __doc__)
