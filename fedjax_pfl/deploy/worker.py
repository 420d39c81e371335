"""Worker of a node: a long-lived process that keeps compiled programs between messages.

python -m fedjax_pfl.deploy.worker FOLDER NODE.json
"""

from collections.abc import Sequence
from pathlib import Path

import jax

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import node_file
from fedjax_pfl.deploy.lines import run_command, to_stderr
from fedjax_pfl.deploy.node import Node, respond
from fedjax_pfl.deploy.node_app import node_pipe


def serve(node: Node) -> None:
    """Responds to requests, one at a time, until the process ends."""
    with node_pipe.listening(node.folder) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    node_pipe.send(connection, respond(node, node_pipe.receive(connection)))
                except OSError as error:
                    to_stderr(f"a response could not be delivered ({error})")


def main(arguments: Sequence[str]) -> None:
    """Serves a node until the process ends; the arguments are its folder and its JSON file.

    Raises UsageError if one of them cannot be used.
    """
    if len(arguments) != 2:
        raise UsageError("two arguments are required: the node's folder and its JSON file")
    folder = Path(arguments[0]).expanduser()
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    node = Node(folder, node_file.read(Path(arguments[1])))
    try:
        serve(node)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be a node's folder ({error.strerror}); use another folder"
        ) from None


if __name__ == "__main__":
    run_command(main)
