"""Tests of checks of flags, before long measurements."""

import pytest
from absl import flags

from experiments import agree, flag_checks, scaling
from experiments.libraries import rivals
from tests.commands import Flags, message

LINE = "--out=/nowhere/a.json is in no folder that exists"


def test_a_file_needs_a_folder(tmp_path):
    flag_checks.require_folders(
        Flags(out=str(tmp_path / "new.json"), picture=None), "out", "picture"
    )
    assert message(flag_checks.require_folders, Flags(out="/nowhere/a.json"), "out") == LINE


@pytest.mark.parametrize(
    ("script", "work"),
    [(scaling, "sizes"), (agree, "compare_parameters")],
    ids=["scaling", "agree"],
)
def test_a_missing_folder_is_told_before_the_work(script, work, monkeypatch):
    values = {"clients": ["10"], "model": "lenet", "methods": ["fedavg"], "cohort": 1, "rounds": 0}
    values |= {"out": "/nowhere/a.json", "pfllib": "checkout", "limit": 1.0}
    monkeypatch.setattr(flags, "FLAGS", Flags(**values))
    monkeypatch.setattr(rivals, "checkout", lambda key, path: path)
    monkeypatch.setattr(script, work, lambda *_: pytest.fail("it works"))
    assert message(script.main, ["script"]) == LINE
