"""The command fedjax-pfl deploy."""

import os
import sys
from functools import partial
from pathlib import Path

from absl import flags

from fedjax_pfl.cli.command import Call, Command, check_no_positional
from fedjax_pfl.cli.configs import changed_settings, default_workdir, define_data_dir, read_settings
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.deploy import assembly, flower_version
from fedjax_pfl.deploy.node_file import DATA_SETTINGS
from fedjax_pfl.report import loggers, run_reader
from fedjax_pfl.settings import selection

HELP = """
fedjax-pfl deploy --config=pfedla:digits --nodes=4

Makes certificates and keys, and starts a SuperLink and the nodes, with TLS and node authentication.
At the end it stops everything that it started. Each node has a folder for its own state and, at the
end, its model. Give the same command again to resume. docs/deploy.md shows how to go from here to
machines of several people.
"""


def define_flags(options: flags.FlagValues) -> None:
    """Adds the flags of the command to `options`, except --config."""
    string = partial(flags.DEFINE_string, flag_values=options)
    integer = partial(flags.DEFINE_integer, flag_values=options)
    string("workdir", None, "Run directory. Default: runs/ and the preset.")
    define_data_dir(options)
    integer("nodes", 4, "Number of nodes, one for each client.", lower_bound=1)
    string("folder", None, "Folder for keys, logs and nodes. Default: --workdir and -nodes.")
    flags.DEFINE_list(
        "data",
        [],
        "A JSON file for each node that says where its examples are.",
        flag_values=options,
    )
    flags.DEFINE_float(
        "round_seconds",
        600,
        "Seconds that a round waits for answers.",
        lower_bound=1,
        upper_bound=1e9,
        flag_values=options,
    )
    integer("min_answers", 1, "Answers that a round needs.", lower_bound=0)


def deploy(call: Call) -> None:
    """Starts a Flower node per client, trains, stops the nodes, and prints scores and paths."""
    options = call.options
    check_no_positional(call)
    flower_version.check()
    from fedjax_pfl.deploy import trial

    config = read_settings(options, call.arguments)
    changed = changed_settings(options)
    in_files = [name for name in changed if name.partition(".")[0] in DATA_SETTINGS]
    if options.data and in_files:
        raise UsageError(
            f"--config.{in_files[0]} is a setting of data, which the files of --data decide; set "
            "it in each of them"
        )
    if options.data and options.data_dir is not None:
        raise UsageError("--data_dir has no effect with --data; set data_dir in each of its files")
    if changed.get("clients", options.nodes) != options.nodes:
        raise UsageError(
            f"config.clients is {config.clients}, and there are {options.nodes} nodes, one for "
            f"each client; give --nodes={config.clients}"
        )
    config.clients = options.nodes
    if config.clients_per_round is not None and "clients_per_round" not in changed:
        config.clients_per_round = min(config.clients_per_round, options.nodes)
    settings, registry = assembly.complete(config.to_dict())
    selection.check_used(selection.nested(changed), [settings], registry)
    if len(options.data) not in (0, options.nodes):
        raise UsageError(
            f"--data has {len(options.data)} files, and there are {options.nodes} nodes"
        )
    loggers.from_setting(settings.log_to, "")
    workdir = Path(options.workdir or default_workdir("deploy", call.arguments)).absolute()
    folder = Path(options.folder or f"{workdir}-nodes").absolute()
    waiting = {"seconds": options.round_seconds, "min_answers": options.min_answers}
    requested = {**assembly.to_plain(settings, registry), **assembly.user_code(config.to_dict())}
    files = [str(Path(path).absolute()) for path in options.data]
    try:
        with trial.sigterm_as_interrupt():
            trial.run(requested, workdir, folder, waiting, partial(print, flush=True), files)
    except KeyboardInterrupt:
        print("Stopped, with all nodes; give the same command again to resume.", file=sys.stderr)
        sys.exit(130)
    from fedjax_pfl.report.page import table  # imports matplotlib

    print(table(run_reader.read(workdir).metrics))
    print(f"\nReport: {_relative(workdir / 'report.html')}")
    print(f"Models: {_relative(folder)}/node-*/run-*/model.safetensors")


def _relative(path: Path) -> str:
    """Returns a path relative to the current folder if it is in it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


COMMANDS = {"deploy": Command(lambda: HELP, define_flags, deploy, system="pfedla")}
