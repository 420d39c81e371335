"""Errors of the command line in one line, and the end of a command."""

import os
import sys

import pytest
from absl import flags
from absl.flags import FlagValues

from fedjax_pfl.cli import errors, train
from fedjax_pfl.core.errors import UsageError
from fedjax_pfl.runs import interrupt
from tests.commands import message


def test_every_error_of_reading_flags_is_one_line():
    options = FlagValues()
    train.define_flags(options)

    def raised(error):
        with errors.in_one_line(options):
            raise error

    assert message(raised, UsageError("as it is")) == "as it is"
    assert message(raised, ValueError("first\nlast")) == "last"
    assert message(raised, KeyError()) == "KeyError"
    assert message(raised, flags.UnrecognizedFlagError("rounds")) == (
        "there is no flag --rounds; there are --coordinator, --data_dir, --process, --processes, "
        "--wait, --workdir"
    )
    text = "Traceback ...\nfedjax_pfl.core.errors.UsageError: what is wrong"
    assert message(raised, RuntimeError(text)) == "what is wrong"
    with pytest.raises(KeyboardInterrupt):
        raised(KeyboardInterrupt())


def test_fail_is_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        errors.fail(UsageError("what\n  is wrong"))
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", "error: what is wrong\n")


@pytest.mark.parametrize("written", ["x", "x" * 100_000], ids=["kept back", "at once"])
def test_a_reader_that_has_read_enough_is_no_error(written, monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with errors.ending(), errors.in_one_line():
            print(written)
        print("more")  # as Python does when it ends
        out.flush()
    assert capfd.readouterr().err == ""


def test_a_command_may_have_no_output_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with errors.ending():
        print("to nobody")


def test_how_a_command_ends(capsys):
    def code(error):
        with pytest.raises(SystemExit) as caught, errors.ending():
            raise error
        return caught.value.code

    assert code(UsageError("wrong")) == 2
    assert code(interrupt.Stopped(3, 15)) == interrupt.Stopped(3, 15).code
    assert code(SystemExit(7)) == 7
    assert capsys.readouterr().err.splitlines()[0] == "error: wrong"


@pytest.mark.parametrize(
    ("line", "wanted"),
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
def test_a_value_of_another_kind_is_named_in_words(line, wanted):
    with pytest.raises(UsageError) as caught, errors.in_one_line():
        raise flags.IllegalFlagValueError(line)
    assert str(caught.value) == wanted
