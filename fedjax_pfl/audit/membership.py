"""Membership inference by the loss: training examples tend to have a lower loss than others.

Yeom et al., Privacy Risk in Machine Learning, 2018. The threshold is calibrated with examples that
the model was not trained on. The stronger likelihood-ratio attack LiRA, which trains many models
for comparison, is left out.

A body without its head gives no loss. Its features of training examples tend to lie closer to the
mean feature of their class. The upload may have these means. If not, the attacker takes the means
of the examples whose membership it infers, without the example itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_pfl.audit import exchanges
from fedjax_pfl.audit.server_view import server_view, uploaded_means
from fedjax_pfl.core.algorithm import Federation, PyTree
from fedjax_pfl.core.examples import ClientData, FederatedData, Split, client_data, take
from fedjax_pfl.core.groups import group_algorithms
from fedjax_pfl.core.task import Task
from fedjax_pfl.networks.features import WithFeatures
from fedjax_pfl.runs.client_functions import map_clients
from fedjax_pfl.runs.result import Result

FPR = 0.01


def auc(members: np.ndarray, non_members: np.ndarray) -> float:
    """Computes P(loss of a member < loss of another example), where equal losses count half.

    It is 0.5 if losses tell nothing, and 1 if they separate members from the others.
    """
    ordered = np.sort(non_members)
    not_above = np.searchsorted(ordered, members, "right")
    below = np.searchsorted(ordered, members, "left")
    return float(np.mean(1 - (below + not_above) / (2 * len(ordered))))


def tpr_at_fpr(members: np.ndarray, non_members: np.ndarray, fpr: float = 0.01) -> float:
    """Computes the largest share of members below a threshold with at most `fpr` of the others.

    With fewer than 1 / fpr other examples, all of them lie above the threshold.
    """
    threshold = np.sort(non_members)[int(fpr * len(non_members) + 1e-9)]
    return float(np.mean(members < threshold))


def loss_function(
    predict: Callable[[PyTree, jax.Array], jax.Array], task: Task
) -> Callable[[PyTree, ClientData, Split], np.ndarray]:
    """Returns a function (variables, data of a client, split) -> losses of its examples [n].

    `predict` is (variables, x [B, ...]) -> outputs.
    """

    @jax.jit
    def row_losses(variables: PyTree, data: ClientData, rows: jax.Array) -> jax.Array:
        def loss(row: jax.Array) -> jax.Array:
            batch = take(data, row[None], np.ones(1, bool))
            return task.loss(predict(variables, batch.x), batch.y, data.classes)[0]

        return jax.lax.map(loss, rows, batch_size=128)

    def losses(variables: PyTree, data: ClientData, split: Split) -> np.ndarray:
        values: Any = jax.device_get(row_losses(variables, data, split.rows))
        return values[: int(split.size)]

    return losses


def feature_function(
    network: Any,
) -> Callable[[PyTree, ClientData, Split], tuple[np.ndarray, np.ndarray]]:
    """Returns a function (variables, data of a client, split) -> features [n, d], classes [n].

    Features are the inputs of the network's head.
    """

    @jax.jit
    def row_features(variables: PyTree, data: ClientData, rows: jax.Array) -> Any:
        def feature(row: jax.Array) -> tuple[jax.Array, jax.Array]:
            batch = take(data, row[None], np.ones(1, bool))
            return WithFeatures(network).apply(variables, batch.x)[1][0], batch.y[0]

        return jax.lax.map(feature, rows, batch_size=128)

    def features(
        variables: PyTree, data: ClientData, split: Split
    ) -> tuple[np.ndarray, np.ndarray]:
        z, y = jax.device_get(row_features(variables, data, split.rows))
        return z[: int(split.size)], y[: int(split.size)]

    return features


def class_distances(z: np.ndarray, y: np.ndarray, means: np.ndarray | None) -> np.ndarray:
    """Returns the squared distance of each feature to the mean feature of its class, [n].

    Args:
      z: Features, [n, d].
      y: Their classes, [n].
      means: Mean features of the classes, [C, d]. None: means of the other examples of the class in
        `y`; the distance of an example without others is NaN.
    """
    z = z.astype(np.float64)
    if means is not None:
        return np.sum(np.square(z - means[y]), 1)
    classes, places = np.unique(y, return_inverse=True)
    one_hot = np.eye(len(classes))[places]
    other_counts = np.sum(one_hot, 0)[places] - 1
    sums = (one_hot.T @ z)[places] - z
    distances = np.sum(np.square(z - sums / np.maximum(other_counts, 1)[:, None]), 1)
    return np.where(other_counts > 0, distances, np.nan)


def split_distances(
    splits: Sequence[tuple[np.ndarray, np.ndarray]], means: Any
) -> list[np.ndarray]:
    """Returns the `class_distances` of each split, without NaN.

    Means are over the examples of all splits, each with features [n, d] and classes [n].
    """
    z, y = (np.concatenate(parts) for parts in zip(*splits, strict=True))
    ends = np.cumsum([len(labels) for _, labels in splits])[:-1]
    parts = np.split(class_distances(z, y, means), ends)
    return [part[~np.isnan(part)] for part in parts]


def _feature_width(network: Any, variables: PyTree, federation: Federation) -> int:
    """Returns the length of a network's features; 0 if classes cannot have a mean feature."""
    if not federation.task.has_classes:
        return 0
    x = federation.examples()
    shape = jax.eval_shape(lambda v: WithFeatures(network).apply(v, x)[1], variables)
    return int(shape.shape[1]) if shape is not None and shape.ndim == 2 else 0


