"""A node over Flower runs its own code, and none that comes with a message."""

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import node_app, supernode

pytest.importorskip(
    "flwr", reason="Flower is not installed; pip install -e '.[dev]' brings it, as CI does"
)


def test_only_the_nodes_own_program_stands_for_a_message(tmp_path: Path):
    place = supernode.write_commands(tmp_path / "a node")
    names = {"agentapp", "clientapp", "connector", "model", "serverapp", "simulation"}
    assert {path.name for path in place.iterdir()} == {f"flwr-{name}" for name in names}
    for path in place.iterdir():
        assert os.access(path, os.X_OK)
        if path.name != "flwr-clientapp":
            assert subprocess.run([path]).returncode == 1
    line = (place / "flwr-clientapp").read_text().splitlines()[1]
    own = node_app.FOLDER / "local_client.py"
    assert line == f"exec {sys.executable} {own} '{tmp_path / 'a node'}' \"$@\""


def test_a_supernode_finds_these_programs_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    became: list[Any] = []
    monkeypatch.setattr(supernode.os, "execvpe", lambda *words: became.append(words))
    supernode.main([str(tmp_path), "--superlink", "x:1"])
    ((name, words, environment),) = became
    assert (name, words) == ("flower-supernode", ["flower-supernode", "--superlink", "x:1"])
    first = environment["PATH"].split(os.pathsep)[0]
    assert Path(first, "flwr-clientapp").read_text().startswith("#!/bin/sh\nexec")
    for words in ([], ["--superlink"], [str(tmp_path), "--isolation=process"],
                  [str(tmp_path), "--isol", "process"],
                  [str(tmp_path), "--allow-runtime-dependency-installation"]):  # fmt: skip
        with pytest.raises(UsageError):
            supernode.main(words)
    assert len(became) == 1


@pytest.fixture
def local_client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, and Flower's module as it was afterwards."""
    monkeypatch.syspath_prepend(node_app.FOLDER)
    flowers: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    own: Any = importlib.import_module("local_client")
    for name in own._SERVER_CODE_FUNCTIONS:
        monkeypatch.setattr(flowers, name, getattr(flowers, name))
    return own


def test_code_that_comes_with_a_message_is_neither_installed_nor_loaded(
    local_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    flowers = local_client.replace_foreign_code(tmp_path)
    assert flowers.install_from_fab(b"PK\x03\x04", skip_prompt=True) is None
    assert flowers.install_app_dependencies(tmp_path) is None
    load = flowers.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    assert type(load("publisher/app", "1.0.0", "0" * 64)).__name__ == "ClientApp"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delattr(flowers, "install_from_fab")
    with pytest.raises(RuntimeError, match="has no install_from_fab"):
        local_client.replace_foreign_code(tmp_path)


def test_what_is_sent_along_would_not_run():
    with pytest.raises(RuntimeError, match="start it with fedjax_pfl"):
        importlib.import_module("fedjax_pfl.deploy.app.client_app")


def test_a_worker_that_starts_later_is_waited_for(local_client: Any, tmp_path: Path):
    pipe = local_client.node_pipe
    for folder in (tmp_path, tmp_path / "no", Path("/dev/null")):
        with pytest.raises(RuntimeError, match="does not respond") as error:
            pipe.ask(folder, b"x", 0.0)
        assert str(folder) not in str(error.value)

    def serve() -> None:
        with pipe.listening(tmp_path) as there:
            asking, _ = there.accept()
            with asking:
                pipe.send(asking, pipe.receive(asking)[::-1])

    later = threading.Timer(0.3, serve)
    later.start()
    assert pipe.ask(tmp_path, b"abc", 30.0) == b"cba"
    later.join()
