"""Tests that the commands in docs/data.md can be run."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import csv, parquet

from fedjax_pfl.presets import baseline
from fedjax_pfl.runs import build
from fedjax_pfl.settings import configuration

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
ROWS = {
    re.search(r"`(\w+)", line)[1]: (
        (re.findall(r"--config=baseline:(\S+?)[` ]", line) or ["fedavg"])[0],
        dict(re.findall(r"--config\.([\w.]+)=([^\s`]+)", line)),
    )
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `") and "--config" in line
}


def settings(row):
    """Returns the preset of a row with its flags applied."""
    preset, flags = ROWS[row]
    config = baseline.get_config(preset)
    for name, text in flags.items():
        group, _, last = name.rpartition(".")
        value = int(text) if text.isdigit() else text
        configuration.override(config, {group: {last: value}} if group else {last: value})
    return config


def test_settings_of_all_rows_are_valid():
    assert set(ROWS) >= {"digits", "speeches", "csv", "hf", "windows", "leaf", "cifar10"}
    for row in ROWS:
        configuration.specify(settings(row))


@pytest.mark.parametrize("row", ["synthetic", "csv", "parquet", "windows", "images", "text", "npy"])
def test_rows_of_the_page_can_be_built(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = [f"{rng.choice(['Bern', 'Cairo'])},{rng.normal():.3f},{i / 7:.3f}" for i in range(90)]
    Path("visits.csv").write_text("\n".join(["hospital,age,days", *lines]))
    parquet.write_table(csv.read_csv("visits.csv"), "visits.parquet")
    hours = [f"h{i // 200},{rng.normal():.3f},{rng.random():.3f}" for i in range(2000)]
    Path("meters.csv").write_text("\n".join(["house,heat,kwh", *hours]))
    speech = "to be or not to be, that is the question. " * 6
    Path("plays.txt").write_text("".join(f"ANNA{i % 10}:\n{speech}\n\n" for i in range(40)))
    for i in range(80):
        path = Path("photos", "cat" if i % 2 else "dog", f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (9, 9, 3), np.uint8)).save(path)
    Path("pool").mkdir()
    np.save("pool/x.npy", rng.integers(0, 255, (200, 8, 8, 1), np.uint8))
    np.save("pool/y.npy", np.arange(200) % 5)
    experiment = build.build(settings(row))
    assert experiment.federation.clients == 10
