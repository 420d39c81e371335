"""A node's examples and the description of them that leaves the node.

This module never sees a request. Only `NodeExamples.facts` leaves the node: counts, shapes, class
names from the node's file, and sums for normalisation.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl import data
from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.data.dataset import LATER, Dataset
from fedjax_pfl.data.normalise import select_constants
from fedjax_pfl.data.numbers import row_chunks
from fedjax_pfl.deploy import schema, vocabulary
from fedjax_pfl.deploy.node_file import NodeFile
from fedjax_pfl.deploy.programs import single_client
from fedjax_pfl.deploy.schema import InvalidError
from fedjax_pfl.settings import configuration


class NodeExamples(NamedTuple):
    """A node's examples and their description."""

    data: FederatedData  # of one client
    facts: dict[str, Any]  # description; passes `schema.NODE_DESCRIPTION`
    metadata: Mapping[str, Any]  # stays at the node: names, mean and deviation if known

    def digest(self) -> str:
        """Returns a SHA-256 digest of the examples, which never leaves the node."""
        digest = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode())
        for leaf in jax.tree.leaves(self.data):
            for chunk in row_chunks(np.asarray(leaf)):
                digest.update(chunk.tobytes())
        return digest.hexdigest()


def read(file: NodeFile) -> NodeExamples:
    """Reads the dataset that a node's file names, and describes it.

    Raises UsageError if the dataset cannot be read; its text may quote examples and must not be
    sent. Raises InvalidError, whose text is safe to send, if there are too few examples.
    """
    settings = configuration.complete(file.data)
    kind = data.source_name(settings.dataset)
    source_settings = settings.get(kind, {})
    dataset = data.load(
        settings.dataset,
        settings.data_dir,
        fraction=settings.fraction,
        fraction_seed=settings.partition_seed,
        **dict(source_settings),
    )
    if ":" in settings.dataset:  # a file of the node, not a public dataset
        index = source_settings.get("categories") == "index"
        dataset = vocabulary.apply_vocabulary(dataset, file.labels, file.words, index)
    split: dict[str, Any] = dict(
        seed=settings.partition_seed,
        split=settings.split,
        test_fraction=settings.test_fraction,
        validation_fraction=settings.validation_fraction,
        validation_examples=settings.validation_examples,
    )
    if "clients" in file.data:
        return _read_shared(dataset, settings, file.client, split)
    normalisation, columns, targets = dataset.normalise, np.zeros(0, bool), False
    if normalisation is not None and normalisation.scope == "federation":
        # Kept as read: the sums of all nodes are needed first, and float32 would round the numbers.
        dataset = dataset._replace(normalise=normalisation._replace(scope=LATER))
        columns, targets = normalisation.features, normalisation.targets
    elif normalisation is not None:  # the client's own inputs, and targets over the federation
        dataset = dataset._replace(normalise=normalisation._replace(targets=False))
        columns, targets = np.zeros_like(normalisation.features), normalisation.targets
    arrays, federation = data.federate(dataset, "iid", clients=1, **split)
    metadata, optional_facts = dataset.metadata or {}, dict[str, Any]()
    if "classes" in metadata:
        optional_facts["classes"] = list(metadata["classes"])
    if "input" in metadata:  # a digest: nodes compare column names without sending them
        names = [metadata["input"], metadata.get("label"), file.words]
        text = json.dumps(names, sort_keys=True)  # owners may write `words` in any order
        optional_facts["input"] = hashlib.sha256(text.encode()).hexdigest()
    if columns.any() or targets:
        optional_facts |= _sums(arrays, columns, targets, file.least_rows)
    facts = _facts(_as_float32(arrays), federation, **optional_facts)
    return NodeExamples(arrays, facts, select_constants(federation.metadata or {}, 0))


def _as_float32(arrays: FederatedData) -> FederatedData:
    """Converts inputs and targets of floating point to float32; other types stay the same."""

    def cast(array: Any) -> Any:
        array = np.asarray(array)
        return array.astype(np.float32) if array.dtype.kind == "f" else array

    return arrays._replace(x=cast(arrays.x), y=cast(arrays.y))


