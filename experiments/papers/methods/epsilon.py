"""Accuracy over epsilon of private runs, with training alone as a horizontal line.

The rule was fixed before the runs. Learning rate and clipping norm of a method are chosen from
`GRID` and `CLIP_NORMS` by the mean validation accuracy after the last round at epsilon `CHOSEN_AT`,
with seed 0. They hold for every epsilon. Without privacy the learning rate is chosen again, and
nothing is clipped. The chosen settings are run with other seeds and scored on test examples.
The norm 0.25 was added because 0.5, the smallest at first, was chosen.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from experiments import overrides
from experiments.papers import study
from experiments.papers.study import COLOURS, DATASET, ROUNDS, SEEDS, mean_std
from experiments.papers.table import accuracy
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.presets import baseline
from fedjax_pfl.report.method_labels import table_label
from fedjax_pfl.runs.build import build
from fedjax_pfl.runs.tuning import choice, grids, trials
from fedjax_pfl.runs.tuning.grids import Point
from fedjax_pfl.runs.tuning.trials import Trial
from fedjax_pfl.settings import configuration
from fedjax_pfl.transforms.privacy.settings import guarantee

EPSILONS = (1.0, 2.0, 4.0, 8.0)
CHOSEN_AT = 4.0
GRID = (0.05, 0.1, 0.2, 0.5, 1.0)  # learning rates
CLIP_NORMS = (0.25, 0.5, 1.0, 2.0)
FIRST_SEED = 100  # of the scored runs
OWN_SETTINGS = ("seed", "learning_rate", "privacy*", "metrics")  # settings that the study chooses
METHODS = ("fedavg", "fedper", "ditto", "pfedhn")  # Local is run besides them
NO_PRIVACY = "inf"


class Panel(NamedTuple):
    """A level of privacy, the methods that admit it, and a federation for each dataset."""

    level: str  # value of the setting `privacy`
    protects: str
    methods: Sequence[str]
    settings: Mapping[str, Mapping[str, Any]]  # by dataset


_CLIENTS = {"local_epochs": 5, "batch_size": 16}
_EXAMPLES = {"clients": 10, "classes.per_client": 4, "local_epochs": 2, "batch_size": 1000}
PANELS = (
    Panel(
        "client",
        "all data of a client",
        ("fedavg", "fedper", "ditto"),
        {
            # Sampling would cost more accuracy than its amplification gives with 200 clients.
            "digits": _CLIENTS
            | {"clients": 200, "classes.examples": 8, "classes.per_client": 2}
            | {"privacy_delta": 1e-3},
            "mnist": _CLIENTS
            | {"clients": 1000, "classes.examples": 24, "classes.per_client": 4}
            | {"clients_per_round": 250, "sampling": "cyclic", "privacy_delta": 1e-4},
        },
    ),
    Panel(
        "example",
        "one example",
        ("fedavg", "fedper", "pfedhn"),
        {
            "digits": _EXAMPLES | {"classes.examples": 160, "privacy_delta": 1e-3},
            "mnist": _EXAMPLES | {"classes.examples": 600, "privacy_delta": 1e-4},
        },
    ),
)


def epsilon() -> tuple[dict[str, Any], Figure]:
    """Returns accuracy by level of privacy, method and epsilon."""
    if DATASET.value not in PANELS[0].settings:
        datasets = ", ".join(PANELS[0].settings)
        raise UsageError(f"the study epsilon has no settings for {DATASET.value!r}; use {datasets}")
    methods = study.select_methods(METHODS)
    numbers: dict[str, Any] = {}
    for panel in PANELS:
        selected = [method for method in panel.methods if method in methods]
        numbers[panel.level] = {"noise multiplier": _noise(panel), "local": _local(panel)}
        numbers[panel.level] |= {method: _curve(panel, method) for method in selected}
    return numbers, _draw(numbers)


def configured(panel: Panel, method: str) -> ConfigDict:
    """Returns the settings of a method without privacy, its learning rate not yet chosen."""
    config = baseline.get_config(f"{method}-{DATASET.value}")
    config.update(model="mlp", rounds=ROUNDS.value, eval_every=ROUNDS.value)
    config.mlp.hidden = (16,)
    config.update(validation_fraction=0.2, evaluate_after=False, data_dir=study.DATA_DIR.value)
    config.update_from_flattened_dict(panel.settings[DATASET.value])
    if method == "local":
        config.clients_per_round = None  # every client trains in every round
    overrides.override(config, study.SET.value)
    return config


def private(config: ConfigDict, level: str, target: float) -> ConfigDict:
    """Returns settings with privacy at an epsilon; the clipping norm is not yet chosen."""
    config = config.copy_and_resolve_references()
    config.update(privacy=level, privacy_epsilon=target, privacy_clip_norm=1.0)
    return config


def _noise(panel: Panel) -> dict[str, float]:
    """Returns the noise multiplier at each epsilon."""
    config = configured(panel, "fedavg")
    federation = build(configuration.complete(config.to_dict())).federation
    multipliers = {}
    for target in EPSILONS:
        stated = guarantee(private(config, panel.level, target).get, federation)
        assert stated is not None
        multipliers[f"{target:g}"] = stated.noise_multiplier
    return multipliers


def _local(panel: Panel) -> dict[str, Any]:
    """Returns the accuracy of training alone, which releases nothing."""
    config = configured(panel, "local")
    point = _choose(panel, config, _points(GRID))
    return {"accuracy": {"any": _score(panel, config, point)}, "settings": grids.label(point)}


def _curve(panel: Panel, method: str) -> dict[str, Any]:
    """Returns a method's accuracy at each epsilon and without privacy."""
    config = configured(panel, method)
    point_without = _choose(panel, config, _points(GRID))
    chosen_at = private(config, panel.level, CHOSEN_AT)
    point = _choose(panel, chosen_at, _points(GRID, CLIP_NORMS))
    scores = {
        f"{target:g}": _score(panel, private(config, panel.level, target), point)
        for target in EPSILONS
    }
    scores[NO_PRIVACY] = _score(panel, config, point_without)
    return {
        "accuracy": scores,
        "settings": grids.label(point),
        "settings without privacy": grids.label(point_without),
    }


