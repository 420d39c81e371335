"""A method over processes of their own on this machine, with Flower between them.

python -m experiments.deploy --config=pfedla:digits --nodes=4

It makes certificates and keys, starts a SuperLink and the nodes, with TLS and node authentication,
and ends all that it has started. The same command on the same run directory goes on. What is a
node's own, and at the end its model, is in a folder of its own. docs/deploy.md leads from here to
machines of several people.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from fedjax_pfl.cli.command import command, default_workdir, replace_length
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import assembly
from fedjax_pfl.report import run_reader


def main(argv: Sequence[str]) -> None:
    """Start, follow, show, end."""
    chosen = flags.FLAGS
    if len(argv) > 1:
        raise UsageError(f"{argv[1]!r} is no flag; settings are given as --config.KEY=VALUE")
    if importlib.util.find_spec("flwr") is None:
        raise UsageError("Flower is not there: install it, pip install 'fedjax_pfl[flower]'")
    from fedjax_pfl.deploy import trial

    given = chosen.config.copy_and_resolve_references()
    replace_length(given, sys.argv[1:])
    given.clients = chosen.nodes
    if given.clients_per_round is not None:
        given.clients_per_round = min(given.clients_per_round, chosen.nodes)
    settings, words = assembly.complete(given.to_dict())
    if len(chosen.data) not in (0, chosen.nodes):
        raise UsageError(f"--data has {len(chosen.data)} files, and there are {chosen.nodes} nodes")
    workdir = Path(chosen.workdir or default_workdir("deploy", sys.argv[1:])).absolute()
    folder = Path(chosen.folder or f"{workdir}-nodes").absolute()
    waiting = {"seconds": chosen.seconds, "least": chosen.least}
    asked = {**assembly.plain(settings, words), **assembly.brought(given.to_dict())}
    files = [str(Path(path).absolute()) for path in chosen.data]
    try:
        with trial.interrupted():
            trial.run(asked, workdir, folder, waiting, lambda line: print(line, flush=True), files)
    except KeyboardInterrupt:
        print("Stopped, and all that was started; the same command goes on.", file=sys.stderr)
        sys.exit(130)
    from fedjax_pfl.report.page import table  # with all that draws

    print(table(run_reader.read(workdir).metrics))
    print(f"\nReport: {_near(workdir / 'report.html')}")
    print(f"Models: {_near(folder)}/node-*/run-*/model.safetensors")


def _near(path: Path) -> str:
    """Relative where it lies below."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    # Here, because other commands have flags of these names.
    flags.DEFINE_integer("nodes", 4, "Clients, each a node of its own.", lower_bound=1)
    flags.DEFINE_string("folder", None, "Of keys, logs and nodes. Default: --workdir and -nodes.")
    flags.DEFINE_list("data", [], "A JSON file for each node that says where its examples are.")
    flags.DEFINE_float("seconds", 600, "How long a round waits for answers.", lower_bound=1)
    flags.DEFINE_integer("least", 1, "Answers that a round needs.", lower_bound=0)
    command(main, "pfedla")
