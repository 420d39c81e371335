"""Studies of many methods that belong to no paper.

python -m experiments.studies methods leakage
python -m experiments.studies methods epsilon --seeds=3

leakage  accuracy and what a curious server learns from uploads of runs of 30 rounds; four methods
         also with private gradients, FedAvg also with private uploads. Reconstructed images: PSNR
         in dB in the first round and after the last. Membership: AUC.
epsilon  accuracy at epsilon 1, 2, 4, 8 and without privacy, next to training alone; digits, mnist
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.papers import study
from experiments.papers.methods.epsilon import OWN_SETTINGS, epsilon
from experiments.papers.study import COLOURS, DATASET, ROUNDS, mean_std, runs
from experiments.papers.table import accuracy
from fedjax_pfl.audit.report import infer_membership, invert
from fedjax_pfl.presets import baseline
from fedjax_pfl.report.method_labels import table_label
from fedjax_pfl.runs.result import Result

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
    "fedfomo",
    "fedproto",
    "pfedla",
    "pfedhn_pc",
)
PRIVACY = {"privacy": "example", "privacy_epsilon": 50.0, "privacy_clip_norm": 1.0}
LOCAL_PRIVACY = {**PRIVACY, "privacy": "local"}
NOISES = {  # by name: settings, and methods that are also run with them
    "epsilon 50": (PRIVACY, ("fedavg", "fedper", "pfedla", "pfedhn_pc")),
    "local epsilon 50": (LOCAL_PRIVACY, ("fedavg",)),
}
COMPARED_INPUTS = ("pfedhn_pc",)  # the first round is also attacked with `compare_inputs`
AUDITED = 1  # clients of each run whose images are reconstructed


def leakage() -> tuple[dict[str, Any], Figure]:
    """Audits a run of each method; PSNR is a mean over one image of each run."""
    numbers: dict[str, Any] = {}
    worst_case: dict[str, Any] = {}  # the attacker knows the private layers
    inputs: dict[str, Any] = {}
    for name in study.select_methods(METHODS):
        config = baseline.get_config(f"{name}-{DATASET.value}")
        config.update(learning_rate=0.05, evaluate_after=False)
        if name == "fedfomo":
            config.validation_fraction = 0.2
        results = runs(config, f"leakage-{name}", ROUNDS.value)
        numbers[name] = _audit_runs(results)
        if name != "local" and invert(results[0], 0, iterations=1).unknown:
            worst_case[name] = _psnr(results, knows_private=True)
        if name in COMPARED_INPUTS:
            inputs[name] = {
                head: _mean_psnr(results, first=True, compare_inputs=True, knows_private=knows)
                for head, knows in (("PSNR first", False), ("private layers known", True))
            }
        for noise, (settings, methods) in NOISES.items():
            if name in methods:
                config.update(settings)
                noised = runs(config, f"leakage-{name}-{noise}", ROUNDS.value)
                numbers[f"{name}, {noise}"] = _audit_runs(noised)
    noises = {noise: settings for noise, (settings, _) in NOISES.items()}
    figure = _scatter(numbers)
    extra = {"private layers known": worst_case, "inputs compared": inputs, "noise": noises}
    return {**numbers, **extra}, figure


def _audit_runs(results: Sequence[Result]) -> dict[str, Any]:
    """Returns means and deviations of accuracy, PSNR and AUC over runs; None without an attack."""
    auc: dict[str, list[float]] = {"AUC served": [], "AUC uploaded": [], "AUC body": []}
    for result in results:
        inferred = infer_membership(result, range(result.federation.clients))
        for model, scores in inferred.items():
            auc[f"AUC {model}"] += [scores["auc"]] if scores else []
    return {
        "accuracy": mean_std([accuracy(result) for result in results]),
        **_psnr(results),
        **{head: mean_std(values) if values else None for head, values in auc.items()},
    }


def _psnr(results: Sequence[Result], *, knows_private: bool = False) -> dict[str, Any]:
    """Returns mean and deviation of the PSNR in the first and the last round, or None."""
    rounds = {"PSNR first": True, "PSNR last": False}
    return {
        head: _mean_psnr(results, first=first, knows_private=knows_private)
        for head, first in rounds.items()
    }


def _mean_psnr(results: Sequence[Result], **settings: Any) -> dict[str, Any] | None:
    """Returns mean and deviation of the PSNR by `invert` with these settings, or None."""
    inversions = [
        invert(result, client, **settings) for result in results for client in range(AUDITED)
    ]
    values = [value for inversion in inversions for value in inversion.psnr]
    return mean_std(values) if values else None


def _scatter(numbers: Mapping[str, Any]) -> Figure:
    """Draws accuracy against the PSNR of reconstructions in the last round, if there are any."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    attacked = [(name, row) for name, row in numbers.items() if row["PSNR last"]]
    methods = [name for name, _ in attacked if "," not in name]
    markers = dict(zip(methods, "os^vDPX*<>hpd", strict=False))
    for name, row in attacked:
        place = row["PSNR last"]["mean"], row["accuracy"]["mean"]
        method, _, noise = name.partition(",")
        label = table_label(method) + noise.replace(" epsilon", ", ε =")
        colour = COLOURS[0 if not noise else 1 + ("local" in noise)]
        axis.plot(*place, markers[method], color=colour, label=label)
    axis.set(xlabel="PSNR of reconstructed images, last round (dB)", ylabel="accuracy (%)")
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    return figure


OPTIONS = {
    "leakage": study.StudyOptions(30, 300, ("methods",), own_settings=("privacy*",)),
    "epsilon": study.StudyOptions(30, 300, ("methods",), own_settings=OWN_SETTINGS),
}
STUDIES: dict[str, study.Study] = {"leakage": leakage, "epsilon": epsilon}