def non_members(data: FederatedData, federation: Federation, i: int) -> Split:
    """Returns the test examples of client i, without those of classes that it does not train on.

    A test set that all clients share has other classes too. Their loss is high, which tells nothing
    about single training examples.
    """
    rows, size = np.asarray(data.test.rows[i]), int(data.test.size[i])
    if not federation.task.has_classes:
        return Split(rows, np.asarray(size))
    train_rows = np.asarray(data.train.rows[i])[: int(data.train.size[i])]
    is_trained = np.isin(np.asarray(data.y[rows]), np.asarray(data.y[train_rows]))
    is_used = (np.arange(len(rows)) < size) & is_trained
    return Split(rows[np.argsort(~is_used, kind="stable")], np.asarray(is_used.sum()))


def infer_membership(result: Result, clients: Sequence[int]) -> dict[str, dict[str, float] | None]:
    """Infers which examples of clients are training examples, from the round after the last.

    Returns means over the clients for three models: `served` is the personal model of each client,
    which the server may lack. `uploaded` is None if an upload has no complete network. `body` is
    None unless the upload has a network without its head.
    """
    phase, t = result.phases[result.phase], result.round
    algorithms = group_algorithms(phase.algorithm)
    networks = [exchanges.group_network(phase, g) for g in range(len(algorithms))]
    shapes = [exchanges.variable_shapes(network, result) for network in networks]
    federation, data = result.federation, result.data
    loss_of_served = [loss_function(member.predict, federation.task) for member in algorithms]
    loss_of_uploaded = [loss_function(network.apply, federation.task) for network in networks]
    features = [feature_function(network) for network in networks]
    scores: dict[str, list[tuple[float, float]]] = {"served": [], "uploaded": [], "body": []}
    outputs = map_clients(exchanges.serve_and_exchange, result, result.state, t, clients)
    for i, (served, payload, upload) in outputs:
        g, client_examples = int(federation.groups[i]), client_data(data, i)
        splits = (client_examples.train, non_members(data, federation, i))
        view = server_view(algorithms[g], payload, upload, shapes[g])
        values = {"served": [loss_of_served[g](served, client_examples, s) for s in splits]}
        if (uploaded := view.uploaded(shapes[g])) is not None:
            values["uploaded"] = [loss_of_uploaded[g](uploaded, client_examples, s) for s in splits]
        elif (body := view.uploaded(shapes[g], getattr(networks[g], "head", ""))) is not None and (
            width := _feature_width(networks[g], shapes[g], federation)
        ):
            pairs = [features[g](body, client_examples, s) for s in splits]
            values["body"] = split_distances(
                pairs, uploaded_means(upload, (federation.outputs, width))
            )
        for name, (member_values, other_values) in values.items():
            if len(member_values) and len(other_values):
                rate = tpr_at_fpr(member_values, other_values, FPR)
                scores[name].append((auc(member_values, other_values), rate))
    columns = ("auc", f"tpr_at_fpr_{FPR:g}")
    return {
        name: dict(zip(columns, np.mean(rows, 0).tolist(), strict=True)) if rows else None
        for name, rows in scores.items()
    }
