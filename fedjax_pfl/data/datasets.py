"""Functions that load datasets: built-in ones, arrays, files, and TensorFlow Datasets.

Each returns a `Dataset`, which `partition` divides among clients.
"""

from typing import Any

from fedjax_pfl.data import dataset_registry
from fedjax_pfl.data.dataset import DataDir, Dataset
from fedjax_pfl.data.dataset import arrays as from_arrays

__all__ = [
    "digits",
    "from_arrays",
    "from_csv",
    "from_images",
    "from_npy",
    "from_parquet",
    "from_tfds",
]


def digits() -> Dataset:
    """Returns scikit-learn's 1,797 handwritten digits as images of shape [8, 8, 1].

    >>> digits().x_train.shape
    (1797, 8, 8, 1)
    """
    return dataset_registry.load("digits")


def from_csv(path: str, **settings: Any) -> Dataset:
    """Reads a CSV file with a header.

    Args:
      path: The file.
      **settings: Keyword arguments, the settings of the source `csv`, such as `label` (the
        column to predict) and `owner` (the column with the owner of an example).
    """
    return dataset_registry.load(f"csv:{path}", **settings)


def from_parquet(path: str, **settings: Any) -> Dataset:
    """Reads a Parquet file or a folder of them. Keyword arguments as for `from_csv`."""
    return dataset_registry.load(f"parquet:{path}", **settings)


def from_images(path: str, **settings: Any) -> Dataset:
    """Reads images PATH/CLASS/*.png, or in other folders.

    Args:
      path: The folder.
      **settings: Keyword arguments, the settings of the source `images`, such as `size`, and
        `folders`, which says which level of folders is the class and which the owner.
    """
    return dataset_registry.load(f"images:{path}", **settings)


def from_npy(folder: str) -> Dataset:
    """Reads x.npy, y.npy and, if they exist, owner.npy and the test set x_test.npy, y_test.npy.

    `fedjax-pfl import-partition` writes such a folder from a partition of PFLlib or FL-bench.
    """
    return dataset_registry.load(f"npy:{folder}")


def from_tfds(name: str, data_dir: DataDir = None, *, fraction: float = 1.0) -> Dataset:
    """Reads a prepared TensorFlow dataset such as "cifar10".

    Args:
      name: Name of the dataset.
      data_dir: Folder with prepared datasets. Default: TFDS_DATA_DIR or the default of tfds.
      fraction: Fraction of the examples to use, sampled at random.
    """
    return dataset_registry.load(name, data_dir, fraction=fraction)
