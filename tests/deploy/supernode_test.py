"""A node over Flower runs its installed code, never code from the server."""

import importlib
import importlib.metadata
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import node_app, supernode, worker
from tests.commands import message

pytest.importorskip(
    "flwr", reason="Flower is not installed; pip install -e '.[dev]' brings it, as CI does"
)


def test_only_the_command_for_messages_runs_code(tmp_path):
    folder = supernode.write_commands(tmp_path / "a node")
    names = {"agentapp", "clientapp", "connector", "model", "serverapp", "simulation"}
    assert {path.name for path in folder.iterdir()} == {f"flwr-{name}" for name in names}
    for path in folder.iterdir():
        assert os.access(path, os.X_OK)
        if path.name != "flwr-clientapp":
            assert subprocess.run([path]).returncode == 1
    line = (folder / "flwr-clientapp").read_text().splitlines()[1]
    program = node_app.FOLDER / "local_client.py"
    assert line == f"exec {sys.executable} {program} '{tmp_path / 'a node'}' \"$@\""


def test_a_supernode_finds_the_commands_first(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(supernode.os, "execvpe", lambda *arguments: calls.append(arguments))
    supernode.main([str(tmp_path), "--superlink", "x:1"])
    ((name, arguments, environment),) = calls
    assert (name, arguments) == ("flower-supernode", ["flower-supernode", "--superlink", "x:1"])
    first = environment["PATH"].split(os.pathsep)[0]
    assert Path(first, "flwr-clientapp").read_text().startswith("#!/bin/sh\nexec")
    for arguments in ([], ["--superlink"], [str(tmp_path), "--isolation=process"],
                  [str(tmp_path), "--isol", "process"],
                  [str(tmp_path), "--allow-runtime-dependency-installation"]):  # fmt: skip
        with pytest.raises(UsageError):
            supernode.main(arguments)
    assert len(calls) == 1


def test_a_folder_that_cannot_be_in_path_is_refused(tmp_path, monkeypatch):
    """Flower would find its own command instead, which runs the server's code."""
    monkeypatch.setattr(supernode.os, "execvpe", None)
    folder = tmp_path / "at 12:30"
    assert "contains ':', and Flower would run" in message(supernode.main, [str(folder)])
    assert not folder.exists()


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "a"
    path.write_text('{"dataset": "wine"}')
    for main, arguments in ((supernode.main, [path]), (worker.main, [path, path])):
        line = message(main, [str(argument) for argument in arguments])
        assert line.startswith(f"{path} cannot be a node's folder (")


@pytest.fixture
def local_client(monkeypatch):
    """Imports the module, and restores Flower's module afterwards."""
    monkeypatch.syspath_prepend(node_app.FOLDER)
    flowers = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    module = importlib.import_module("local_client")
    for name in module._SERVER_CODE_FUNCTIONS:
        monkeypatch.setattr(flowers, name, getattr(flowers, name))
    return module


def test_code_from_the_server_is_neither_installed_nor_loaded(local_client, tmp_path, monkeypatch):
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


@pytest.mark.parametrize("version", ["1.41.0", "1.43.0", "1.420.0", None])
def test_another_version_of_flower_is_refused(version, tmp_path, monkeypatch):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(supernode.flower_version.metadata, "version", installed)
    problem = "not installed" if version is None else f"{version} is installed, and only 1.42"
    with pytest.raises(UsageError, match=rf"^Flower .*{problem}.*; run pip install 'flwr==1.42"):
        supernode.main([str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_the_sent_client_app_does_not_run():
    with pytest.raises(RuntimeError, match="start it with fedjax_pfl"):
        importlib.import_module("fedjax_pfl.deploy.app.client_app")


def test_requests_wait_for_a_worker_that_starts_later(local_client, tmp_path):
    pipe = local_client.node_pipe
    for folder in (tmp_path, tmp_path / "no", Path("/dev/null")):
        with pytest.raises(RuntimeError, match="does not respond") as error:
            pipe.ask(folder, b"x", 0.0)
        assert str(folder) not in str(error.value)

    def serve():
        with pipe.listening(tmp_path) as listener:
            connection, _ = listener.accept()
            with connection:
                pipe.send(connection, pipe.receive(connection)[::-1])

    later = threading.Timer(0.3, serve)
    later.start()
    assert pipe.ask(tmp_path, b"abc", 30.0) == b"cba"
    later.join()
