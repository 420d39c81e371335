"""A node's own examples, read as its own file says, and what the node says of them.

Nothing here sees a request. Only `NodeExamples.facts` leaves the node: counts, shapes, words
that the owner has stated, and sums for a normalisation.
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
from fedjax_pfl.data.numbers import row_chunks
from fedjax_pfl.deploy import schema, vocabulary
from fedjax_pfl.deploy.node_file import NodeFile
from fedjax_pfl.deploy.programs import single
from fedjax_pfl.deploy.schema import InvalidError
from fedjax_pfl.settings import configuration


class NodeExamples(NamedTuple):
    """A node's examples, and what it says of them."""

    data: FederatedData  # of one client
    facts: dict[str, Any]  # plain data, which leaves the node

    def digest(self) -> str:
        """Returns a digest of the examples, which stays at the node."""
        found = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode())
        for leaf in jax.tree.leaves(self.data):
            for part in row_chunks(np.asarray(leaf)):
                found.update(part.tobytes())
        return found.hexdigest()


def read(file: NodeFile) -> NodeExamples:
    """Reads what a node's file names.

    Raises UsageError for a file that cannot be read so, whose text may quote the examples, and
    InvalidError for examples of which a node says nothing, whose text does not.
    """
    settings = configuration.complete(file.data)
    kind = data.source_name(settings.dataset)
    of_source = settings.get(kind, {})
    dataset = data.load(
        settings.dataset,
        settings.data_dir,
        fraction=settings.fraction,
        fraction_seed=settings.partition_seed,
        **dict(of_source),
    )
    if ":" in settings.dataset:  # not one that everybody can have
        index = of_source.get("categories") == "index"
        dataset = vocabulary.stated(dataset, file.labels, file.words, index)
    split: dict[str, Any] = dict(
        seed=settings.partition_seed,
        split=settings.split,
        test_fraction=settings.test_fraction,
        validation_fraction=settings.validation_fraction,
        validation_examples=settings.validation_examples,
    )
    if "clients" in file.data:
        return _shared(dataset, settings, file.client, split)
    wanted = dataset.normalise
    summed = wanted is not None and wanted.scope == "federation"
    if summed and wanted is not None:  # by the sums of all nodes, and not rounded before
        dataset = dataset._replace(normalise=wanted._replace(scope=LATER))
    arrays, federation, _ = data.federate(dataset, "iid", clients=1, **split)
    metadata, more = dataset.metadata or {}, dict[str, Any]()
    if "classes" in metadata:
        more["classes"] = list(metadata["classes"])
    if "input" in metadata:  # to be compared, and not to be read
        text = json.dumps([metadata["input"], metadata.get("label"), file.words]).encode()
        more["input"] = hashlib.sha256(text).hexdigest()
    if summed and wanted is not None:
        more |= _sums(arrays, wanted.features, wanted.targets, file.least_rows)
    return NodeExamples(arrays, _facts(_rounded(arrays), federation, **more))


def _rounded(arrays: FederatedData) -> FederatedData:
    """Returns examples in the types that programs take."""
    x, y = (np.asarray(part) for part in (arrays.x, arrays.y))
    parts: Any = (a.astype(np.float32) if a.dtype.kind == "f" else a for a in (x, y))
    return arrays._replace(**dict(zip("xy", parts, strict=True)))


def _shared(
    dataset: Dataset, settings: Any, i: int | None, split: Mapping[str, Any]
) -> NodeExamples:
    """The part of client i, as a simulation deals the dataset."""
    if i is None or i >= settings.clients:
        raise UsageError(f"client is {i}, and clients {settings.clients}; numbers begin at 0")
    whole, federation, _ = data.federate(
        dataset,
        settings.partition,
        settings=dict(settings.get(settings.partition, {})),
        clients=settings.clients,
        permute_labels=settings.permute_labels,
        held_out=settings.held_out,
        **split,
    )
    mine = single(whole, i)
    return NodeExamples(mine, _facts(mine, federation))


def _facts(arrays: FederatedData, federation: Federation, **more: Any) -> dict[str, Any]:
    """Returns what a node says of its examples, as `schema.DESCRIBED` has it.

    Args:
      more: names of classes, a digest of the inputs, sums.
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
        **more,
    }
    return json.loads(json.dumps(facts))


def _sums(
    arrays: FederatedData, which: np.ndarray, targets: bool, least_rows: int
) -> dict[str, Any]:
    """n, mean and sum of squares about it of the numbers that are normalised, and of no others."""
    rows = np.asarray(arrays.train.rows[0])[: int(arrays.train.size[0])]
    if len(rows) < least_rows:
        raise InvalidError(
            "it has fewer training examples than the rows that its own file lets sums be taken over"
        )
    x = np.asarray(arrays.x)[rows][..., np.asarray(which, bool)]
    values = [x.reshape(-1, x.shape[-1]).astype(np.float64)] if x.shape[-1] else []
    if targets:
        values.append(np.asarray(arrays.y)[rows].astype(np.float64))
    if len({len(part) for part in values}) > 1:
        raise UsageError("inputs of several positions cannot be normalised with a target; say none")
    values_of_rows = np.concatenate(values, 1)
    mean = values_of_rows.mean(0)
    return {
        "sums": {
            "n": len(values_of_rows),
            "mean": mean.tolist(),
            "m2": np.square(values_of_rows - mean).sum(0).tolist(),
        },
        "normalise": {"features": np.asarray(which, bool).tolist(), "targets": bool(targets)},
    }


def fitted(mine: NodeExamples, description: Mapping[str, Any], i: int) -> FederatedData:
    """Returns client i's examples normalised as the federation describes.

    Raises InvalidError where the description is not of these examples.
    """
    arrays, facts = mine
    counts = description["counts"]
    alike = {name: facts[name] for name in (*schema.ALIKE, *schema.ALIKE_OPTIONAL) if name in facts}
    if i >= len(counts) or counts[i] != facts["counts"] or description["alike"] != alike:
        raise InvalidError("the federation that it describes does not have this node's examples")
    wanted = facts.get("normalise", {"features": [], "targets": False})
    which = np.array(wanted["features"], bool)
    width = int(which.sum()) + (np.shape(arrays.y)[-1] if wanted["targets"] else 0)
    mean, deviation = (np.array(description.get(k, [])) for k in ("mean", "deviation"))
    if not len(mean) == len(deviation) == width:
        raise InvalidError("it describes a normalisation of other columns than this node's")
    n, x, y = int(which.sum()), arrays.x, arrays.y
    if n:
        x = np.array(x)
        x[..., which] = (x[..., which] - mean[:n]) / deviation[:n]
    if wanted["targets"]:
        y = (y - mean[n:]) / deviation[n:]
    return _rounded(arrays._replace(x=x, y=y))
