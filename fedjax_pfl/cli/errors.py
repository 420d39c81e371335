"""Errors of the command line in one line, and the end of a command."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator

from absl import flags
from ml_collections.config_flags import config_path

from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import interrupt

_EXPECTED = {  # by a part of absl's message
    "invalid literal for int()": "a whole number",
    "could not convert string to float": "a number",
    "Non-boolean argument": "true or false",
}


def own_flags(options: flags.FlagValues) -> list[flags.Flag]:
    """Returns this library's flags, sorted by name, without absl's own and --config.KEY."""
    modules = (sys.argv[0], "fedjax_pfl.", "experiments.")
    by_name = {
        flag.name: flag
        for module, defined in options.flags_by_module_dict().items()
        if module.startswith(modules)
        for flag in defined
    }
    return [by_name[name] for name in sorted(by_name)]


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Context that ends with one line on stderr, not a traceback, after UsageError or a signal.

    The same holds for a file or folder that the system refuses to open.
    """
    try:
        try:
            yield
        except UsageError as error:
            fail(error)
        except interrupt.Stopped as stopped:
            print(stopped, file=sys.stderr)
            sys.exit(stopped.code)
        except BrokenPipeError:
            raise
        except OSError as error:
            if error.filename is None:
                raise
            fail(UsageError(f"{error.filename} cannot be read or written ({error.strerror})"))
        finally:
            if sys.stdout is not None:  # None if it was closed from the start
                sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(error: Exception) -> None:
    """Prints "error: " and the error's message in one line on stderr; exits with status 2."""
    line = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def in_one_line(options: flags.FlagValues | None = None) -> Iterator[None]:
    """Context that turns every error of reading flags or a configuration file into a UsageError.

    The message about an unknown flag lists the flags of `options`; None: it lists none.
    """
    try:
        yield
    except (UsageError, BrokenPipeError):
        raise
    except flags.UnrecognizedFlagError as error:
        names = [] if options is None else [f"--{flag.name}" for flag in own_flags(options)]
        names += ["--config.KEY"] * ("--config" in names)
        hint = f"; there are {', '.join(names)}" if names else ""
        raise UsageError(f"there is no flag --{error.flagname}{hint}") from None
    except flags.IllegalFlagValueError as error:
        text = str(error)
        raise UsageError(_last_line(text) if "Traceback" in text else _flag_error(text)) from None
    except Exception as error:  # a configuration file is code and can raise anything
        line, kind = _last_line(str(error)), type(error).__name__
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        missing = isinstance(error, LookupError | AttributeError)
        if missing and files[-1] != config_path.__file__ in files:  # it reads keys of a ConfigDict
            key = (re.findall(r"\w+", line) or [kind])[0]  # a suggestion may follow
            line = (
                f"the configuration file sets no {key}, and --config.KEY changes only what it sets"
            )
        elif line and isinstance(error, LookupError):  # the text is only a key or an index
            line = f"{kind}: {line}"
            if files[-1] == config_path.__file__:
                line += (
                    "; --config.phases[N].KEY changes only a KEY that this phase has in the "
                    "configuration"
                )
        raise UsageError(line or kind) from None


def _last_line(text: str) -> str:
    """Returns the last line of a traceback, without the type if it is a UsageError."""
    line = (text.strip().splitlines() or [""])[-1]
    return line.removeprefix(f"{UsageError.__module__}.{UsageError.__name__}: ")


def _flag_error(line: str) -> str:
    """Returns absl's message; if it is about --config.KEY, as "KEY is VALUE; it must be ..."."""
    flag, _, value = line.partition(": ")[0].removeprefix("flag --").partition("=")
    for part, expected in _EXPECTED.items():
        if part in line and flag.startswith("config."):
            return f"{flag.removeprefix('config.')} is {value!r}; it must be {expected}"
    return line
