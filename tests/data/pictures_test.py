"""Tests that images of more than 8 bits are scaled by the range of their type, or refused."""

import io

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import load

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


def test_sixteen_bit_images_in_a_table_are_scaled(tmp_path):
    file = io.BytesIO()
    Image.fromarray(RAMP).save(file, "PNG")
    parquet.write_table(
        pa.table({"image": [file.getvalue()] * 2, "label": [0, 1]}), tmp_path / "p.parquet"
    )
    x = load(f"parquet:{tmp_path / 'p.parquet'}").x_train
    np.testing.assert_array_equal(x[0, :, :, 0], GREY)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_images_without_a_range_are_refused(tmp_path, dtype):
    at = folder(tmp_path, Image.fromarray(np.ones((4, 4), dtype)), "1.tiff")
    with pytest.raises(UsageError, match=r"1\.tiff .* no defined range.* 8 or 16 bits") as error:
        load(at)
    assert "\n" not in str(error.value)


def test_a_decompression_bomb_raises_one_line(tmp_path, monkeypatch):
    at = folder(tmp_path, Image.new("L", (30, 30)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UsageError, match=r"1\.png cannot be read as an image") as error:
        load(at)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, "file,owner\ncat/1.png,Andr\xe9\n".encode("latin-1")])
def test_an_unreadable_list_of_owners_raises_one_line(tmp_path, content):
    at = folder(tmp_path, Image.new("L", (3, 3)))
    owners = tmp_path / "owners.csv"
    owners.mkdir() if content is None else owners.write_bytes(content)
    with pytest.raises(UsageError, match=r"owners\.csv cannot be read") as error:
        load(at, owner=str(owners))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["cut", "bits", "large"])
def test_damaged_images_in_a_table_raise_one_line(tmp_path, damage, monkeypatch):
    file = io.BytesIO()
    Image.new("L", (30, 30)).save(file, "PNG")
    content = bytearray(file.getvalue())
    if damage == "cut":
        del content[20:]
    elif damage == "bits":
        at = content.index(b"IDAT") + 4
        content[at : at + 4] = b"\xff" * 4
    else:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    table = pa.table({"image": [bytes(content)] * 2, "label": [0, 1]})
    parquet.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(UsageError, match="images cannot be decoded") as error:
        load(f"parquet:{tmp_path / 'p.parquet'}")
    assert "\n" not in str(error.value)
