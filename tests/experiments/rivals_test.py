"""Tests of the programs and checkouts of other libraries."""

import subprocess
import sys
from pathlib import Path

from experiments.libraries import rivals


def test_a_relative_python_is_found_in_any_folder(monkeypatch):
    """Adapters run in folders of their own. Links stay, because a venv's Python is one."""
    folder, name = Path(sys.executable).parts[-2:]
    monkeypatch.chdir(Path(sys.executable).parents[1])
    assert rivals.python("pfllib_python", f"{folder}/{name}") == sys.executable


def test_the_commit_is_of_the_checkout_itself(tmp_path):
    """A folder inside another repository, such as an unpacked archive, has no known commit."""

    def git(*arguments):
        options = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *options, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "inside").mkdir()
    assert rivals.commit(str(tmp_path)) == "unknown"
    git("init")
    git("commit", "--allow-empty", "--message=start")
    head = (tmp_path / ".git" / "HEAD").read_text().split()[-1]
    full = (tmp_path / ".git" / head).read_text()
    commit = rivals.commit(str(tmp_path))
    assert len(commit) >= 7
    assert full.startswith(commit)
    assert rivals.commit(str(tmp_path / "inside")) == "unknown"
