"""The command fedjax-pfl audit."""

import json
import os
from pathlib import Path

from absl import flags

from fedjax_pfl.cli.command import Call, Command
from fedjax_pfl.cli.configs import define_data_dir
from fedjax_pfl.cli.export import parse_clients
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import export

HELP = """
fedjax-pfl audit RUN --out=FOLDER                 audit.json and, if images come back, images.png
fedjax-pfl audit RUN --out=FOLDER --examples=4    reconstructs four images
fedjax-pfl audit RUN --out=FOLDER --first         from the upload of the first round

RUN is a run directory with images. Its checkpoint and its dataset are read, and nothing of it
changes. The server is curious: it follows the method, and looks into uploads.
"""
_DEFAULT_CLIENTS = 10


def define_flags(options: flags.FlagValues) -> None:
    """Adds the flags of the command to `options`."""
    flags.DEFINE_string("out", None, "Folder for the files, new or existing.", flag_values=options)
    flags.DEFINE_string(
        "clients",
        None,
        "Clients whose membership is inferred, such as 0,3-5. The images belong to the client "
        f"with the lowest number. Unset: the first {_DEFAULT_CLIENTS}.",
        flag_values=options,
    )
    flags.DEFINE_integer(
        "examples", 1, "Images that the client trains on.", 1, 8, flag_values=options
    )
    flags.DEFINE_integer("steps", 1, "Gradient steps of the client.", 1, 20, flag_values=options)
    flags.DEFINE_integer(
        "iterations", 1000, "Optimisation steps of the attack.", 1, flag_values=options
    )
    flags.DEFINE_bool(
        "first",
        False,
        "Reconstruct images from the first round instead of the one after the last.",
        flag_values=options,
    )
    flags.DEFINE_bool(
        "knows_private",
        False,
        "The attacker also knows the layers that stay on the client: the worst case.",
        flag_values=options,
    )
    flags.DEFINE_bool(
        "compare_inputs",
        False,
        "Also compare the inputs of fully connected layers, if the search for images fails.",
        flag_values=options,
    )
    define_data_dir(options)


def write_audit(call: Call) -> None:
    """Audits the run in `call.positional`, writes the numbers and a picture, and prints a table."""
    options = call.options
    if len(call.positional) != 1:
        raise UsageError("name one run directory, such as runs/fedavg")
    if options.out is None:
        raise UsageError("say where the files go: --out=FOLDER")
    from fedjax_pfl import audit
    from fedjax_pfl.report import text_tables

    clients = None if options.clients is None else parse_clients(options.clients)
    result = export.load_result(Path(call.positional[0]), data_dir=options.data_dir)
    folder = Path(options.out)
    _check_folder(folder)
    ids = export.client_ids(result, clients)
    facts = audit.audit(
        result,
        ids if clients else ids[:_DEFAULT_CLIENTS],
        first=options.first,
        examples=options.examples,
        steps=options.steps,
        iterations=options.iterations,
        knows_private=options.knows_private,
        compare_inputs=options.compare_inputs,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "audit.json").write_text(json.dumps(facts.as_json(), indent=2) + "\n")
        if facts.inversion.psnr:
            audit.draw(facts.inversion).savefig(folder / "images.png", dpi=120)
        else:  # of an earlier audit
            (folder / "images.png").unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror})") from None
    print(text_tables.text(audit.tables(facts)))


def _check_folder(folder: Path) -> None:
    """Raises UsageError if the folder of the results cannot be created or has other files."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        file = folder / "audit.json"
        earlier = json.loads(file.read_text()) if file.is_file() else {}
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror})") from None
    except ValueError:
        earlier = {}
    if not existing.is_dir():
        raise UsageError(f"{folder} cannot be written ({existing} is no folder)")
    if not os.access(existing, os.W_OK):
        raise UsageError(f"{folder} cannot be written ({existing} is read-only)")
    names = [name for name in ("audit.json", "images.png") if (folder / name).exists()]
    if names and not (isinstance(earlier, dict) and "inversion" in earlier):
        raise UsageError(
            f"{folder / names[0]} is not of an audit and would be lost; give another --out"
        )


COMMANDS = {"audit": Command(lambda: HELP, define_flags, write_audit)}
