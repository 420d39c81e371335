"""Replacement for flwr-clientapp that never runs the server's code.

    python local_client.py FOLDER [arguments of flwr-clientapp]

Flower's command installs and imports the code that the server sends. This one passes each message
to the worker of the node's folder and returns its response.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import node_pipe
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supernode.cli import flwr_clientapp

_SERVER_CODE_FUNCTIONS = ("install_from_fab", "install_app_dependencies", "get_load_client_app_fn")


def client_app(folder: Path) -> ClientApp:
    """Builds the Flower app that passes messages to the worker of a node's folder."""
    app = ClientApp()

    @app.query()
    def respond(message: Message, context: Any) -> Message:
        """Returns the worker's response; Flower passes a context, which is not used."""
        part: Any = message.content.array_records.get("message", {})
        content = part["message"].data if set(part) == {"message"} else b""
        response = node_pipe.ask(folder, content)
        array = Array(dtype="uint8", shape=(len(response),), stype="bytes", data=response)
        return Message(RecordDict({"message": ArrayRecord({"message": array})}), reply_to=message)

    return app


def replace_foreign_code(folder: Path) -> Any:
    """Patches Flower's module so that it installs nothing and only loads the local app.

    Takes the node's folder and returns the patched module.
    """
    module: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    for name in _SERVER_CODE_FUNCTIONS:
        if not hasattr(module, name):
            raise RuntimeError(f"this version of Flower has no {name}: install flwr==1.42.*")
    local_app = client_app(folder)
    module.install_from_fab = lambda *_, **__: None
    module.install_app_dependencies = lambda *_, **__: None
    module.get_load_client_app_fn = lambda *_, **__: lambda *_: local_app
    return module


if __name__ == "__main__":
    replace_foreign_code(Path(sys.argv.pop(1)))
    sys.argv[0] = "flwr-clientapp"
    flwr_clientapp()
