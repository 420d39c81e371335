"""Datasets that need no download: those of scikit-learn, speeches, and synthetic ones."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.core.errors import UsageError, require_one_of
from fedjax_pfl.data.columns import NORMALISE
from fedjax_pfl.data.dataset import Dataset, Normalisation, arrays, scale_and_shift
from fedjax_pfl.data.table_sources import cut_windows
from fedjax_pfl.data.text import speeches


def digits() -> Dataset:
    """1,797 handwritten digits of scikit-learn, 8x8x1, standardised; no separate test set."""
    package: Any = importlib.util.find_spec("sklearn")  # an import would take a second
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz"
    table = np.loadtxt(file, delimiter=",", dtype=np.int64)
    # Mean and standard deviation over all pixels, which range from 0 to 16.
    scale, shift = scale_and_shift((4.8842 / 255,), (6.0168 / 255,))
    x = table[:, :-1].reshape(-1, 8, 8, 1).astype(np.uint8)
    return arrays(x, table[:, -1], outputs=10, scale=scale, shift=shift, name="digits")


def synthetic(
    *,
    shape: tuple[int, ...] = (8, 8, 1),
    classes: int = 10,
    examples: int = 1000,
    test_examples: int = 200,
    noise: float = 1.0,
    seed: int = 0,
) -> Dataset:
    """Gaussian examples around one random centre per class, float32; classes equally often.

    Args:
      shape: Shape of an example.
      classes: Number of classes.
      examples: Number of training examples of all classes together.
      test_examples: Number of examples of a separate test set. 0: no test set.
      noise: Standard deviation around the centres, which are standard normal.
      seed: Seed of the examples.
    """
    if not (
        classes >= 1 and examples >= classes and test_examples >= 0 and min(shape, default=0) >= 1
    ):
        raise UsageError(
            f"synthetic: shape={tuple(shape)}, classes={classes}, examples={examples}, "
            f"test_examples={test_examples}: use positive numbers, at least one in shape, and "
            "examples >= classes"
        )
    if seed < 0 or not 0 <= noise <= 1e6:
        raise UsageError(f"synthetic: seed={seed}, noise={noise}: use 0 or more, noise up to 1e6")
    if (values := (examples + test_examples) * math.prod(shape)) > 2**33:
        raise UsageError(
            f"synthetic: {values:,} values are more than 2**33; use fewer examples or a smaller "
            "shape"
        )
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((classes, *shape), np.float32)

    def sample(number: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.permutation(np.arange(number, dtype=np.int32) % classes)
        x = centres[y] + np.float32(noise) * rng.standard_normal((number, *shape), np.float32)
        return x, y

    x, y = sample(examples)
    x_test, y_test = sample(test_examples) if test_examples else (None, None)
    return Dataset(
        name="synthetic", x_train=x, y_train=y, x_test=x_test, y_test=y_test, outputs=classes
    )


def _table(name: str, summary: str) -> Callable[..., Dataset]:
    """Returns a function that loads one of scikit-learn's tables as a dataset, without a test set.

    `name` is the table's, such as iris; `summary` is the first line of its docstring.
    """

    def source(*, normalise: str = "federation") -> Dataset:
        from sklearn import datasets

        require_one_of(f"{name}.normalise", normalise, NORMALISE)
        is_regression = name == "diabetes"
        table = getattr(datasets, f"load_{name}")(**({"scaled": False} if is_regression else {}))
        x, y = table.data.astype(np.float32), table.target.astype(np.int32)
        metadata = {"input": [str(column) for column in table.feature_names]}
        if is_regression:
            y, outputs = table.target.astype(np.float32)[:, None], 1
        else:
            metadata["classes"] = [str(label) for label in table.target_names]
            outputs = len(table.target_names)
        normalisation = None
        if normalise != "none":
            normalisation = Normalisation(normalise, np.ones(x.shape[1], bool), is_regression)
        return Dataset(
            name=name,
            x_train=x,
            y_train=y,
            x_test=None,
            y_test=None,
            outputs=outputs,
            normalise=normalisation,
            metadata=metadata,
        )

    source.__doc__ = f"""{summary}

Args:
  normalise: Scale each input (and the target of a regression) to mean 0 and deviation 1: by the
    training examples of all active clients (federation), by those of each client (client), or not
    at all (none).
"""
    return source


def sensors(
    *, owners: int = 12, rows: int = 900, length: int = 32, stride: int = 8, seed: int = 0
) -> Dataset:
    """Synthetic recordings of people who rest, walk or run: three channels, one owner per person.

    The steps of a person have an individual pace and strength, on two of the channels; noise is on
    all three. The last 30 % of each recording is the official test set.

    Args:
      owners: Number of people.
      rows: Number of rows of each recording.
      length: Number of rows of a window.
      stride: Number of rows from the start of one window to the start of the next.
      seed: Seed of the examples.
    """
    if min(owners, length, stride) < 1 or rows < 10 * length or seed < 0:
        raise UsageError(
            f"sensors: owners={owners}, rows={rows}, length={length}, stride={stride}, "
            f"seed={seed}: use 1 or more, and at least ten times as many rows as length"
        )
    rng = np.random.default_rng(seed)
    xs, ys = [], []
    for _ in range(owners):
        pace, strength = rng.uniform(0.7, 1.4), rng.uniform(0.6, 1.6)
        tilt = rng.uniform(-1, 1, 3)
        bouts = rng.integers(length, 2 * length, 3 * (rows // (3 * length) + 1))
        order = np.concatenate([rng.permutation(3) for _ in range(len(bouts) // 3)])
        activity = np.repeat(order, bouts)[:rows]
        frequency = pace * np.array([0.0, 0.08, 0.16])[activity]
        phase = 2 * np.pi * np.cumsum(frequency)
        size = strength * np.array([0.0, 0.7, 1.0])[activity]
        wave = np.stack([size * np.sin(phase), size * np.cos(2 * phase) / 2, np.zeros(rows)], -1)
        xs.append(tilt + wave + 0.4 * rng.standard_normal((rows, 3)))
        ys.append(activity)
    series = Dataset(
        name="sensors",
        x_train=np.concatenate(xs).astype(np.float32),
        y_train=np.concatenate(ys).astype(np.int32),
        x_test=None,
        y_test=None,
        outputs=3,
        owner_train=np.repeat(np.arange(owners), rows),
        owner_names=np.array([f"person {i + 1}" for i in range(owners)]),
        normalise=Normalisation("federation", np.ones(3, bool), targets=False),
        metadata={"input": ["along", "up", "across"], "classes": ["rest", "walk", "run"]},
    )
    return cut_windows(series, length, stride, horizon=0, test_share=0.3)


SOURCES: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "synthetic": synthetic,
    "iris": _table("iris", "150 flowers of 3 kinds, 4 measurements each, of scikit-learn."),
    "wine": _table("wine", "178 wines of 3 growers, 13 measurements each, of scikit-learn."),
    "breast_cancer": _table(
        "breast_cancer", "569 tumours of 2 classes, 30 measurements each, of scikit-learn."
    ),
    "diabetes": _table(
        "diabetes", "442 patients, 10 measurements and one real target each, of scikit-learn."
    ),
    "speeches": speeches,
    "sensors": sensors,
}
