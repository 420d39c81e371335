"""The audit of a run: both attacks on its uploads, their numbers, tables and picture."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from fedjax_pfl.audit import exchanges, inversion
from fedjax_pfl.audit.membership import FPR, infer_membership
from fedjax_pfl.audit.server_view import by_path, private_paths, sent_paths
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import ClientData, FederatedData, Split, client_data, take
from fedjax_pfl.core.groups import group_algorithms
from fedjax_pfl.report import drawing, text_tables
from fedjax_pfl.runs.client_functions import map_clients
from fedjax_pfl.runs.phase import Phase
from fedjax_pfl.runs.result import Result
from fedjax_pfl.transforms import PLAIN_UPLOADS, fixed_noise
from fedjax_pfl.transforms.compression import Client as CompressionClient

SMALLEST_IMAGE = 2  # pixels on a side
_MODELS = {"served": "served model", "uploaded": "uploaded model", "body": "uploaded body"}


class Inversion(NamedTuple):
    """Images of a client and their reconstructions from its upload; images are in [0, 1]."""

    client: int
    round: int
    labels: np.ndarray  # [B, ...]
    originals: np.ndarray  # [B, height, width, channels]
    reconstructions: np.ndarray  # like `originals`, in their order; [0, ...] without an attack
    psnr: list[float]  # dB, of each reconstruction
    mean_image_psnr: list[float]  # dB, of the mean training image of the federation
    mismatch: float | None  # 1 − cosine similarity of the uploaded change and of the computed one
    layers: list[str]  # layers of the upload that were compared
    unknown: list[str]  # layers of the network that the attacker lacks
    reason: str  # why images cannot be reconstructed, or ""


class Audit(NamedTuple):
    """Results of both attacks on a run."""

    algorithm: str
    dataset: str
    inversion: Inversion
    membership: dict[str, dict[str, float] | None]  # as of `infer_membership`

    def as_json(self) -> dict[str, Any]:
        """Returns everything but the images, as plain data."""
        attack = self.inversion._asdict()
        images = ("originals", "reconstructions")
        inverted = {name: value for name, value in attack.items() if name not in images}
        inverted["labels"] = self.inversion.labels.tolist()
        return {**self._asdict(), "inversion": inverted}


def audit(result: Result, clients: Sequence[int], *, first: bool = False, **settings: Any) -> Audit:
    """Attacks the uploads of a run.

    Raises UsageError if examples are no images or if a client lacks training or test examples.

    Args:
      result: Result of a run.
      clients: Clients whose membership is inferred; images of the first one are reconstructed.
      first: Reconstruct images from the first round instead of the round after the last.
      **settings: Keyword arguments of `invert`.
    """
    check(result, clients)
    return Audit(
        algorithm=result.phases[result.phase].config.algorithm,
        dataset=result.config["dataset"],
        inversion=invert(result, clients[0], first=first, **settings),
        membership=infer_membership(result, clients),
    )


def check(result: Result, clients: Sequence[int]) -> None:
    """Raises UsageError if examples are no images or a client has no training or test examples.

    Also refuses attackers, which did not train on their own examples as they are.
    """
    shape, name = result.federation.input_shape, result.config["dataset"]
    is_float = np.issubdtype(result.federation.input_dtype, np.floating)
    if len(shape) != 3 or min(shape[:2]) < SMALLEST_IMAGE or not is_float:
        raise UsageError(f"{name} has examples of shape {list(shape)}; an audit is for images")
    attackers = np.logical_or.reduce([phase.inputs.is_attacker for phase in result.phases])
    for i in clients:
        if attackers[i]:
            raise UsageError(f"client {i} attacked this run; audit another with --clients")
        for split in ("train", "test"):
            if not int(getattr(result.data, split).size[i]):
                raise UsageError(
                    f"client {i} has no {split} examples; audit another with --clients"
                )


def invert(
    result: Result,
    client: int,
    *,
    first: bool = False,
    examples: int = 1,
    steps: int = 1,
    iterations: int = 1000,
    knows_private: bool = False,
    compare_inputs: bool = False,
) -> Inversion:
    """Reconstructs training images of a client from its upload in one round.

    For this round the client trains on its first examples only, in full batches.

    Args:
      result: Result of a run.
      client: Client id.
      first: Attack the first round instead of the round after the last.
      examples: Number of images to train on.
      steps: Gradient steps of the client.
      iterations: Optimisation steps of the attacker.
      knows_private: The attacker also knows the layers that stay on the client.
      compare_inputs: The attacker also compares the inputs of fully connected layers, which it
        computes from their changes. Raises UsageError if the upload has no such layer.
    """
    phase = _short_training(result.phases[0 if first else result.phase], examples, steps)
    state = phase.rounds.init(phase.key) if first else result.state
    t = 0 if first else result.round
    train = result.data.train
    size = np.minimum(train.size, examples).astype(np.int32)
    data = result.data._replace(train=Split(train.rows[:, :examples], size))
    limited = result._replace(phases=(phase,), phase=0, data=data)
    ((_, (payload, upload, state)),) = map_clients(exchanges.exchange, limited, state, t, [client])
    state = state.method if isinstance(state, CompressionClient) else state
    g = int(result.federation.groups[client])
    network = exchanges.group_network(phase, g)
    member = group_algorithms(_without_noise(phase).algorithm)[g]
    variables = exchanges.variable_shapes(network, result)
    private = private_paths(member, payload, upload, state, variables)
    unknown = {} if knows_private else private

    def init_private(key: Any) -> dict[str, jax.Array]:
        values = by_path(dict(network.init(key, result.federation.examples())))
        return {place: values[path] for place, path in unknown.items()}

    attack = inversion.Attack(
        train=member.train,
        data=inversion.attacked_data(client_data(data, client), int(size[client])),
        compared=sent_paths(member, payload, upload),
        init_private=init_private,
        iterations=iterations,
        input_weight=float(compare_inputs),
    )
    if compare_inputs and not inversion.connected_layers(attack, upload):
        raise UsageError(
            "the upload has no fully connected layer with a bias; leave compare_inputs out"
        )
    x, y = attack.data.x, attack.data.y
    exchange = inversion.Exchange(payload, state, upload, x, y, client, t)
    pixels, labels = _pixel_range(data), _labels(attack.data)
    originals = pixels.to_unit(x[: len(labels)])
    layers = [path for path, _ in tree_leaves_with_path(upload) if keystr(path) in attack.compared]
    reason = _reason(attack, exchange, network, variables, set(unknown.values()))
    images, mismatch = originals[:0], None
    if not reason:
        key = jax.random.key(1)  # of the attacker
        attempt = _reconstruct(attack, exchange, pixels, key)
        if np.isfinite(attempt.images).all():
            images = attempt.images[inversion.match_order(attempt.images, originals, labels)]
            mismatch = float(attempt.mismatch)
        else:
            reason = "the search ends in values that are not finite from every start"
    mean_image = pixels.to_unit(_mean_image(result.data))
    pairs = zip(images, originals, strict=False)  # no pair without an attack
    return Inversion(
        client=client,
        round=t,
        labels=labels,
        originals=originals,
        reconstructions=images,
        psnr=[inversion.psnr(*pair) for pair in pairs],
        mean_image_psnr=[inversion.psnr(mean_image, image) for image in originals],
        mismatch=mismatch,
        layers=sorted({trees.layer_name(path) for path in layers}),
        unknown=sorted(_layers(variables, set(unknown.values()))),
        reason=reason,
    )


def _reconstruct(attack: Any, exchange: Any, pixels: Any, key: Any) -> Any:
    """Returns `inversion.reconstruct`, or raises UsageError without derivatives of training."""
    try:
        return jax.device_get(inversion.reconstruct(attack, exchange, pixels, key))
    except ValueError as error:
        if "Reverse-mode" not in str(error):
            raise
        raise UsageError(
            "images cannot be reconstructed: the number of steps of this method's local training "
            "depends on the examples, so it has no derivatives"
        ) from None


def _layers(variables: PyTree, paths: Collection[str]) -> set[str]:
    """Returns the layers of a network with a parameter among `paths`."""
    leaves = tree_leaves_with_path(variables)
    return {trees.layer_name(path) for path, _ in leaves if keystr(path) in paths}


def _reason(
    attack: inversion.Attack,
    exchange: inversion.Exchange,
    network: Any,
    variables: PyTree,
    unknown: Collection[str],
) -> str:
    """Returns why images cannot be reconstructed, or "". `unknown` are paths of parameters."""
    if not attack.compared:
        return "the method uploads no numbers"
    other_layers = _layers(variables, by_path(variables).keys() - unknown)
    if network.layers[0] in _layers(variables, unknown) - other_layers:
        return (
            f"{network.layers[0]}, which reads the pixels, stays on the client, so an image cannot "
            "be told from others; --knows_private shows the worst case"
        )
    images = exchange.x[: int(attack.data.train.size)]
    _, uploaded = jax.jit(partial(inversion.changes, attack))(exchange, images, {})
    if not jnp.any(uploaded):
        return "the client fits its examples so well that its change is 0 in float32"
    return ""


def tables(facts: Audit) -> list[text_tables.Table]:
    """Returns a table of the reconstructed images and one of membership."""
    attack = facts.inversion
    cells = [f"{value:.1f}" for value in attack.psnr] or ["–"] * len(attack.labels)
    rows = [
        [f"image {number}, label {label}", cell, f"{mean:.1f}"]
        for number, (label, cell, mean) in enumerate(
            zip(attack.labels, cells, attack.mean_image_psnr, strict=True)
        )
    ]
    place = f"Images of client {attack.client} from its upload in round {attack.round}"
    unknown = f"; unknown: {', '.join(attack.unknown)}" if attack.unknown else ""
    inverted = text_tables.Table(
        caption=f"{place}: none, because {attack.reason}."
        if attack.reason
        else f"{place}: PSNR in dB. Compared: {', '.join(attack.layers)}{unknown}.",
        heads=["reconstruction", "mean image"],
        rows=rows,
    )
    inferred = text_tables.Table(
        caption="Membership by the loss, of a body by its features: 0.5 and 1 % are chance.",
        heads=["AUC", f"TPR at {FPR:.0%} FPR"],
        rows=[
            [_MODELS[name], *_membership_cells(scores)] for name, scores in facts.membership.items()
        ],
    )
    return [inverted, inferred]


def _membership_cells(scores: dict[str, float] | None) -> list[str]:
    """Returns AUC and TPR as text, or dashes without a model."""
    if scores is None:
        return ["–", "–"]
    area, rate = scores.values()
    return [f"{area:.3f}", f"{rate:.1%}"]


def draw(attack: Inversion) -> Figure:
    """Draws each image above its reconstruction."""
    count = len(attack.originals)
    figure = drawing.new_figure("", max(2.4, 1.3 * count + 0.9), 3.2)
    grid = figure.subplots(2, count, squeeze=False)
    for row, images in enumerate((attack.originals, attack.reconstructions)):
        for axes, image in zip(grid[row], images, strict=True):
            axes.imshow(_drawable(image), cmap="gray", vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
        grid[row][0].set_ylabel(("original", "reconstruction")[row], color=drawing.INK)
    for axes, psnr in zip(grid[1], attack.psnr, strict=True):
        axes.set_xlabel(f"{psnr:.1f} dB", color=drawing.INK)
    return figure


def _drawable(image: np.ndarray) -> np.ndarray:
    """Returns an image with three channels, or without the channel axis if there are not three."""
    return image if image.shape[-1] == 3 else image[..., 0]


def _short_training(phase: Phase, examples: int, steps: int) -> Phase:
    """Returns a phase whose clients train for some steps on batches of `examples`.

    Noise keeps its standard deviation, which may be computed from ε and the run's own steps.
    """
    changes: dict[str, Any] = {"local_steps": steps, "local_epochs": None, "batch_size": examples}
    changes |= fixed_noise(phase.config.get, phase.federation)
    return _replace_settings(phase, changes)


def _without_noise(phase: Phase) -> Phase:
    """Returns a phase whose clients upload without noise and compression."""
    return _replace_settings(phase, PLAIN_UPLOADS)


def _replace_settings(phase: Phase, changes: Mapping[str, Any]) -> Phase:
    """Returns a phase with other values of some settings."""
    config = ConfigDict(phase.config, type_safe=False)
    config.update(changes)
    return phase._replace(inputs=dataclasses.replace(phase.inputs, configs=[config]))


def _labels(data: ClientData) -> np.ndarray:
    """Returns the labels of the training examples of a client."""
    size = int(data.train.size)
    return np.asarray(take(data, data.train.rows, np.ones(size, bool)).y)


def _pixel_range(data: FederatedData) -> inversion.Pixels:
    """Returns the range of stored pixels in the dataset."""
    return inversion.Pixels(np.float32(np.min(data.x)), np.float32(np.max(data.x)))


def _mean_image(data: FederatedData) -> np.ndarray:
    """Returns the mean of all stored training examples."""
    pairs = zip(data.train.rows, data.train.size, strict=True)
    rows = np.concatenate([row[: int(size)] for row, size in pairs])
    return np.asarray(np.mean(np.asarray(data.x)[rows], 0, dtype=np.float32))
