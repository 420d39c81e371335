"""Tests that images of more than 8 bits are scaled by the range of their type, or refused."""

import re

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from fedjax_pfl.data import load
from tests.commands import message
from tests.data.folders import png

RAMP = np.linspace(0, 65_535, 16).astype(np.uint16).reshape(4, 4)  # multiples of 4,369 = 17 * 257
GREY = np.arange(0, 256, 17).reshape(4, 4)


def folder(root, image, name="1.png", **options):
    (root / "cat").mkdir()
    image.save(root / "cat" / name, **options)
    return f"images:{root}"


@pytest.mark.parametrize("name", ["1.png", "1.tiff"])
@pytest.mark.parametrize("colour", ["rgb", "gray"])
def test_sixteen_bit_images_are_scaled(tmp_path, name, colour):
    dataset = load(folder(tmp_path, Image.fromarray(RAMP), name), size=4, colour=colour)
    assert dataset.x_train.dtype == np.uint8
    for channel in range(dataset.x_train.shape[-1]):
        np.testing.assert_array_equal(dataset.x_train[0, :, :, channel], GREY)


def picture_table(root, content):
    """Writes a Parquet file with a picture twice. Returns its dataset name."""
    table = pa.table({"image": [bytes(content)] * 2, "label": [0, 1]})
    parquet.write_table(table, root / "p.parquet")
    return f"parquet:{root / 'p.parquet'}"


def test_sixteen_bit_images_in_a_table_are_scaled(tmp_path):
    x = load(picture_table(tmp_path, png(RAMP))).x_train
    np.testing.assert_array_equal(x[0, :, :, 0], GREY)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_images_without_a_range_are_refused(tmp_path, dtype):
    at = folder(tmp_path, Image.fromarray(np.ones((4, 4), dtype)), "1.tiff")
    assert re.search(r"1\.tiff .* no defined range.* 8 or 16 bits", message(load, at))


@pytest.mark.parametrize("content", [None, "file,owner\ncat/1.png,Andr\xe9\n".encode("latin-1")])
def test_an_unreadable_list_of_owners_raises_one_line(tmp_path, content):
    at = folder(tmp_path, Image.new("L", (3, 3)))
    owners = tmp_path / "owners.csv"
    owners.mkdir() if content is None else owners.write_bytes(content)
    assert "owners.csv cannot be read" in message(lambda: load(at, owner=str(owners)))


def test_damaged_images_raise_one_line(tmp_path, monkeypatch):
    content = png(np.zeros((30, 30, 1), np.uint8))
    at = content.index(b"IDAT") + 4
    for damaged in (content[:20], content[:at] + b"\xff" * 4 + content[at + 4 :]):
        assert "images cannot be decoded" in message(load, picture_table(tmp_path, damaged))
    # A decompression bomb.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert "images cannot be decoded" in message(load, picture_table(tmp_path, content))
    line = message(load, folder(tmp_path, Image.new("L", (30, 30))))
    assert "1.png cannot be read as an image" in line
