"""Attacks by a part of the clients on their training examples, and the test of a backdoor.

The docstring of `attacks` defines the attacks. A change of an example never reaches another client:
attackers get copies of the examples that they share.
"""

from typing import Any

import numpy as np

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.core.examples import FederatedData, Split
from fedjax_pfl.data.checks import row_mask
from fedjax_pfl.data.mapped import is_mapped

ON_DATA = ("label_flip", "backdoor")

SEED = 0xA77A  # of the attackers' random choices: which clients (with a seed) and which examples
_POISONED = 0.5  # fraction of an attacker's examples with the trigger


def add_trigger(x: np.ndarray, value: Any) -> np.ndarray:
    """Returns images [n, H, W, channels] with a square of `value` in the last corner.

    Its side is an eighth of the height, at least 2.
    """
    side = max(2, x.shape[1] // 8)
    x = np.array(x)
    x[:, -side:, -side:] = value
    return x


def poison(
    data: FederatedData, federation: Federation, is_attacker: np.ndarray, kind: str, target: int = 0
) -> FederatedData:
    """Returns the data after an attack on the training examples of the attackers.

    Args:
      data: Examples of all clients.
      federation: Facts about the clients.
      is_attacker: bool [N].
      kind: label_flip or backdoor.
      target: Label of the examples with the trigger, as stored in y.
    """
    _check_examples(data, federation, kind, target)
    if not is_attacker.any():
        return data
    data = _copy_shared(data, is_attacker)
    y = np.array(data.y)
    rng = np.random.default_rng(SEED)
    rows = [_rows(data.train, i) for i in np.flatnonzero(is_attacker)]
    if kind == "label_flip":
        flipped = np.concatenate(rows)
        y[flipped] = _classes(data, federation) - 1 - y[flipped]
        return data._replace(y=y)
    x = np.array(data.x)
    poisoned_rows = np.concatenate([rng.permutation(r)[: round(_POISONED * len(r))] for r in rows])
    x[poisoned_rows], y[poisoned_rows] = add_trigger(x[poisoned_rows], x.max()), target
    return data._replace(x=x, y=y)


def triggered(data: FederatedData, is_attacker: np.ndarray, target: int) -> FederatedData:
    """Returns the data with the trigger and the target label in all test examples.

    Examples whose label is the target are left out of the test splits. The accuracy on the others
    is the success of a backdoor. With the same `is_attacker`, bool [N], the arrays have the shapes
    of those from `poison`.
    """
    data = _copy_shared(data, is_attacker)
    old_labels = np.asarray(data.y)
    split_rows, sizes = np.array(data.test.rows), np.array(data.test.size)
    for i in range(len(sizes)):
        rows = _rows(data.test, i)
        other_rows = rows[old_labels[rows] != target]
        split_rows[i, : len(other_rows)], sizes[i] = other_rows, len(other_rows)
    rows = np.unique(np.concatenate([_rows(data.test, i) for i in range(len(sizes))]))
    x, y = np.array(data.x), np.array(data.y)
    x[rows], y[rows] = add_trigger(x[rows], x.max()), target
    return data._replace(x=x, y=y, test=Split(split_rows, sizes))


def _copy_shared(data: FederatedData, is_attacker: np.ndarray) -> FederatedData:
    """Returns data whose changed examples belong to one attacker or to the test splits only.

    Attackers get copies of their training examples that another client or split also uses. The test
    splits get copies of their examples that a client trains or validates with. Copies are the last
    rows.
    """

    def count_uses(split: Split) -> np.ndarray:
        return np.bincount(np.asarray(split.rows)[row_mask(split)], minlength=len(data.y))

    train, test = np.array(data.train.rows), np.array(data.test.rows)
    other_uses = count_uses(data.train) + count_uses(data.validation)
    is_shared = other_uses + count_uses(data.test) > 1
    of_attackers = row_mask(data.train) & is_attacker[:, None] & is_shared[train]
    for_tests = row_mask(data.test) & (other_uses > 0)[test]
    tested, copy = np.unique(test[for_tests], return_inverse=True)
    copied = np.concatenate([train[of_attackers], tested])
    if not len(copied):
        return data
    trained = np.count_nonzero(of_attackers)
    train[of_attackers] = len(data.y) + np.arange(trained)
    test[for_tests] = len(data.y) + trained + copy
    return data._replace(
        x=np.concatenate([data.x, np.asarray(data.x)[copied]]),
        y=np.concatenate([data.y, np.asarray(data.y)[copied]]),
        train=data.train._replace(rows=train),
        test=data.test._replace(rows=test),
    )


def _rows(split: Split, i: Any) -> np.ndarray:
    """Returns the rows of client `i` in a split."""
    return np.asarray(split.rows)[i, : int(split.size[i])]


def _classes(data: FederatedData, federation: Federation) -> int:
    """Returns the number of classes as stored in y."""
    return federation.outputs if data.label_map is None else np.shape(data.label_map)[1]


def _check_examples(data: FederatedData, federation: Federation, kind: str, target: int) -> None:
    """Raises UsageError if an attack on the examples does not suit them."""
    if is_mapped(data.x):
        raise UsageError(
            f"attack={kind} changes examples, but these are read from files; choose another attack"
        )
    if not np.issubdtype(np.asarray(data.y).dtype, np.integer) or np.ndim(data.y) > 1:
        raise UsageError(f"attack={kind} needs examples with one class each; choose another attack")
    # With domains, an output stands for another class of each domain.
    if data.classes is not None or _classes(data, federation) != federation.outputs:
        raise UsageError(
            f"attack={kind} needs clients with the same classes; choose another attack"
        )
    if kind != "backdoor":
        return
    if len(federation.input_shape) != 3:
        raise UsageError("attack=backdoor needs images; choose another attack")
    if target >= (classes := _classes(data, federation)):
        raise UsageError(f"attack_target is {target}; choose a class from 0 to {classes - 1}")
    if all(metric.name != "accuracy" for metric in federation.task.metrics):
        raise UsageError("attack=backdoor is scored by accuracy; add it to metrics")