def _points(rates: Sequence[float], clip_norms: Sequence[float] = ()) -> list[Point]:
    """Returns combinations of learning rates and, if there are any, clipping norms."""
    if not clip_norms:
        return [{"learning_rate": rate} for rate in rates]
    return [
        {"privacy_clip_norm": norm, "learning_rate": rate}
        for norm, rate in itertools.product(clip_norms, rates)
    ]


def _choose(panel: Panel, config: ConfigDict, points: Sequence[Point]) -> Point:
    """Trains missing runs of a grid, and returns the point with the best validation accuracy."""
    folder = _folder(panel, "tuning")
    trial = Trial(config.algorithm, config, points, len(points))
    trials.run([trial], 1, folder, None)
    best = choice.best_point(trials.collect(trial, 1, folder))
    if best is None:
        raise UsageError(f"{config.algorithm} diverged with every learning rate")
    return best.point


def _score(panel: Panel, config: ConfigDict, point: Point) -> dict[str, Any]:
    """Trains missing runs of --seeds seeds, and returns mean and deviation of the test accuracy."""
    folder = _folder(panel, "runs")
    config = config.copy_and_resolve_references()
    config.seed = FIRST_SEED
    trial = Trial(config.algorithm, config, [point], 1)
    trials.run([trial], SEEDS.value, folder, None)
    (finished,) = trials.collect(trial, SEEDS.value, folder)
    return mean_std([accuracy(run) for run in finished.runs.values()])


def _folder(panel: Panel, stage: str) -> Path:
    return Path(study.OUT.value) / f"epsilon-{DATASET.value}" / f"{panel.level}-{stage}"


def _draw(numbers: Mapping[str, Any]) -> Figure:
    """Draws accuracy over epsilon, a panel per level, with training alone as a dashed line."""
    figure = Figure(figsize=(8.5, 3.8), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, PANELS, strict=True):
        _draw_panel(axis, numbers[panel.level])
        axis.set(title=f"{panel.level} level: protects {panel.protects}", xlabel="ε")
    axes[0].set_ylabel("accuracy (%)")
    lines: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        lines |= zip(labels, handles, strict=True)
    figure.legend(
        lines.values(), lines, loc="outside lower center", ncols=len(lines), frameon=False
    )
    return figure


def _draw_panel(axis: Axes, rows: Mapping[str, Any]) -> None:
    local = rows["local"]["accuracy"]["any"]
    axis.axhline(local["mean"], color="0.3", linestyle="--", label=table_label("local"))
    if local["std"] is not None:
        low, high = local["mean"] - local["std"], local["mean"] + local["std"]
        axis.axhspan(low, high, color="0.3", alpha=0.15, linewidth=0)
    ticks = [*(f"{target:g}" for target in EPSILONS), NO_PRIVACY]
    for method, colour in zip(METHODS, COLOURS, strict=False):
        if method in rows:
            scores = [rows[method]["accuracy"][tick] for tick in ticks]
            means = [score["mean"] for score in scores]
            spread = None if scores[0]["std"] is None else [score["std"] for score in scores]
            axis.errorbar(
                range(len(ticks)),
                means,
                spread,
                marker="o",
                markersize=4,
                capsize=3,
                color=colour,
                label=table_label(method),
            )
    axis.set_xticks(range(len(ticks)), ["∞" if tick == NO_PRIVACY else tick for tick in ticks])
    axis.grid(axis="y", alpha=0.3)
