"""Flower's app of a node: it hands a request to the node's worker, and its answer back."""

from pathlib import Path
from typing import Any

import node_pipe
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def answer(message: Message, context: Context) -> Message:
    """By the worker of the folder that the node was started with, or here where there is none."""
    part: Any = message.content.array_records.get("message", {})
    content = part["message"].data if set(part) == {"message"} else b""
    folder = Path(str(context.node_config["folder"])).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    made = node_pipe.ask(folder, content)
    if made is None:
        from fedjax_pfl.deploy import node, worker

        own = worker.node(folder, str(context.node_config.get("data", "")))
        made = node.answer(own, content)
    array = Array(dtype="uint8", shape=(len(made),), stype="bytes", data=made)
    return Message(RecordDict({"message": ArrayRecord({"message": array})}), reply_to=message)
