"""Datasets that need no file: scikit-learn's, speeches, and made-up ones."""

import math
from collections.abc import Callable

import numpy as np

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data.columns import NORMALISE, chosen
from fedjax_pfl.data.dataset import DataDir, Dataset, Keep, Normalise, kept, standardise
from fedjax_pfl.data.text import speeches
from fedjax_pfl.data.windows import cut


def digits(data_dir: DataDir, keep: Keep) -> Dataset:
    """scikit-learn's 1,797 real handwritten digits, 8x8x1; one pool. Standardised."""
    del data_dir
    from sklearn.datasets import load_digits

    whole = load_digits()
    x, y = whole.images.astype(np.uint8)[..., None], whole.target.astype(np.int32)
    rows = keep(len(x))
    if rows is not None:
        x, y = x[rows], y[rows]
    # Mean and standard deviation over all pixels, which run from 0 to 16.
    scale, shift = standardise((4.8842 / 255,), (6.0168 / 255,))
    return Dataset("digits", x, y, None, None, 10, scale, shift)


def synthetic(
    data_dir: DataDir,
    keep: Keep,
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
      shape: of an example.
      classes: how many there are.
      examples: of all classes together.
      test_examples: of an official test set besides; 0: there is none.
      noise: standard deviation around the centres, which are themselves standard normal.
      seed: of all that is drawn.
    """
    del data_dir
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
        rows = keep(number) if number else None
        return (x, y) if rows is None else (x[rows], y[rows])

    x, y = sample(examples)
    x_test, y_test = sample(test_examples) if test_examples else (None, None)
    return Dataset("synthetic", x, y, x_test, y_test, classes)


def _table(name: str, said: str) -> Callable[..., Dataset]:
    """One of scikit-learn's tables."""

    def source(data_dir: DataDir, keep: Keep, *, normalise: str = "federation") -> Dataset:
        del data_dir
        from sklearn import datasets

        chosen(name, "normalise", normalise, NORMALISE)
        more = {"scaled": False} if name == "diabetes" else {}
        whole = getattr(datasets, f"load_{name}")(**more)
        numbers = name == "diabetes"
        y = whole.target.astype(np.float32)[:, None] if numbers else whole.target.astype(np.int32)
        metadata = {"input": [str(one) for one in whole.feature_names]}
        if not numbers:
            metadata["classes"] = [str(one) for one in whole.target_names]
        x = whole.data.astype(np.float32)
        by = None
        if normalise != "none":
            by = Normalise(normalise, np.ones(x.shape[1], bool), numbers)
        outputs = 1 if numbers else len(whole.target_names)
        return kept(Dataset(name, x, y, None, None, outputs, normalise=by, metadata=metadata), keep)

    source.__doc__ = f"""{said}

Args:
  normalise: mean 0 and deviation 1 of each input (and of a regression's target): by the training
    examples of all clients that train (federation), by each client's own (client), or none.
"""
    return source


def sensors(
    data_dir: DataDir,
    keep: Keep,
    *,
    owners: int = 12,
    rows: int = 900,
    length: int = 32,
    stride: int = 8,
    seed: int = 0,
) -> Dataset:
    """Made-up recordings of three channels in which somebody rests, walks or runs; by person.

    A person's steps have a pace and a strength of their own, on two of the channels; noise is on
    all three. The last 30 % of each recording is the official test set.

    Args:
      owners: how many people.
      rows: of each one's recording.
      length: rows of a window.
      stride: rows from the beginning of one window to that of the next.
      seed: of all that is drawn.
    """
    del data_dir
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
    x, y = np.concatenate(xs).astype(np.float32), np.concatenate(ys).astype(np.int32)
    names = np.array([f"person {i + 1}" for i in range(owners)])
    metadata = {"input": ["along", "up", "across"], "classes": ["rest", "walk", "run"]}
    whole = Dataset(
        "sensors",
        x,
        y,
        None,
        None,
        3,
        owner_train=np.repeat(np.arange(owners), rows),
        owner_names=names,
        normalise=Normalise("federation", np.ones(3, bool), False),
        metadata=metadata,
    )
    return cut(whole, length, stride, 0, 0.3, keep)


SOURCES: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "synthetic": synthetic,
    "iris": _table("iris", "scikit-learn's 150 flowers of 3 kinds, 4 measures each; one pool."),
    "wine": _table("wine", "scikit-learn's 178 wines of 3 growers, 13 measures each; one pool."),
    "breast_cancer": _table(
        "breast_cancer", "scikit-learn's 569 tumours, 2 classes, 30 measures each; one pool."
    ),
    "diabetes": _table(
        "diabetes", "scikit-learn's 442 patients, 10 measures each, one real target; one pool."
    ),
    "speeches": speeches,
    "sensors": sensors,
}
