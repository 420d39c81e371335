"""The command fedjax-pfl export."""

import re
from pathlib import Path

from absl import flags

from fedjax_pfl.cli.command import Call, Command
from fedjax_pfl.cli.configs import define_data_dir
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import export

_MOST_CLIENTS = 10_000_000  # in one range

HELP = """
fedjax-pfl export RUN --out=FOLDER                    client-0.safetensors and so on
fedjax-pfl export RUN --out=FOLDER --clients=0,3-5    some clients
fedjax-pfl export RUN --out=FOLDER --best             the best round by validation
fedjax-pfl export RUN --out=FOLDER --torch            a PyTorch state_dict per client

RUN is a run directory. Its checkpoint and its dataset are read, and nothing is trained. In Python,
fedjax_pfl.runs.export.load reads the network and the variables of a file.
"""


def define_flags(options: flags.FlagValues) -> None:
    """Adds the flags --out, --clients, --best, --torch and --data_dir to `options`."""
    flags.DEFINE_string("out", None, "Folder for the files, empty or new.", flag_values=options)
    flags.DEFINE_string(
        "clients", None, "Clients to export, such as 0,3-5. Default: all.", flag_values=options
    )
    flags.DEFINE_bool(
        "best",
        False,
        "Export the models of the best round by validation instead of the last.",
        flag_values=options,
    )
    flags.DEFINE_bool(
        "torch",
        False,
        "Write names and layout of a PyTorch state_dict, as safetensors.torch.load_file reads it.",
        flag_values=options,
    )
    define_data_dir(options)


def parse_clients(text: str) -> list[int]:
    """Returns the client numbers in a text: "0,3-5" gives [0, 3, 4, 5]; raises a UsageError."""
    clients: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if not match:
            raise UsageError(f"--clients={text} is no list of clients such as 0,3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise UsageError(f"--clients={text}: {first} is above {last}")
        if last - first >= _MOST_CLIENTS:
            raise UsageError(
                f"--clients={text} names more than {_MOST_CLIENTS:,} clients; name fewer, or leave "
                "it out for all"
            )
        clients += range(first, last + 1)
    return clients


def write_models(call: Call) -> None:
    """Writes the personal models of the run in `call.positional` to --out, one file per client."""
    options = call.options
    if len(call.positional) != 1:
        raise UsageError("name one run directory, such as runs/pfedla")
    if options.out is None:
        raise UsageError("say where the files go: --out=FOLDER")
    export.check_folder(Path(options.out))
    clients = None if options.clients is None else parse_clients(options.clients)
    result = export.load_result(Path(call.positional[0]), data_dir=options.data_dir)
    paths = export.write_models(
        result, Path(options.out), clients, best=options.best, torch=options.torch
    )
    size = sum(path.stat().st_size for path in paths)
    print(f"{len(paths)} models, {size / 1e6:.3g} MB: {paths[0]}" + ", ..." * (len(paths) > 1))


COMMANDS = {"export": Command(lambda: HELP, define_flags, write_models)}
