"""Facts about a run's examples and initial weights beyond its configuration."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_pfl import data
from fedjax_pfl.data.normalise import without_client_constants
from fedjax_pfl.runs.build import Experiment


def example_facts(experiment: Experiment, partition: int = 0) -> dict[str, Any]:
    """Returns the content of data.json: facts about the examples beyond the configuration.

    These are the metadata of the dataset, `score_deviation` (of float targets, `_target_deviation`)
    and digests of files of the user: `digest` of examples, `initial_weights` and `speed_trace`.
    """
    config = experiment.phases[0].config
    examples, federation = experiment.partitions[partition]
    facts = without_client_constants(federation.metadata or {})
    if np.issubdtype(examples.y.dtype, np.floating):
        facts["score_deviation"] = _target_deviation(examples)
    if data.reads_own_files(config.dataset):
        owners = np.array(federation.owners or (), str)
        arrays = map(np.asarray, jax.tree.leaves(examples))
        facts["digest"] = data.digest([*arrays, owners])
    for name in ("initial_weights", "speed_trace"):
        if path := config[name]:
            facts[name] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    return facts


def _target_deviation(examples: data.FederatedData) -> float:
    """Returns the RMS error, over training examples and targets, of predicting target means."""
    rows, size = (np.asarray(part) for part in examples.train)
    used = rows[np.arange(rows.shape[1]) < size[:, None]]
    return float(np.sqrt(np.mean(np.var(np.asarray(examples.y)[used], 0, dtype=np.float64))))
