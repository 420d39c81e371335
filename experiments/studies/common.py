"""What studies share: a command line, runs that are done once, means over seeds, output files."""

import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from experiments.launch import DATA_DIR, fail, prepare_devices
from fedjax_pfl import runner
from fedjax_pfl.errors import UsageError

OUT = flags.DEFINE_string("out", "runs/studies", "Folder for runs, pictures and numbers.")
DATASET = flags.DEFINE_string("dataset", "mnist", "Dataset.")
ROUNDS = flags.DEFINE_integer("rounds", 60, "Rounds of each run.", lower_bound=2)
SEEDS = flags.DEFINE_integer("seeds", 1, "Seeds 0, 1, ...", lower_bound=1)
SET = flags.DEFINE_multi_string("set", [], "KEY=VALUE (as JSON), in every run; KEY may have a dot.")
METHODS = flags.DEFINE_list("methods", [], "Rows of a table to run. Default: all.")

Study = Callable[[], tuple[dict[str, Any], Figure | None]]


def run(config: ConfigDict, name: str, seed: int) -> runner.Result:
    """One run under OUT; a run that is there already is only read."""
    config.update(seed=seed, rounds=ROUNDS.value, data_dir=DATA_DIR.value)
    for pair in SET.value:
        key, _, value = pair.partition("=")
        *groups, last = key.split(".")
        level = config
        try:
            for group in groups:
                level = level[group]
            level[last] = json.loads(value)
        except (KeyError, AttributeError, ValueError, TypeError):
            raise UsageError(f"--set={pair} is no KEY=VALUE of this configuration") from None
    words = "-".join([name, DATASET.value, f"r{ROUNDS.value}", *SET.value, f"s{seed}"])
    path = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in words)
    print(f"{path} ...", flush=True)
    return runner.run(config, Path(OUT.value) / path)


def mean_std(values: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation over seeds; no deviation of one value."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "std": spread, "seeds": len(values)}


def accuracy(result: runner.Result, when: str = "before") -> float:
    """Mean accuracy over clients at the last evaluation, in per cent."""
    return 100 * result.metrics[-1][when]["accuracy_mean"]


def plateau(result: runner.Result) -> str:
    """Whether the last quarter of the evaluations is within half a point of the one before."""
    curve = [100 * line["before"]["accuracy_mean"] for line in result.metrics]
    quarter = len(curve) // 4
    if not quarter:
        return "too short to tell"
    last, earlier = np.mean(curve[-quarter:]), np.mean(curve[-2 * quarter : -quarter])
    return "plateau" if abs(last - earlier) <= 0.5 else "not converged"


def main(studies: dict[str, Study], argv: Sequence[str]) -> None:
    """Run the study that is named; write NAME-DATASET.json and .png; print the numbers."""
    if len(argv) != 2 or argv[1] not in studies:
        raise UsageError(f"name one study: {', '.join(studies)}")
    numbers, figure = studies[argv[1]]()
    out = Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    stem = f"{argv[1]}-{DATASET.value}"
    facts = {
        "study": argv[1],
        "dataset": DATASET.value,
        "rounds": ROUNDS.value,
        "seeds": SEEDS.value,
        "set": SET.value,
        "machine": f"{os.cpu_count()} cores {platform.machine()}, {jax.default_backend()}",
        "versions": {name: metadata.version(name) for name in ("jax", "flax", "optax")},
        **numbers,
    }
    (out / f"{stem}.json").write_text(json.dumps(facts, indent=2) + "\n")
    if figure is not None:
        figure.savefig(out / f"{stem}.png", dpi=110, bbox_inches="tight")
    print(json.dumps(numbers, indent=2))
    print(f"\n{out / stem}.json" + ("" if figure is None else f", {stem}.png"))


def launch(studies: dict[str, Study]) -> None:
    """The command line of a module of studies."""
    prepare_devices()
    try:
        app.run(lambda argv: main(studies, argv))
    except UsageError as error:
        fail(error)


if __name__ == "__main__":
    sys.exit("run a study of one system, such as python -m experiments.studies.pfedla")
