"""What every command shares: flags, the errors a user sees, the run and its table."""

import contextlib
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from fedjax_pfl import presets
from fedjax_pfl.cli.processes import Given, together
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import interrupt, runner
from fedjax_pfl.settings import configuration, custom, listing, selection
from fedjax_pfl.simulation import multiprocess
from fedjax_pfl.simulation.devices import prepare_devices as prepare_devices

LIST = "fedjax-pfl list"
SET_HELP = f"KEY=VALUE, in every run; KEY may have dots, VALUE is JSON or a word. {LIST} settings."
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Run directory; the same command on it resumes. Default: runs/ and the preset."
)
DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder of prepared tfds datasets. Default: TFDS_DATA_DIR."
)


def launch(name: str) -> None:
    """Run the command `python -m experiments.NAME`."""

    def main(argv: Sequence[str]) -> None:
        if len(argv) > 1:
            raise UsageError(f"{argv[1]!r} is no flag; settings are given as --config.KEY=VALUE")
        with in_one_line():
            settings = config.value.copy_and_resolve_references()
        replace_length(settings, sys.argv[1:])
        changes = config_flags.get_override_values(flags.FLAGS["config"])
        words, whole = custom.added(settings.to_dict())
        complete = configuration.complete(whole, words)
        selection.check_given(selection.nested(changes), [complete], words)
        if DATA_DIR.value is not None:
            settings.data_dir = DATA_DIR.value
        workdir = _WORKDIR.value or default_workdir(name, sys.argv[1:])
        flag = flags.FLAGS
        given = Given(flag.processes, flag.process, flag.coordinator, flag.wait)
        with together(given), interrupt.on_signals() as stop:
            results = runner.run_all(settings, workdir, stop, tell=partial(print, flush=True))
            if multiprocess.lead():
                _show(Path(workdir), results)

    logging.set_verbosity(logging.WARNING)
    prepare_devices()
    with ending():
        sys.argv[1:] = resolve_config(sys.argv[1:], name)
        check_keys(sys.argv[1:])
        _define_processes()
        config = define_config(name)
        for flag in ("workdir", "processes", "process", "coordinator", "wait"):
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag])
        # What --help shows: the presets, as the config file describes them.
        method = name if name in configuration.ALGORITHMS else "fedavg"
        said = f"{description(name)}\n\n{listing.of_command(method)}"
        sys.modules["__main__"].__doc__ = f"\n{said}\n"
        app.run(main, flags_parser=_parse)


def _show(workdir: Path, results: Mapping[str, runner.Result]) -> None:
    for result in results.values():
        if result.resumed_at is not None:
            finished = result.resumed_at == result.metrics[-1]["round"]
            word = "was finished" if finished else "resumed"
            print(f"This run {word} at round {result.resumed_at}; it is in {result.directory}.")
    if "" in results:
        from fedjax_pfl.report.page import table  # with all that draws

        print(table(results[""].metrics))
        print(f"\nReport: {workdir / 'report.html'}")
    else:
        _side_by_side(workdir, list(results))


def _side_by_side(workdir: Path, names: Sequence[str]) -> None:
    """What `experiments.compare` shows of the runs of a sweep."""
    from fedjax_pfl.report import comparison, comparison_page

    rows = comparison.group([comparison.read(workdir / name) for name in names])
    page = comparison_page.write(rows, workdir / "compare")
    print(f"{comparison_page.text(rows)}\n\nPage: {page}")
    print(f"Reports: {workdir}/*/report.html")


def _define_processes() -> None:
    """Here, because other commands compute in one process."""
    flags.DEFINE_integer(
        "processes",
        1,
        "Processes that compute this run; on one machine this starts them all.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "process", None, "Which of them this is, where each machine starts its own.", lower_bound=0
    )
    flags.DEFINE_string(
        "coordinator", None, "HOST:PORT of process 0; or auto, where SLURM or a TPU pod knows."
    )
    flags.DEFINE_integer("wait", 300, "Seconds for all processes to come.", lower_bound=1)


