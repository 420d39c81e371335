"""Errors of the command line in one line, and the end of a command."""

import os
import sys

import pytest
from absl import flags
from absl.flags import FlagValues

from fedjax_pfl.cli import errors, main, train
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import interrupt
from tests.commands import message


def raised(error):
    """Raises an error while flags are parsed."""
    options = FlagValues()
    train.define_flags(options)
    with errors.in_one_line(options):
        raise error


def test_every_error_of_parsing_flags_is_one_line():
    assert message(raised, UsageError("unchanged")) == "unchanged"
    assert message(raised, ValueError("first\nlast")) == "last"
    assert message(raised, KeyError()) == "KeyError"
    assert message(raised, flags.UnrecognizedFlagError("rounds")) == (
        "there is no flag --rounds; there are --coordinator, --data_dir, --process, --processes, "
        "--wait, --workdir"
    )
    text = "Traceback ...\nfedjax_pfl.core.errors.UsageError: wrong value"
    assert message(raised, RuntimeError(text)) == "wrong value"
    with pytest.raises(KeyboardInterrupt):
        raised(KeyboardInterrupt())


@pytest.mark.parametrize(
    "write",
    [lambda: print("x"), lambda: print("x" * 100_000), lambda: main.main(["--help"])],
    ids=["buffered", "written immediately", "help"],
)
def test_a_closed_pipe_is_no_error(write, monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with errors.ending(), errors.in_one_line():
            write()
        print("more")  # Python also writes when it exits
        out.flush()
    assert capfd.readouterr().err == ""


def test_a_command_without_stdout(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with errors.ending():
        print("discarded")


def test_exit_status_and_message_of_an_error(capsys):
    def code(error):
        with pytest.raises(SystemExit) as caught, errors.ending():
            raise error
        return caught.value.code

    assert code(UsageError("wrong\n  value")) == 2
    assert code(interrupt.Stopped(3, 15)) == interrupt.Stopped(3, 15).code
    assert code(SystemExit(7)) == 7
    assert code(PermissionError(13, "Permission denied", "runs/mine")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[:1] == ["error: wrong value"]
    assert err.splitlines()[-1:] == [
        "error: runs/mine cannot be read or written (Permission denied)"
    ]
    with pytest.raises(OSError, match="no file"), errors.ending():
        raise OSError("no file is named")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "flag --config.fedprox.mu=a: could not convert string to float: 'a'",
            "fedprox.mu is 'a'; it must be a number",
        ),
        (
            "flag --config.keep_head=maybe: ('Non-boolean argument to boolean flag', 'maybe')",
            "keep_head is 'maybe'; it must be true or false",
        ),
        ("flag --wait=0: value should be positive", "flag --wait=0: value should be positive"),
    ],
)
def test_flag_values_of_another_type_are_explained(line, expected):
    assert message(raised, flags.IllegalFlagValueError(line)) == expected
