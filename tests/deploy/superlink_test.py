"""A SuperLink takes commands from its own machine only."""

import asyncio
import os
import sys

import pytest

from fedjax_pfl.deploy import superlink
from tests.commands import message

pytest.importorskip(
    "flwr", reason="Flower is not installed; pip install -e '.[dev]' brings it, as CI does"
)

NODE, COMMAND, APP = "/v1/fleet/pull-messages", "/v1/control/start-run", "/v1/runtime/run"


def status(app, path, client, kind="http"):
    """Returns the status of the answer to a POST without content."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(event):
        sent.append(event)

    scope = {"type": kind, "http_version": "1.1", "method": "POST", "path": path,
             "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "https",
             "headers": [], "client": client, "server": ("127.0.0.1", 8000)}  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent[0].get("status", sent[0].get("code"))


@pytest.fixture(scope="module")
def flower_app():
    """Returns the application that Flower is asked to serve, and the arguments that it gets."""
    served, patch = [], pytest.MonkeyPatch()
    import flwr.superlink.cli
    import flwr.superlink.main

    def serve():
        served.append((flwr.superlink.main.create_app(), list(sys.argv)))

    patch.setattr(flwr.superlink.cli, "flower_superlink", serve)
    patch.setattr(flwr.superlink.main, "create_app", flwr.superlink.main.create_app)
    patch.setattr(sys, "argv", sys.argv)
    patch.setenv("FORWARDED_ALLOW_IPS", "*")
    superlink.main(["--port", "8000"])
    assert "FORWARDED_ALLOW_IPS" not in os.environ  # "*" would believe any claim of an address
    yield served[0]
    patch.undo()


def test_nodes_have_keys_and_runs_install_nothing(flower_app):
    assert flower_app[1] == ["flower-superlink", "--port", "8000", "--enable-supernode-auth",
                             "--disable-runtime-dependency-installation"]  # fmt: skip


@pytest.mark.parametrize(
    "client", [("192.0.2.7", 5000), ("2001:db8::7", 5000), ("testclient", 5000), None]
)
def test_other_machines_can_be_nodes_only(flower_app, client):
    for path in (COMMAND, APP, "/docs", "/v1/fleet", "/", NODE.replace("fleet", "Fleet")):
        assert status(flower_app[0], path, client) == 403, path
    assert status(flower_app[0], NODE, client) not in (403, 404)


@pytest.mark.parametrize("client", [("127.0.0.1", 5000), ("::1", 5000), ("::ffff:127.0.0.1", 1)])
def test_the_server_itself_gives_commands(flower_app, client):
    for path in (COMMAND, NODE):
        assert status(flower_app[0], path, client) not in (403, 404)


def test_other_connections_are_closed():
    guarded = superlink.with_local_commands(None)
    assert status(guarded, COMMAND, ("192.0.2.7", 5000), kind="websocket") == 1008


@pytest.mark.parametrize("argument", ["--insecure", "--insec", "--allow-runtime-dep=1"])
def test_an_open_server_is_refused(argument):
    line = f"{argument} would leave the server open; leave it out"
    assert message(superlink.main, ["--port", "8000", argument]) == line
