"""The clients' personal models of a finished run as files.

python -m experiments.export RUN --out=FOLDER                    client-0.safetensors and so on
python -m experiments.export RUN --out=FOLDER --clients=0,3-5    of some clients
python -m experiments.export RUN --out=FOLDER --best             of the best round by validation

RUN is a run directory, of which only the checkpoint is read. In Python, fedjax_pfl.runs.export.load
gives a file's network and variables back.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from fedjax_pfl.cli.command import DATA_DIR, command
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import export


def numbers(text: str) -> list[int]:
    """Clients as 0,3-5 names them."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if not match:
            raise UsageError(f"--clients={text} is no list of clients such as 0,3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise UsageError(f"--clients={text}: {first} is above {last}")
        found += range(first, last + 1)
    return found


def main(argv: Sequence[str]) -> None:
    """Restore, write, say where."""
    chosen = flags.FLAGS
    if len(argv) != 2:
        raise UsageError("name one run directory, such as runs/pfedla")
    if chosen.out is None:
        raise UsageError("say where the files go: --out=FOLDER")
    export.check(Path(chosen.out))
    clients = None if chosen.clients is None else numbers(chosen.clients)
    result = export.restored(Path(argv[1]), data_dir=DATA_DIR.value)
    paths = export.write(result, Path(chosen.out), clients, best=chosen.best)
    size = sum(path.stat().st_size for path in paths)
    print(f"{len(paths)} models, {size / 1e6:.3g} MB: {paths[0]}" + ", ..." * (len(paths) > 1))


if __name__ == "__main__":
    # Here, because other commands have an --out of their own.
    flags.DEFINE_string("out", None, "Folder for the files; it is made, or empty.")
    flags.DEFINE_string("clients", None, "Which, such as 0,3-5. Default: all.")
    flags.DEFINE_bool("best", False, "Models of the round that was best on validation examples.")
    command(main)
