"""Measures honest clients' accuracy with attackers, and the weight that they give to attackers.

python -m experiments.attackers                     trains what is missing, and draws the picture
python -m experiments.attackers --dataset=mnist     the same for a fifth of MNIST
python -m experiments.attackers --draw              only draws the existing results again

Each run is FedAvg under a rule, or a personalised method, on ten clients (Dirichlet, alpha 0.5),
trained with three seeds as one program. Rules expect the true share of attackers. Results are in
experiments/results/attackers-DATASET.json.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments.papers.table import accuracy
from fedjax_pfl.cli.command import run_script
from fedjax_pfl.cli.configs import define_data_dir
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.report.drawing import COLOURS, INK, WIDTH, new_figure, style_axes
from fedjax_pfl.runs import runner
from fedjax_pfl.settings import configuration, selection

RESULTS = Path(__file__).parent / "results"
ATTACKS = {"label_flip": "flipped labels", "sign_flip": "flipped updates"}
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4)
MIXING_SHARE = 0.3
DATASETS: dict[str, dict[str, Any]] = {"digits": {}, "mnist": {"fraction": 0.2}}
SETTINGS: dict[str, Any] = {
    "partition": "dirichlet",
    "dirichlet.alpha": 0.5,
    "validation_fraction": 0.2,
    "model": "mlp",
    "clients": 10,
    "rounds": 30,
    "eval_every": 30,
    "local_epochs": 2,
    "batch_size": 32,
    "learning_rate": 0.05,
    "seeds": 3,
}
ROWS: dict[str, dict[str, Any]] = {
    "FedAvg, mean": {"algorithm": "fedavg"},
    "FedAvg, median": {"algorithm": "fedavg", "robust_rule": "median"},
    "FedAvg, Krum": {"algorithm": "fedavg", "robust_rule": "krum"},
    "FedAvg, multi-Krum": {"algorithm": "fedavg", "robust_rule": "multi_krum"},
    "Local": {"algorithm": "local"},
    "FedPer": {"algorithm": "fedper"},
    "pFedLA": {"algorithm": "pfedla", "pfedla.rate": 1.0},
    "FedFomo": {"algorithm": "fedfomo"},
    "FedAMP": {"algorithm": "fedamp"},
    "Factorized-FL": {"algorithm": "factorized_fl"},
}
# Array of the mixing weights of the methods that have some.
MIXING = {"pFedLA": "alpha", "FedFomo": "affinity", "FedAMP": "xi", "Factorized-FL": "weights"}


def attackers_weight(weights: np.ndarray, is_attacker: np.ndarray) -> float:
    """Returns the mean part of the others' weight that an honest client gives to attackers.

    `weights` is [N, N] or [N, layers, N], with the receiving client on axis 0. Negative weights
    count as 0. Clients that give no weight to others do not count. Returns 0 if none does.
    """
    weights = np.maximum(weights if weights.ndim == 2 else weights.mean(1), 0)
    weights = weights * ~np.eye(len(weights), dtype=bool)
    total = weights.sum(1)
    honest = ~is_attacker & (total > 0)
    parts = weights[honest][:, is_attacker].sum(1) / total[honest]
    return float(parts.mean()) if len(parts) else 0.0


def missing_runs(record: Mapping[str, Any]) -> list[tuple[str, float, str]]:
    """Returns attack, share and row of each run without a result in a record.

    Without attackers both attacks are the same run, which is recorded as label_flip.
    """
    runs = [(attack, share, row) for attack in ATTACKS for share in SHARES for row in ROWS]
    return [
        (attack, share, row)
        for attack, share, row in runs
        if (share or attack == "label_flip")
        and str(share) not in record.get(row, {}).get(attack, {})
    ]


def measure(dataset: Mapping[str, Any], row: str, attack: str, share: float) -> dict[str, Any]:
    """Returns the last accuracy of honest clients, and the weight of attackers, for each seed.

    `dataset` has the settings of the data.
    """
    settings = {**SETTINGS, **dataset, "attack": attack, "attack_share": share, **ROWS[row]}
    if settings.get("robust_rule") in ("krum", "multi_krum"):  # median does not read it
        settings["robust_share"] = share
    config = configuration.complete(selection.nested(settings))
    results = list(runner.run_all(config).values())
    measured = {
        name: [accuracy(result, key=f"accuracy_{key}") / 100 for result in results]
        for name, key in (("accuracy", "mean"), ("worst10", "worst10"))
    }
    if row in MIXING and share:
        is_attacker = results[0].phases[0].inputs.is_attacker
        arrays = [np.asarray(result.observations[MIXING[row]][1][-1]) for result in results]
        measured["weight"] = [attackers_weight(array, is_attacker) for array in arrays]
    return measured


def draw(record: dict[str, Any]) -> Any:
    """Returns the figure: accuracy over the share of attackers, and the weights of attackers."""
    figure = new_figure("Honest clients among attackers", 2 * WIDTH, 4.6)
    *tables, bars = figure.subplots(1, 3, width_ratios=(1, 1, 0.8))
    for axes, (attack, name) in zip(tables, ATTACKS.items(), strict=True):
        by_row = [record[row]["label_flip"] | record[row][attack] for row in ROWS]
        values = [[100 * np.mean(r[str(share)]["accuracy"]) for share in SHARES] for r in by_row]
        axes.imshow(values, cmap="RdYlBu", vmin=10, vmax=100, alpha=0.75, aspect="auto")
        for i, j in np.ndindex(len(ROWS), len(SHARES)):
            axes.text(j, i, f"{values[i][j]:.0f}", ha="center", va="center", color=INK)
        axes.axhline(3.5, color="white", linewidth=5)  # between rules and personalised methods
        axes.set_xticks(range(len(SHARES)), [f"{share:.0%}" for share in SHARES])
        axes.set_yticks(range(len(ROWS)), ROWS)
        axes.set_title(f"Accuracy (%), {name}", fontsize=11, color=INK)
        axes.set_xlabel("attackers")
        axes.tick_params(length=0, labelleft=axes is tables[0])
        axes.spines[:].set_visible(False)
    style_axes(bars).grid(visible=False)
    for n, (attack, name) in enumerate(ATTACKS.items()):
        for i, row in enumerate(MIXING):
            weight = 100 * np.mean(record[row][attack][str(MIXING_SHARE)]["weight"])
            place, label = i - 0.2 + 0.4 * n, name if i == 0 else None
            bars.barh(place, weight, 0.38, color=COLOURS[n], label=label)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            bars.text(weight + 0.6, place, f"{weight:.0f}", va="center", fontsize=9, bbox=box)
    equal = 100 * MIXING_SHARE * SETTINGS["clients"] / (SETTINGS["clients"] - 1)
    bars.axvline(equal, color=INK, linestyle=":", label="equal weights")
    bars.set_yticks(range(len(MIXING)), MIXING)
    bars.invert_yaxis()
    bars.set(xlim=(0, 40), xlabel="attackers' part of the others' weight (%)")
    bars.set_title(f"Weight of {MIXING_SHARE:.0%} attackers", fontsize=11, color=INK)
    bars.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    return figure


def main(argv: Any) -> None:
    """Trains, writes the record after each result, and draws it."""
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; see --help")
    options = flags.FLAGS
    path = RESULTS / f"attackers-{options.dataset}.json"
    dataset = {"dataset": options.dataset, "data_dir": options.data_dir}
    dataset |= DATASETS[options.dataset]
    record = json.loads(path.read_text()) if path.exists() else {}
    missing = missing_runs(record)
    if options.draw and missing:
        raise UsageError(f"{path.name} lacks {len(missing)} of the results; leave out --draw")
    for attack, share, row in missing:
        by_share = record.setdefault(row, {}).setdefault(attack, {})
        by_share[str(share)] = measure(dataset, row, attack, share)
        path.write_text(json.dumps(record, indent=1) + "\n")
    draw(record).savefig(path.with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    # Here, because other commands have flags of these names.
    flags.DEFINE_bool("draw", False, "Draw existing results and train nothing.")
    flags.DEFINE_enum("dataset", "digits", list(DATASETS), "Dataset; digits is embedded.")
    define_data_dir(flags.FLAGS)
    run_script(main, __doc__)
