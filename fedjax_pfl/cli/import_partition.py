"""The command fedjax-pfl import-partition."""

import shlex
from pathlib import Path

from absl import flags

from fedjax_pfl.cli.command import Call, Command
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.data import foreign_partitions

HELP = """
fedjax-pfl import-partition PFLlib/dataset/Cifar10 --out=FOLDER
fedjax-pfl import-partition FL-bench/data/cifar10 --out=FOLDER

Reads the examples of each client as PFLlib (config.json, train/0.npz, ...) or FL-bench
(partition.pkl) divided them into training and test examples, and writes NumPy files. Pickles in
these folders may hold numbers, arrays, lists and dicts only; nothing in them is executed.
"""


def define_flags(options: flags.FlagValues) -> None:
    """Adds the flag --out to `options`."""
    flags.DEFINE_string("out", None, "New folder for the NumPy files.", flag_values=options)


def import_partition(call: Call) -> None:
    """Converts the folder in `call.positional` to NumPy files in --out, and prints what it has."""
    options = call.options
    if len(call.positional) != 1:
        raise UsageError("name one folder, such as PFLlib/dataset/Cifar10")
    if options.out is None:
        raise UsageError("say where the files go: --out=FOLDER")
    out = Path(options.out)
    if out.exists():
        raise UsageError(f"{out} exists; choose a new folder for --out")
    partition = foreign_partitions.read(Path(call.positional[0]))
    try:
        foreign_partitions.write(partition, out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror})") from None
    train, test = partition.train, partition.test
    clients, dataset = int(train.owner.max()) + 1, shlex.quote(f"npy:{out}")
    print(
        f"{partition.library}: {clients} clients, {partition.classes} classes, "
        f"{len(train.y):,} training and {len(test.y):,} test examples of shape "
        f"{list(train.x.shape[1:])}, {train.x.dtype}\n\n"
        f"fedjax-pfl baseline --config.algorithm=fedavg --config.dataset={dataset} "
        f"--config.partition=natural --config.split=official --config.clients={clients}"
    )


COMMANDS = {"import-partition": Command(lambda: HELP, define_flags, import_partition)}
