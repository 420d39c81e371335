"""Starts Flower's SuperNode so that it runs the node's own code and none that its server sends.

python -m fedjax_pfl.deploy.supernode FOLDER and the arguments of flower-supernode
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy.node_app import HERE

_COMMANDS = "commands"
# Flags that would let the server choose what is installed, or start processes otherwise.
_REFUSED = ("--isolation", "--allow-runtime-dependency-installation")


def commands(folder: Path) -> Path:
    """Writes the programs that Flower starts for a task, in place of its own.

    Only the one for a client's message does anything.
    """
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType

    place = folder / _COMMANDS
    place.mkdir(parents=True, exist_ok=True)
    own = [sys.executable, str(HERE / "own_client.py"), str(folder)]
    for task, name in TASK_TYPE_TO_COMMAND.items():
        line = f'exec {shlex.join(own)} "$@"' if task == TaskType.CLIENT_APP else "exit 1"
        path = place / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o700)
    return place


def main(arguments: Sequence[str]) -> None:
    """Becomes the SuperNode of a folder."""
    if not arguments or arguments[0].startswith("-"):
        raise UsageError("give the node's folder, and then the arguments of flower-supernode")
    for word in arguments:
        flag = word.partition("=")[0]
        if len(flag) > 2 and any(name.startswith(flag) for name in _REFUSED):  # Flower shortens
            raise UsageError(f"{word} would let the server's code run on this node; leave it out")
    folder = Path(arguments[0]).expanduser().absolute()
    own = [str(commands(folder)), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    environment = {**os.environ, "PATH": os.pathsep.join(own)}
    command = ["flower-supernode", *arguments[1:]]
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)
