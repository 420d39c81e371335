"""All commands under one name: fedjax-pfl COMMAND ..., wherever the package is installed.

fedjax-pfl pfedla --config=pfedla:digits-k1    as python -m experiments.pfedla in the repository
fedjax-pfl COMMAND --help                      what a command takes

In the repository python -m experiments.cli is the same.
"""

import ast
import runpy
import sys
from pathlib import Path

from fedjax_pfl.cli.command import ending
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.settings.configuration import nearest

COMMANDS = (
    "pfedla",
    "pfedhn",
    "fedmn",
    "factorized_fl",
    "baseline",
    "compare",
    "export",
    "deploy",
    "list",
    "tune",
    "leaderboard",
    "reproduce",
    "studies",
    "scaling",
    "many_clients",
    "benchmark",
    "agree",
)


def described() -> str:
    """What --help shows: a line for each command, read without importing it."""
    lines = [(__doc__ or "").strip(), ""]
    for name in COMMANDS:
        text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        about = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        lines.append(f"  {name.ljust(max(map(len, COMMANDS)))}  {about}")
    return "\n".join(lines)


def main() -> None:
    """Run the command that is named first, as `python -m experiments.COMMAND` does."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    with ending():
        if not name or name.lstrip("-") in ("h", "help"):
            print(described())
        elif name not in COMMANDS:
            raise UsageError(f"there is no command {name!r}{nearest(name, COMMANDS)}")
        else:
            del sys.argv[1]
            runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