def command(main: Callable[[Sequence[str]], None], config: str = "") -> None:
    """Run a command; its errors are one line too.

    config: the system whose file --config names by default; none: the command has no --config.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:
            raise UsageError(str(error)) from None

    logging.set_verbosity(logging.WARNING)
    with ending():
        if config:
            sys.argv[1:] = resolve_config(sys.argv[1:], config)
            check_keys(sys.argv[1:])
            define_config(config)
        app.run(main, flags_parser=_parse if config else parse)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """How every command ends: with one line where something is wrong, and no other trace of it."""
    try:
        try:
            yield
        except UsageError as error:
            fail(error)
        except interrupt.Stopped as stopped:
            print(stopped, file=sys.stderr)
            sys.exit(stopped.code)
        except SystemExit as end:  # absl ends with 1 where help was asked for and given
            asked = any(word.lstrip("-").startswith("help") for word in sys.argv[1:])
            sys.exit(0 if asked and end.code == 1 else end.code)
        finally:
            if sys.stdout is not None:  # as it is where it was closed from the start
                sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(error: Exception) -> None:
    """One line, exit status 2."""
    line = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def define_config(name: str) -> flags.FlagHolder[ConfigDict]:
    """The flag --config, by default a system's own file; --help shows it and where data are."""
    with in_one_line():
        holder = config_flags.DEFINE_config_file(
            "config",
            str(presets.SYSTEMS[name].__file__),
            "SYSTEM:PRESET or FILE.py:PRESET, then --config.KEY=VALUE. Every KEY with its default "
            f"and meaning:\n{LIST} settings\n{LIST} methods",
        )
    for flag in ("config", "data_dir"):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag])
    return holder


def description(name: str) -> str:
    """The docstring of a system's presets, which are not executed."""
    return presets.SYSTEMS[name].__doc__ or ""


