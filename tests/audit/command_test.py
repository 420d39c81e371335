"""Tests of `fedjax-pfl audit` on a run directory."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_pfl import audit
from fedjax_pfl.audit import inversion
from fedjax_pfl.data.pictures import pixels
from fedjax_pfl.runs import export, runner
from tests.commands import message, run_here
from tests.runs.common import contents
from tests.runs.export_test import BASE

SLOW = pytest.mark.slow("whole runs; inversion_test and membership_test have the quick ones")


@SLOW
def test_the_command_audits_a_run(tmp_path, capsys, monkeypatch):
    directory, out = tmp_path / "run", tmp_path / "out"
    runner.run({**BASE, "algorithm": "fedper", "upload_bits": 8}, directory)
    files = contents(directory)
    flags = [f"--out={out}", "--clients=1-2", "--examples=3", "--iterations=20"]
    capsys.readouterr()
    run_here("audit", directory, *flags, "--steps=2")
    printed = capsys.readouterr().out
    assert "Images of client 1 from its upload in round 2" in printed
    assert contents(directory) == files
    assert {path.name for path in out.iterdir()} == {"audit.json", "images.png"}
    facts = json.loads((out / "audit.json").read_text())
    assert (facts["algorithm"], facts["inversion"]["layers"]) == ("fedper", ["fc1"])
    assert len(facts["inversion"]["psnr"]) == 3
    assert facts["inversion"]["unknown"] == ["fc2"]
    assert 0 <= facts["membership"]["served"]["auc"] <= 1
    assert facts["membership"]["uploaded"] is None  # the head is private
    assert 0 <= facts["membership"]["body"]["auc"] <= 1
    assert re.search(r"uploaded body +0\.\d", printed)
    assert pixels(out / "images.png").shape[2] == 3
    run_here("audit", directory, *flags, "--first", "--compare_inputs")
    assert "in round 0" in capsys.readouterr().out
    nan = np.full((3, 4, 4, 1), np.nan)
    attempt = inversion.Reconstruction(images=nan, objective=np.nan, mismatch=np.nan)
    monkeypatch.setattr(inversion, "reconstruct", lambda *arguments: attempt)
    run_here("audit", directory, *flags)
    assert "none, because the search ends in values that are" in capsys.readouterr().out
    assert json.loads((out / "audit.json").read_text())["inversion"]["psnr"] == []
    assert {path.name for path in out.iterdir()} == {"audit.json"}

    assert message(run_here, "audit", out) == "say where the files go: --out=FOLDER"
    assert message(run_here, "audit", f"--out={out}").startswith("name one run directory")
    line = message(run_here, "audit", directory, f"--out={out}", "--clients=3")
    assert line.startswith("there is no client 3; there are 3")
    attack = {"attack": "label_flip", "attack_share": 0.34}
    runner.run({**BASE, "algorithm": "fedavg", **attack}, tmp_path / "attacked")
    line = message(run_here, "audit", tmp_path / "attacked", f"--out={out}", "--clients=0-2")
    assert "attacked this run; audit another with --clients" in line
    config = directory / "config.json"
    deployed = json.dumps(json.loads(config.read_text()) | {"deployed": True})
    copied = shutil.copytree(directory, tmp_path / "copied")
    (copied / "config.json").write_text(deployed)
    assert "that was deployed" in message(run_here, "audit", copied, f"--out={out}")
    (copied / "report.html").unlink()
    assert "has not finished" in message(run_here, "audit", copied, f"--out={out}")


def test_images_of_an_earlier_audit_are_removed(tmp_path, monkeypatch):
    def facts(psnr):
        inversion = SimpleNamespace(psnr=psnr, savefig=lambda path, dpi: path.touch())
        return SimpleNamespace(inversion=inversion, as_json=lambda: {"inversion": psnr})

    monkeypatch.setattr(export, "load_result", lambda *_, **__: None)
    monkeypatch.setattr(export, "client_ids", lambda *_: [0])
    monkeypatch.setattr(audit, "draw", lambda inversion: inversion)
    monkeypatch.setattr(audit, "tables", lambda facts: [])
    for psnr, names in (([], []), ([20.0], ["images.png"]), ([], [])):
        monkeypatch.setattr(audit, "audit", lambda *_, psnr=psnr, **__: facts(psnr))
        run_here("audit", "run", f"--out={tmp_path}")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.json", *names]
    monkeypatch.setattr(audit, "audit", lambda *_, **__: pytest.fail("it computes"))
    (tmp_path / "audit.json").unlink()
    for name, content in (("images.png", ""), ("audit.json", "[1]")):
        (tmp_path / name).write_text(content)
        line = message(run_here, "audit", "run", f"--out={tmp_path}")
        assert line.endswith(f"{name} is not of an audit and would be lost; give another --out")
    file = tmp_path / "images.png"
    for out in (file, file / "folder"):
        line = message(run_here, "audit", "run", f"--out={out}")
        assert line == f"{out} cannot be written ({file} is no folder)"
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    line = message(run_here, "audit", "run", f"--out={tmp_path / 'new' / 'folder'}")
    assert line == f"{tmp_path / 'new' / 'folder'} cannot be written ({tmp_path} is read-only)"


@SLOW
def test_a_body_that_stays_on_the_client_hides_images(tmp_path, capsys):
    directory, out = tmp_path / "run", tmp_path / "out"
    runner.run({**BASE, "algorithm": "fedproto", "upload_bits": 8}, directory)
    flags = [f"--out={out}", "--iterations=20"]
    run_here("audit", directory, *flags)
    assert "none, because fc1, which reads the pixels, stays" in capsys.readouterr().out
    assert json.loads((out / "audit.json").read_text())["membership"]["body"] is None
    assert {path.name for path in out.iterdir()} == {"audit.json"}
    run_here("audit", directory, *flags, "--knows_private")
    assert "PSNR in dB. Compared: prototypes." in capsys.readouterr().out
    assert len(json.loads((out / "audit.json").read_text())["inversion"]["psnr"]) == 1
    line = message(run_here, "audit", directory, *flags, "--knows_private", "--compare_inputs")
    assert line == "the upload has no fully connected layer with a bias; leave compare_inputs out"


@SLOW
def test_examples_must_be_images(tmp_path):
    vectors = {**BASE["synthetic"], "shape": (5,)}
    runner.run({**BASE, "algorithm": "fedavg", "synthetic": vectors}, tmp_path / "run")
    line = message(run_here, "audit", tmp_path / "run", f"--out={tmp_path / 'out'}")
    assert line == "synthetic has examples of shape [5]; an audit is for images"
    assert not (tmp_path / "out").exists()
