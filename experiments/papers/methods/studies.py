"""Studies of many methods that belong to no paper.

python -m experiments.studies methods leakage

leakage  accuracy, and what a curious server learns from uploads: reconstructed images (PSNR in dB
         at the first round and after the last) and membership (AUC); runs of 30 rounds
"""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.papers import study
from experiments.papers.study import COLOURS, DATASET, ROUNDS, mean_std, runs
from experiments.papers.table import accuracy
from fedjax_pfl.audit.report import infer_membership, invert
from fedjax_pfl.presets import baseline
from fedjax_pfl.report.method_labels import table_label

METHODS = (
    "local",
    "fedavg",
    "fedprox",
    "scaffold",
    "pfedme",
    "ditto",
    "fedper",
    "fedrep",
    "lg_fedavg",
    "fedproto",
    "pfedla",
    "pfedhn_pc",
)
HEADS = ("accuracy", "PSNR first", "PSNR last", "AUC served", "AUC uploaded")
AUDITED = 3  # clients of each run whose images are reconstructed


def leakage() -> tuple[dict[str, Any], Figure]:
    """Audits a run of each method; PSNR is a mean over one image of each of three clients."""
    numbers: dict[str, Any] = {}
    for name in study.select_methods(METHODS):
        config = baseline.get_config(f"{name}-{DATASET.value}")
        config.update(learning_rate=0.05, evaluate_after=False)
        columns: dict[str, list[float]] = {head: [] for head in HEADS}
        for result in runs(config, f"leakage-{name}", ROUNDS.value):
            columns["accuracy"].append(accuracy(result))
            for head, first in (("first", True), ("last", False)):
                for client in range(AUDITED):
                    columns[f"PSNR {head}"] += invert(result, client, first=first).psnr
            inferred = infer_membership(result, range(result.federation.clients))
            for model, scores in inferred.items():
                columns[f"AUC {model}"] += [scores["auc"]] if scores else []
        numbers[name] = {
            head: mean_std(values) if values else None for head, values in columns.items()
        }
    return numbers, _scatter(numbers)


def _scatter(numbers: Mapping[str, Any]) -> Figure:
    """Draws accuracy against the PSNR of reconstructions in the last round."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    by_accuracy = sorted(numbers.items(), key=lambda item: item[1]["accuracy"]["mean"])
    for k, (name, row) in enumerate(by_accuracy):
        place = row["PSNR last"]["mean"], row["accuracy"]["mean"]
        axis.plot(*place, "o", color=COLOURS[0])
        side, offset = (("left", 6), ("right", -6))[k % 2]  # neighbours on different sides
        axis.annotate(
            table_label(name),
            place,
            xytext=(offset, -3),
            textcoords="offset points",
            ha=side,
            fontsize=8,
        )
    axis.set(xlabel="PSNR of reconstructed images, last round (dB)", ylabel="accuracy (%)")
    axis.margins(0.15)
    return figure


LENGTHS = {"": study.Length(30, 300)}
STUDIES: dict[str, study.Study] = {"leakage": leakage}
