"""A node's own examples: from its own files, or its part of a dataset that all can build."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from fedjax_pfl import data
from fedjax_pfl.config import configuration
from fedjax_pfl.config.settings import having
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData
from fedjax_pfl.data.dataset import LATER, Dataset
from fedjax_pfl.deploy.assembly import Own, facts
from fedjax_pfl.deploy.programs import single


def shared(settings: ConfigDict, words: configuration.Words, i: int) -> Own:
    """Client i's part of the dataset that the configuration names, as a simulation deals it."""
    whole, federation, _ = data.federate(
        _loaded(settings, words),
        settings.partition,
        settings=_own(settings, settings.partition),
        clients=settings.clients,
        seed=settings.partition_seed,
        permute_labels=settings.permute_labels,
        held_out=settings.held_out,
        groups=max(1, len(settings.groups)),
        **_split(settings),
    )
    return Own(single(whole, i), facts(single(whole, i), federation))


def own(settings: ConfigDict, words: configuration.Words, given: Mapping[str, Any]) -> Own:
    """What a node's own files hold.

    Args:
      given: settings of the data in the place of the configuration's: `dataset`, as csv:FILE, and
        the source's own under its name.
    """
    allowed = {*having("defines_data"), "data_dir", data.kind(str(given.get("dataset", "")))}
    for name in given:
        if name not in allowed:
            raise UsageError(f"{name} is no setting of a node's data; it may say {_list(allowed)}")
    mine = settings.copy_and_resolve_references()
    configuration.override(mine, given)
    dataset = _loaded(mine, words)
    wanted = dataset.normalise
    apart = wanted is not None and wanted.by == "federation"
    if apart and wanted is not None:  # by what all nodes' sums say, and not rounded before
        dataset = dataset._replace(normalise=wanted._replace(by=LATER))
    arrays, federation, _ = data.federate(
        dataset, "iid", clients=1, seed=mine.partition_seed, **_split(mine)
    )
    more: dict[str, Any] = {}
    about = dict(federation.about or {})
    if "classes" in about:
        more["classes"] = [str(name) for name in about["classes"]]
    if "input" in about:
        more["input"] = about["input"]
    if apart and wanted is not None:
        more |= _sums(arrays, wanted.features, wanted.targets)
    return Own(arrays, facts(_rounded(arrays), federation, **more))


def _rounded(arrays: FederatedData) -> FederatedData:
    """Returns examples in the types that programs take."""
    x, y = (np.asarray(part) for part in (arrays.x, arrays.y))
    parts: Any = (a.astype(np.float32) if a.dtype.kind == "f" else a for a in (x, y))
    return arrays._replace(**dict(zip("xy", parts, strict=True)))


def fitted(mine: Own, description: Mapping[str, Any]) -> FederatedData:
    """A node's examples as the federation has them: its numbers of classes, and normalised."""
    arrays, said = mine
    if names := said.get("classes"):
        place = {name: number for number, name in enumerate(description["classes"])}
        arrays = arrays._replace(
            y=np.array([place[name] for name in names], np.int32)[np.asarray(arrays.y)]
        )
    if "mean" not in description:
        return arrays
    wanted, width = said["normalise"], len(said["normalise"]["features"])
    mean, deviation = (np.array(description[k]) for k in ("mean", "deviation"))
    which = np.array(wanted["features"], bool)
    x: Any = (arrays.x - np.where(which, mean[:width], 0)) / np.where(which, deviation[:width], 1)
    y: Any = (arrays.y - mean[width:]) / deviation[width:] if wanted["targets"] else arrays.y
    return _rounded(arrays._replace(x=x, y=y))


def _sums(arrays: FederatedData, which: np.ndarray, targets: bool) -> dict[str, Any]:
    """n, mean and the sum of squares about it, of each feature and target of training examples."""
    rows = np.asarray(arrays.train.rows[0])[: int(arrays.train.size[0])]
    x = np.asarray(arrays.x)[rows]
    values = [x.reshape(-1, x.shape[-1]).astype(np.float64)]
    if targets:
        values.append(np.asarray(arrays.y)[rows].astype(np.float64))
    if len({len(part) for part in values}) > 1:
        raise UsageError("inputs of several positions cannot be normalised with a target; say none")
    whole = np.concatenate(values, 1)
    mean = whole.mean(0)
    return {
        "sums": {
            "n": len(whole),
            "mean": mean.tolist(),
            "m2": np.square(whole - mean).sum(0).tolist(),
        },
        "normalise": {"features": np.asarray(which, bool).tolist(), "targets": bool(targets)},
    }


def _loaded(settings: ConfigDict, words: configuration.Words) -> Dataset:
    return data.load(
        settings.dataset,
        settings.data_dir,
        fraction=settings.fraction,
        fraction_seed=settings.partition_seed,
        sources=words.dataset,
        **_own(settings, data.kind(settings.dataset)),
    )


def _own(settings: ConfigDict, name: str) -> dict[str, Any]:
    return settings.get(name, ConfigDict()).to_dict()


def _split(settings: ConfigDict) -> dict[str, Any]:
    return dict(
        split=settings.split,
        test_fraction=settings.test_fraction,
        validation_fraction=settings.validation_fraction,
        validation_examples=settings.validation_examples,
    )


def _list(words: Any) -> str:
    return ", ".join(sorted(word for word in words if word))
