"""A node's long-lived process, which keeps compiled programs between messages.

python -m fedjax_pfl.deploy.worker FOLDER NODE.json
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import node_file
from fedjax_pfl.deploy.lines import to_stderr
from fedjax_pfl.deploy.node import Node, answer
from fedjax_pfl.deploy.node_app import node_pipe


def serve(one: Node) -> None:
    """Answers requests one by one until the process ends."""
    with node_pipe.listening(one.folder) as there:
        while True:
            asking, _ = there.accept()
            with asking:
                try:
                    node_pipe.send(asking, answer(one, node_pipe.receive(asking)))
                except OSError as error:
                    to_stderr(f"an answer was not taken ({error})")


def main(arguments: Sequence[str]) -> None:
    """Serves the node of a folder and a file."""
    if len(arguments) != 2:
        raise UsageError("give the node's folder, and the JSON file that says what its data are")
    folder = Path(arguments[0]).expanduser()
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    serve(Node(folder, node_file.read(Path(arguments[1]))))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
