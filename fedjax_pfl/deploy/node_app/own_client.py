"""Flower's flwr-clientapp without the code that came from the server.

python own_client.py FOLDER and Flower's own arguments. Flower sends an app's code to the nodes, and
its own command installs and imports it. Here a message goes to the worker of the node's folder, and
its answer back, by the code that is installed on the node.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import node_pipe
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supernode.cli import flwr_clientapp

_FOREIGN = ("install_from_fab", "install_app_dependencies", "get_load_client_app_fn")


def client_app(folder: Path) -> ClientApp:
    """The app of a node: it asks the worker of the node's folder."""
    app = ClientApp()

    @app.query()
    def answer(message: Message, context: Any) -> Message:
        part: Any = message.content.array_records.get("message", {})
        content = part["message"].data if set(part) == {"message"} else b""
        made = node_pipe.ask(folder, content)
        array = Array(dtype="uint8", shape=(len(made),), stype="bytes", data=made)
        return Message(RecordDict({"message": ArrayRecord({"message": array})}), reply_to=message)

    return app


def replace_foreign_code(folder: Path) -> Any:
    """Lets Flower's module install and load nothing but the node's own app; returns the module."""
    module: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    for name in _FOREIGN:
        if not hasattr(module, name):
            raise RuntimeError(f"this version of Flower has no {name}: install flwr==1.41")
    own = client_app(folder)
    module.install_from_fab = lambda *_, **__: None
    module.install_app_dependencies = lambda *_, **__: None
    module.get_load_client_app_fn = lambda *_, **__: lambda *_: own
    return module


if __name__ == "__main__":
    replace_foreign_code(Path(sys.argv.pop(1)))
    sys.argv[0] = "flwr-clientapp"
    flwr_clientapp()
