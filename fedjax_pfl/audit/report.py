"""The audit of a run: both attacks on its uploads, their numbers, tables and picture."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from fedjax_pfl.audit import inversion, membership
from fedjax_pfl.audit.server_view import server_view
from fedjax_pfl.core import trees
from fedjax_pfl.core.algorithm import Algorithm, ClientContext, PyTree
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import Batch, FederatedData, Split, client_data, take
from fedjax_pfl.core.groups import group_algorithms
from fedjax_pfl.core.randomness import PERSONAL, SEND, TRAIN, stage_key
from fedjax_pfl.report import drawing, text_tables
from fedjax_pfl.runs.client_functions import map_clients
from fedjax_pfl.runs.phase import Phase, make_network, make_training
from fedjax_pfl.runs.result import Result

FPR = 0.01
SMALLEST_IMAGE = 2  # pixels on a side


class Inversion(NamedTuple):
    """Images of a client and their reconstructions from its upload; images lie in [0, 1]."""

    client: int
    round: int
    labels: np.ndarray  # [B, ...]
    originals: np.ndarray  # [B, height, width, channels]
    reconstructions: np.ndarray  # like `originals`, in their order
    psnr: list[float]  # dB, of each reconstruction
    mean_image_psnr: list[float]  # dB, of the mean training image of the federation
    mismatch: float  # 1 − cosine similarity of the uploaded change and of the computed one
    layers: list[str]  # layers that were compared
    share: float  # of the network's parameters that were compared


class Audit(NamedTuple):
    """Results of both attacks on a run."""

    algorithm: str
    dataset: str
    inversion: Inversion
    membership: dict[str, dict[str, float] | None]  # scores of the served and the uploaded model

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
      first: Reconstruct images from the first round instead of the one after the last.
      **settings: Keyword arguments of `invert`.
    """
    check(result, clients)
    return Audit(
        algorithm=result.phases[-1].config.algorithm,
        dataset=result.config["dataset"],
        inversion=invert(result, clients[0], first=first, **settings),
        membership=infer_membership(result, clients),
    )


def check(result: Result, clients: Sequence[int]) -> None:
    """Raises UsageError if examples are no images or a client has no training or test examples."""
    shape, name = result.federation.input_shape, result.config["dataset"]
    is_float = np.issubdtype(result.federation.input_dtype, np.floating)
    if len(shape) != 3 or min(shape[:2]) < SMALLEST_IMAGE or not is_float:
        raise UsageError(f"{name} has examples of shape {list(shape)}; an audit is for images")
    for i in clients:
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
) -> Inversion:
    """Reconstructs training images of a client from its upload in one round.

    For this round the client trains on its first examples only, in full batches.

    Args:
      result: Result of a run.
      client: Client id.
      first: Attack the first round instead of the one after the last.
      examples: Number of images to train on.
      steps: Gradient steps of the client.
      iterations: Optimisation steps of the attacker.
    """
    phase = _short_training(result.phases[0 if first else -1], examples, steps)
    state = phase.rounds.init(phase.key) if first else result.state
    t = 0 if first else result.metrics[-1]["round"]
    train = result.data.train
    size = np.minimum(train.size, examples).astype(np.int32)
    data = result.data._replace(train=Split(train.rows[:, :examples], size))
    limited = result._replace(phases=(phase,), data=data)
    ((_, (payload, upload)),) = map_clients(_exchange, limited, state, t, [client])
    g = int(result.federation.groups[client])
    network = _network(phase, g)
    variables = _variable_shapes(network, result)
    view = server_view(group_algorithms(phase.algorithm)[g], payload, upload, variables)
    attack = inversion.Attack(
        network=network,
        task=result.federation.task,
        training=make_training(phase.inputs, phase.config.get),
        data=client_data(data, client),
        t=t,
        steps=steps,
        iterations=iterations,
    )
    batch, pixels = _training_batch(data, client), _pixel_range(data)
    key = jax.random.key(1)  # of the attacker
    shape = result.federation.input_shape
    attempt = jax.device_get(inversion.reconstruct(attack, view, pixels, batch.y, shape, key))
    originals, labels = pixels.to_unit(batch.x), np.asarray(batch.y)
    images = attempt.images[inversion.match_order(attempt.images, originals, labels)]
    mean_image = pixels.to_unit(_mean_input(result.data))
    compared = {
        path: leaf.size
        for path, leaf in tree_leaves_with_path(variables)
        if keystr(path) in view.compared
    }
    return Inversion(
        client=client,
        round=t,
        labels=labels,
        originals=originals,
        reconstructions=images,
        psnr=[inversion.psnr(*pair) for pair in zip(images, originals, strict=True)],
        mean_image_psnr=[inversion.psnr(mean_image, image) for image in originals],
        mismatch=float(attempt.mismatch),
        layers=sorted({trees.layer_name(path) for path in compared}),
        share=sum(compared.values()) / trees.size(variables["params"]),
    )


