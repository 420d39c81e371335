"""The installed command: fedjax-pfl COMMAND ..."""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from fedjax_pfl.cli.command import Command, run_command
from fedjax_pfl.cli.errors import ending
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.settings.configuration import suggestion

HELP = """Personalised federated learning in JAX.

fedjax-pfl pfedla --config=pfedla:digits-k1    trains a method with a preset
fedjax-pfl COMMAND --help                      shows the flags of a command

Commands:"""


class Entry(NamedTuple):
    """Place of a command and its purpose; the module is imported when the command is run."""

    module: str  # in fedjax_pfl.cli; its COMMANDS holds the command by name
    description: str  # one sentence


COMMANDS = {
    "pfedla": Entry("train", "Trains pFedLA, HeurpFedLA or a method of their tables."),
    "pfedhn": Entry("train", "Trains pFedHN, pFedHN-PC or a method of their tables."),
    "fedmn": Entry("train", "Trains FedMN or a method of its tables."),
    "factorized_fl": Entry("train", "Trains Factorized-FL or a method of its tables."),
    "baseline": Entry("train", "Trains any method on any dataset and partition."),
    "tune": Entry("tune", "Chooses settings on validation examples, with equal budgets."),
    "compare": Entry("compare", "Compares runs: means over seeds, paired tests and curves."),
    "export": Entry("export", "Writes the clients' personal models of a finished run to files."),
    "audit": Entry("audit", "Measures what a curious server learns from the uploads of a run."),
    "import-partition": Entry(
        "import_partition", "Converts clients' examples of PFLlib or FL-bench to NumPy files."
    ),
    "deploy": Entry("deploy", "Trains in several processes of this machine, through Flower."),
    "list": Entry("list", "Lists settings, methods, datasets, partitions, models and presets."),
}


def load(name: str) -> Command:
    """Imports and returns a command by its name; its help starts with its description."""
    entry = COMMANDS[name]
    command: Command = importlib.import_module(f"fedjax_pfl.cli.{entry.module}").COMMANDS[name]
    return command._replace(help=lambda: f"{entry.description}\n\n{command.help().strip()}")


def help_text() -> str:
    """Returns the text of fedjax-pfl --help: usage, and each command with its description."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name.ljust(width)}  {entry.description}" for name, entry in COMMANDS.items()]
    return "\n".join([HELP, *rows])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command that `arguments` start with, on the rest of them; None: sys.argv[1:]."""
    name, *own_arguments = arguments or sys.argv[1:] or ["--help"]
    if "" not in sys.path:
        sys.path.append("")  # the current folder, for MODULE:NAME, as with python -m
    with ending():
        if name.lstrip("-") in ("h", "help"):
            print(help_text())
        elif name not in COMMANDS:
            raise UsageError(f"there is no command {name!r}{suggestion(name, COMMANDS)}")
        else:
            run_command(load(name), own_arguments)
