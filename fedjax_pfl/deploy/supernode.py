"""Starts a Flower SuperNode that runs the installed code, never code that the server sends.

python -m fedjax_pfl.deploy.supernode FOLDER [arguments of flower-supernode]
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import flower_version
from fedjax_pfl.deploy.lines import run_command
from fedjax_pfl.deploy.node_app import FOLDER

_COMMANDS = "commands"
# Flags that would let the server install packages, or bypass the commands written here.
_REFUSED = ("--isolation", "--allow-runtime-dependency-installation")


def write_commands(folder: Path) -> Path:
    """Writes replacements for the commands that Flower starts for its tasks.

    The one for a client's message runs `local_client`; all others exit with an error. Returns the
    folder of the commands, which is in `folder`, that of the node.
    """
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType

    command_folder = folder / _COMMANDS
    command_folder.mkdir(parents=True, exist_ok=True)
    client_command = [sys.executable, str(FOLDER / "local_client.py"), str(folder)]
    for task, name in TASK_TYPE_TO_COMMAND.items():
        line = (
            f'exec {shlex.join(client_command)} "$@"' if task == TaskType.CLIENT_APP else "exit 1"
        )
        path = command_folder / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o700)
    return command_folder


def main(arguments: Sequence[str]) -> None:
    """Replaces this process by a SuperNode.

    The arguments are the node's folder and flower-supernode's arguments. Raises UsageError for
    options that would run the server's code here.
    """
    if not arguments or arguments[0].startswith("-"):
        raise UsageError("the first argument must be the node's folder")
    for word in arguments:
        flag = word.partition("=")[0]
        # Flower accepts shortened flags.
        if len(flag) > 2 and any(name.startswith(flag) for name in _REFUSED):
            raise UsageError(f"{word} would let the server's code run on this node; leave it out")
    flower_version.check()
    folder = Path(arguments[0]).expanduser().absolute()
    if os.pathsep in str(folder):  # PATH would not contain the commands
        raise UsageError(
            f"{folder} contains {os.pathsep!r}, and Flower would run the server's code; use "
            "another folder"
        )
    try:
        command_folder = write_commands(folder)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be a node's folder ({error.strerror}); use another folder"
        ) from None
    search_path = [
        str(command_folder),
        str(Path(sys.executable).parent),
        os.environ.get("PATH", ""),
    ]
    environment = {**os.environ, "PATH": os.pathsep.join(search_path)}
    command = ["flower-supernode", *arguments[1:]]
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    run_command(main)