def infer_membership(result: Result, clients: Sequence[int]) -> dict[str, dict[str, float] | None]:
    """Infers which examples of clients are training examples, from the round after the last.

    Returns means over the clients for two models: `served`, the personal model of each client,
    which the server may lack, and `uploaded`, None if an upload has no complete network.
    """
    phase, t = result.phases[-1], result.metrics[-1]["round"]
    members = group_algorithms(phase.algorithm)
    networks = [_network(phase, g) for g in range(len(members))]
    task, data = result.federation.task, result.data
    loss_of_served = [membership.loss_function(member.predict, task) for member in members]
    loss_of_uploaded = [membership.loss_function(network.apply, task) for network in networks]
    scores: dict[str, list[tuple[float, float]]] = {"served": [], "uploaded": []}
    outputs = map_clients(_serve_and_exchange, result, result.state, t, clients)
    for i, (served, payload, upload) in outputs:
        g = int(result.federation.groups[i])
        variables = _variable_shapes(networks[g], result)
        uploaded = server_view(members[g], payload, upload, variables).uploaded(variables)
        client_examples, test = client_data(data, i), Split(data.test.rows[i], data.test.size[i])
        for name, losses, model in (
            ("served", loss_of_served[g], served),
            ("uploaded", loss_of_uploaded[g], uploaded),
        ):
            if model is not None:
                pair = (
                    losses(model, client_examples, client_examples.train),
                    losses(model, client_examples, test),
                )
                scores[name].append((membership.auc(*pair), membership.tpr_at_fpr(*pair, FPR)))
    columns = ("auc", f"tpr_at_fpr_{FPR:g}")
    return {
        name: dict(zip(columns, np.mean(rows, 0).tolist(), strict=True)) if rows else None
        for name, rows in scores.items()
    }


def tables(facts: Audit) -> list[text_tables.Table]:
    """Returns a table of the reconstructed images and one of membership."""
    attack = facts.inversion
    rows = [
        [f"image {number}, label {label}", f"{psnr:.1f}", f"{mean:.1f}"]
        for number, (label, psnr, mean) in enumerate(
            zip(attack.labels, attack.psnr, attack.mean_image_psnr, strict=True)
        )
    ]
    layers = ", ".join(attack.layers) or "none"
    inverted = text_tables.Table(
        caption=f"Images of client {attack.client} from its upload in round {attack.round}: PSNR "
        f"in dB. Compared: {attack.share:.0%} of the network's parameters; layers: {layers}.",
        heads=["reconstruction", "mean image"],
        rows=rows,
    )
    inferred = text_tables.Table(
        caption="Membership by the loss: 0.5 and 1 % are chance.",
        heads=["AUC", f"TPR at {FPR:.0%} FPR"],
        rows=[
            [f"{name} model", *_membership_cells(scores)]
            for name, scores in facts.membership.items()
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
    """Returns a phase whose clients train for some steps on batches of `examples`."""
    config = ConfigDict(phase.config, type_safe=False)
    changes = {"local_steps": steps, "local_epochs": None, "batch_size": examples}
    config.update(changes)
    return phase._replace(inputs=dataclasses.replace(phase.inputs, configs=[config]))


def _exchange(
    member: Algorithm, state: Any, client: PyTree, ctx: ClientContext
) -> tuple[PyTree, PyTree]:
    """Returns the download and the upload of a client in one round."""
    send_key, train_key = (stage_key(ctx.key, s, ctx.t, ctx.i) for s in (SEND, TRAIN))
    payload = member.send(state, ctx._replace(data=None, key=send_key))
    return payload, member.train(payload, client, ctx._replace(key=train_key)).upload


def _serve_and_exchange(
    member: Algorithm, state: Any, client: PyTree, ctx: ClientContext
) -> tuple[PyTree, PyTree, PyTree]:
    """Returns a client's personal model, and its download and upload in one round."""
    personal_key = stage_key(ctx.key, PERSONAL, ctx.t, ctx.i)
    served = member.personalize(state, client, ctx._replace(key=personal_key))
    return served, *_exchange(member, state, client, ctx)


def _network(phase: Phase, g: int) -> Any:
    """Returns the network of a group: the one that predicts, or inside of what predicts."""
    network = getattr(group_algorithms(phase.algorithm)[g].predict, "__self__", None)
    if hasattr(network, "init"):
        return network
    return make_network(phase.inputs, phase.inputs.group_configs[g], phase.plan.conv)


def _variable_shapes(network: Any, result: Result) -> PyTree:
    """Returns the shapes of a network's variables."""
    return jax.eval_shape(
        lambda: dict(network.init(jax.random.key(0), result.federation.examples()))
    )


def _training_batch(data: FederatedData, client: int) -> Batch:
    """Returns the training examples of a client, in NumPy arrays."""
    client_examples = client_data(data, client)
    rows = client_examples.train.rows[: int(client_examples.train.size)]
    return jax.device_get(take(client_examples, rows, np.ones(len(rows), bool)))


def _pixel_range(data: FederatedData) -> inversion.Pixels:
    """Returns the range of the network's inputs in the dataset."""
    ends = np.min(data.x), np.max(data.x)
    return inversion.Pixels(*(_normalised(data, np.float32(end)) for end in ends))


def _mean_input(data: FederatedData) -> np.ndarray:
    """Returns the mean of all training examples, as the network takes it."""
    pairs = zip(data.train.rows, data.train.size, strict=True)
    rows = np.concatenate([row[: int(size)] for row, size in pairs])
    return _normalised(data, np.mean(np.asarray(data.x)[rows], 0, dtype=np.float32))


def _normalised(data: FederatedData, x: Any) -> Any:
    """Returns stored values as the network takes them."""
    if data.scale is None or data.shift is None:
        return x
    return x * np.asarray(data.scale) + np.asarray(data.shift)