def _read_shared(
    dataset: Dataset, settings: Any, i: int | None, split: Mapping[str, Any]
) -> NodeExamples:
    """Returns the part of client `i` in a dataset that is partitioned as in a simulation.

    `settings` have the partition, and `split` has the settings of the split of the examples.
    Raises UsageError if `i` is None or not the id of a client.
    """
    if i is None or i >= settings.clients:
        raise UsageError(f"client must be from 0 to {settings.clients - 1}, got {i}")
    all_arrays, federation = data.federate(
        dataset,
        settings.partition,
        settings=dict(settings.get(settings.partition, {})),
        clients=settings.clients,
        permute_labels=settings.permute_labels,
        held_out=settings.held_out,
        **split,
    )
    arrays, metadata = single_client(all_arrays, i), select_constants(federation.metadata or {}, i)
    return NodeExamples(arrays, _facts(arrays, federation), metadata)


def _facts(arrays: FederatedData, federation: Federation, **optional_facts: Any) -> dict[str, Any]:
    """Describes a node's examples; the result passes `schema.NODE_DESCRIPTION`.

    `federation` has the facts about this client. `optional_facts` are the optional fields: class
    names, digest of the input names, and sums.
    """
    splits = ("train", "validation", "test")
    constants = {name: getattr(arrays, name) for name in ("scale", "shift", "label_map", "classes")}
    facts = {
        "counts": {s: int(np.asarray(getattr(arrays, s).size)[0]) for s in splits},
        "widths": {s: int(getattr(arrays, s).rows.shape[1]) for s in splits},
        "input_shape": list(federation.input_shape),
        "input_dtype": federation.input_dtype,
        "stored_dtype": np.asarray(arrays.x).dtype.name,
        "outputs": federation.outputs,
        "each": list(federation.positions),
        "target": [np.asarray(arrays.y).dtype.name, list(arrays.y.shape[1:])],
        "constants": {
            name: [np.asarray(value).dtype.name, list(np.shape(value))]
            for name, value in constants.items()
            if value is not None
        },
        **optional_facts,
    }
    return json.loads(json.dumps(facts))


def _sums(
    arrays: FederatedData, columns: np.ndarray, targets: bool, least_rows: int
) -> dict[str, Any]:
    """Computes count, mean and sum of squared deviations of the normalised columns.

    Returns the fields "sums" and "normalise" of `schema.NODE_DESCRIPTION`.
    `columns`, bool [D], and `targets` say which inputs are normalised, and if targets are.
    Raises InvalidError if there are fewer than `least_rows` training examples.
    """
    rows = np.asarray(arrays.train.rows[0])[: int(arrays.train.size[0])]
    if len(rows) < least_rows:
        raise InvalidError(
            "it has fewer training examples than the least_rows of its own file requires for sums"
        )
    x = np.asarray(arrays.x)[rows][..., np.asarray(columns, bool)]
    values = [x.reshape(-1, x.shape[-1]).astype(np.float64)] if x.shape[-1] else []
    if targets:
        values.append(np.asarray(arrays.y)[rows].astype(np.float64))
    if len({len(part) for part in values}) > 1:
        raise UsageError(
            "inputs with several positions cannot be normalised together with targets; set "
            "normalise to none"
        )
    table = np.concatenate(values, 1)
    mean = table.mean(0)
    return {
        "sums": {
            "n": len(table),
            "mean": mean.tolist(),
            "m2": np.square(table - mean).sum(0).tolist(),
        },
        "normalise": {"features": np.asarray(columns, bool).tolist(), "targets": bool(targets)},
    }


def normalise(examples: NodeExamples, description: Mapping[str, Any], i: int) -> FederatedData:
    """Normalises client `i`'s examples with the federation's mean and deviation, to float32.

    Examples that need no normalisation keep their values.
    Raises InvalidError if the federation's description does not fit these examples.
    """
    arrays, facts = examples.data, examples.facts
    counts, shared = description["counts"], schema.shared_fields(facts)
    if i >= len(counts) or counts[i] != facts["counts"] or description["alike"] != shared:
        raise InvalidError(
            "the federation that it describes does not have this node's examples; start a new run"
        )
    normalised = facts.get("normalise", {"features": [], "targets": False})
    columns = np.array(normalised["features"], bool)
    width = int(columns.sum()) + (np.shape(arrays.y)[-1] if normalised["targets"] else 0)
    mean, deviation = (np.array(description.get(k, [])) for k in ("mean", "deviation"))
    if not len(mean) == len(deviation) == width:
        raise InvalidError("it describes a normalisation of other columns than this node's")
    n, x, y = int(columns.sum()), arrays.x, arrays.y
    if n:
        x = np.array(x)
        x[..., columns] = (x[..., columns] - mean[:n]) / deviation[:n]
    if normalised["targets"]:
        y = (y - mean[n:]) / deviation[n:]
    return _as_float32(arrays._replace(x=x, y=y))
