"""Parts that all commands share: flags, --help, and the way from arguments to a function."""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import app, flags, logging

from fedjax_pfl.cli.configs import check_keys, define_config, resolve_config
from fedjax_pfl.cli.errors import ending, in_one_line, own_flags
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.settings.listing import wrapped

_HELP = ("h", "help", "helpshort", "helpfull")


class Call(NamedTuple):
    """One call of a command of `fedjax-pfl`: its arguments, also as parsed by absl."""

    arguments: Sequence[str]  # all after the command's name; presets as FILE.py:PRESET
    options: flags.FlagValues  # parsed flags
    positional: Sequence[str]  # arguments that are no flags, such as paths of runs


def check_no_positional(call: Call) -> None:
    """Raises a UsageError if a call of a command without positional arguments has one."""
    if call.positional:
        raise UsageError(
            f"{call.positional[0]!r} is no flag; settings are given as --config.KEY=VALUE"
        )


class Command(NamedTuple):
    """A command of `fedjax-pfl`: its help, its flags and the function that runs it."""

    help: Callable[[], str]  # text above the list of flags
    define_flags: Callable[[flags.FlagValues], None]  # adds flags, not --config
    run: Callable[[Call], None]  # does the work and prints the results
    system: str | None = None  # system with the default preset of --config; None: no --config


def run_command(command: Command, arguments: Sequence[str]) -> None:
    """Runs a command with its arguments, without its name, and exits; status 2: UsageError."""
    with ending():
        options, arguments = define(command, arguments)
        _run(
            lambda argv: command.run(Call(arguments, options, argv[1:])),
            options,
            arguments,
            command.help,
        )


def define(command: Command, arguments: Sequence[str]) -> tuple[flags.FlagValues, Sequence[str]]:
    """Returns the flags of a command, not yet parsed, and its arguments.

    In the arguments, presets are written as FILE.py:PRESET.
    """
    options = flags.FlagValues()
    command.define_flags(options)
    if command.system is not None:
        arguments = resolve_config(arguments, command.system)
        check_keys(arguments)
        define_config(options, arguments, command.system)
    return options, arguments


def run_script(main: Callable[[Sequence[str]], None], help_text: str | None) -> None:
    """Runs a script whose flags are in `flags.FLAGS` with the process's arguments, and exits.

    `main` gets a list: the script's name, then the arguments that are no flags. `help_text` is what
    --help prints above the flags.
    """
    with ending():
        _run(main, flags.FLAGS, sys.argv[1:], lambda: help_text or "")


def _run(
    main: Callable[[Sequence[str]], None],
    options: flags.FlagValues,
    arguments: Sequence[str],
    help_text: Callable[[], str],
) -> None:
    """Parses the arguments and calls `main` with a list: the program, then those that are no flags.

    With --help, prints `help_text()` and the flags, `options`, instead.
    """
    logging.set_verbosity(logging.WARNING)
    if any(word.startswith("-") and word.lstrip("-") in _HELP for word in arguments):
        print(f"{help_text().strip()}\n\n{_flag_list(options)}")
        return
    with in_one_line(options):
        argv = options([sys.argv[0], *arguments])
    app.run(lambda _: main(argv), argv=sys.argv[:1])


def _flag_list(options: flags.FlagValues) -> str:
    """Returns text for --help: flags, meanings and defaults, at most 100 columns wide."""
    lines = ["Flags:"]
    for flag in own_flags(options):
        text = flag.help or ""
        if flag.default and flag.name != "config":  # whose default is a path
            default = str(flag.default_as_str).strip("'")
            text += f" Default: {default}."
        head = f"  --{flag.name}".ljust(17) + " "
        lines += wrapped(head + text, len(head))
    return "\n".join(lines)
