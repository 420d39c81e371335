"""A node's process that stays, and keeps what is compiled: Flower starts one for each message.

python -m fedjax_pfl.deploy.worker FOLDER [DATA.json]
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy.app import node_pipe
from fedjax_pfl.deploy.node import Node, answer


def node(folder: Path, path: str) -> Node:
    """A node, as its JSON file says: the settings of its data, and the code that it runs."""
    if not path:
        return Node(folder)
    try:
        found = json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    known = isinstance(found, dict) and ("dataset" in found or set(found) == {"code"})
    code = found.pop("code", []) if known else None
    if not isinstance(code, list) or not all(isinstance(one, str) for one in code):
        raise UsageError(
            f'{path} must be {{"dataset": "csv:FILE", ...}}, with "code": ["MODULE:NAME"] where it '
            "runs what is not the library's"
        )
    return Node(folder, found or None, tuple(code))


def serve(one: Node) -> None:
    """Answer requests, one after the other, until the process is ended."""
    with node_pipe.listening(one.folder) as there:
        while True:
            asking, _ = there.accept()
            with asking:
                try:
                    node_pipe.send(asking, answer(one, node_pipe.receive(asking)))
                except OSError as error:
                    print(f"an answer was not taken ({error})", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> None:
    """A folder, and the file of the settings of its data."""
    if not 1 <= len(arguments) <= 2:
        raise UsageError("give the node's folder, and the JSON file that says what its data are")
    folder = Path(arguments[0]).expanduser()
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    serve(node(folder, arguments[1] if len(arguments) > 1 else ""))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
