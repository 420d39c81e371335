"""A node's process that stays, and keeps what is compiled: Flower starts one for each message.

python -m fedjax_pfl.deploy.worker FOLDER [DATA.json]
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy.app import node_pipe
from fedjax_pfl.deploy.node import Node, answer


def data(path: str) -> dict[str, Any] | None:
    """The settings of a node's own data, from its JSON file; None where it names none."""
    if not path:
        return None
    try:
        found = json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict) or "dataset" not in found:
        raise UsageError(f'{path} must be {{"dataset": "csv:FILE", ...}}')
    return found


def serve(node: Node) -> None:
    """Answer requests, one after the other, until the process is ended."""
    with node_pipe.listening(node.folder) as there:
        while True:
            one, _ = there.accept()
            with one:
                try:
                    node_pipe.send(one, answer(node, node_pipe.receive(one)))
                except OSError as error:
                    print(f"an answer was not taken ({error})", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> None:
    """A folder, and the file of the settings of its data."""
    if not 1 <= len(arguments) <= 2:
        raise UsageError("give the node's folder, and the JSON file that says what its data are")
    folder = Path(arguments[0]).expanduser()
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    serve(Node(folder, data(arguments[1] if len(arguments) > 1 else "")))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