def _given(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The flags of a command line and their values, given as --FLAG=VALUE or --FLAG VALUE."""
    left = list(arguments)
    while left:
        flag, equals, value = left.pop(0).partition("=")
        if not equals and left and not left[0].startswith("--"):
            value = left.pop(0)
        yield flag.lstrip("-"), value


def replace_length(settings: ConfigDict, arguments: Sequence[str]) -> None:
    """Local steps on the command line replace a preset's epochs, and epochs its steps."""
    given = {flag.removeprefix("config.") for flag, _ in _given(arguments)}
    for chosen, other in (("local_steps", "local_epochs"), ("local_epochs", "local_steps")):
        if chosen in given and other not in given:
            settings[other] = None


def default_workdir(name: str, arguments: Sequence[str]) -> str:
    """runs/NAME-PRESET and what the command line changes, so that each run has its own."""
    words = [name]
    for flag, value in _given(arguments):
        if flag == "config" and ":" in value:
            words.insert(1, value.rpartition(":")[2])
        elif flag.startswith(("config.", "noconfig.")):
            key = flag.replace("config.", "", 1)
            words.append(f"{key}={value}" if value else key)
    kept = "".join(c if c.isalnum() or c in "-_.=," else "_" for c in "-".join(words))
    return str(Path("runs") / kept[:150])


def _read(value: str, before: Any) -> Any:
    """JSON; a word without quotes where a word stood; and Python's True, None, .1 and 10., too."""
    try:
        return json.loads(value)
    except ValueError:
        if isinstance(before, str):
            return value
        python = {"True": True, "False": False, "None": None}
        return python[value] if value in python else float(value)


def change(config: ConfigDict, pairs: Sequence[str]) -> None:
    """Apply --set=KEY=VALUE, each value as JSON or a word; a key may have dots."""
    for pair in pairs:
        key, _, value = pair.partition("=")
        check_keys([f"--config.{key}"])  # which names the nearest
        *groups, last = key.split(".")
        level = config
        try:
            for group in groups:
                level = level[group]
            if last not in level:  # which a ConfigDict would add
                raise KeyError(last)
            level[last] = _read(value, level[last])
        except (KeyError, AttributeError, ValueError, TypeError):
            raise UsageError(f"--set={pair} is no KEY=VALUE of this configuration") from None


def _parse(argv: Sequence[str]) -> list[str]:
    with in_one_line():
        return flags.FLAGS(argv)


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Turn whatever reading flags and a config file raises into a UsageError."""
    try:
        yield
    except (UsageError, BrokenPipeError):
        raise
    except flags.UnrecognizedFlagError as error:
        ours = sorted(f"--{f.name}" for f in flags.FLAGS.get_key_flags_for_module(sys.argv[0]))
        raise UsageError(
            f"there is no flag --{error.flagname}; there are {', '.join([*ours, '--config.KEY'])}"
        ) from None
    except flags.IllegalFlagValueError as error:
        text = str(error)
        raise UsageError(_last(text) if "Traceback" in text else _illegal(text)) from None
    except Exception as error:  # a config file is code and can raise anything
        raise UsageError(_last(str(error)) or type(error).__name__) from None


def _last(text: str) -> str:
    """What a traceback says at its end; of our own errors without their type."""
    line = (text.strip().splitlines() or [""])[-1]
    return line.removeprefix(f"{UsageError.__module__}.{UsageError.__name__}: ")


_WANTED = {  # by a word of what absl says
    "invalid literal for int()": "a whole number",
    "could not convert string to float": "a number",
    "Non-boolean argument": "true or false",
}


def _illegal(line: str) -> str:
    """What absl says of a flag's value, in words of settings where the flag is one."""
    flag, _, value = line.partition(": ")[0].removeprefix("flag --").partition("=")
    for said, wanted in _WANTED.items():
        if said in line and flag.startswith("config."):
            return f"{flag.removeprefix('config.')} is {value!r}; it must be {wanted}"
    return line


def resolve_config(arguments: Sequence[str], default: str) -> list[str]:
    """Replaces SYSTEM of --config=SYSTEM:PRESET by the path of its file.

    Args:
      arguments: The command line without the command.
      default: The command's own system, which a hint names for a preset without one.
    """
    resolved = list(arguments)
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.lstrip("-") != "config" or not flag.startswith("-"):
            continue
        position = i if equals else i + 1
        value = value if equals else "".join(arguments[position : position + 1])
        name, colon, preset = value.partition(":")
        if name in presets.SYSTEMS:
            path = presets.SYSTEMS[name].__file__
            resolved[position] = f"{flag}=" * bool(equals) + f"{path}{colon}{preset}"
        elif not Path(name).is_file():
            raise UsageError(
                f"there is no configuration {name!r}; --config takes SYSTEM:PRESET or "
                f"FILE.py:PRESET; {_nearest_config(name, colon + preset, default)}"
            )
    return resolved


def _nearest_config(name: str, preset: str, default: str) -> str:
    """Returns a hint for a configuration that does not exist."""
    is_path = "/" in name or name.endswith(".py")
    files = {path.stem: str(path) for path in Path(name).parent.glob("[!_]*.py")} if is_path else {}
    known = {**files, **{system: system for system in presets.SYSTEMS}}
    if near := difflib.get_close_matches(Path(name).stem, known, 1, 0.5):
        return f"did you mean {known[near[0]]}{preset}?"
    if not name or preset or is_path:
        return f"systems are {', '.join(presets.SYSTEMS)}"
    return f"did you mean {default}:{name}?"


def check_keys(arguments: Sequence[str]) -> None:
    """Name the nearest setting where one of --config.KEY=VALUE does not exist."""
    known = configuration.default()
    for argument in arguments:
        path = argument.lstrip("-").partition("=")[0]
        if not path.startswith("config."):
            continue
        level, seen = known, ""
        for word in path.removeprefix("config.").split("."):
            names = list(level) if isinstance(level, ConfigDict) else []
            key = word.partition("[")[0]
            if key not in names:
                hint = configuration.nearest(key, names, f"{seen}{{}}") if names else ""
                raise UsageError(f"there is no setting {seen}{key}{hint}")
            level, seen = level[key], f"{seen}{key}."
