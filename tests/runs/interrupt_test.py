"""What signals do to a command, and that the library leaves them alone otherwise."""

import os
import signal
import threading
import time

import jax
import pytest

from fedjax_pfl.runs import interrupt, runner
from tests.runs.common import BASE, assert_same_run, undisturbed

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")


def wait_for(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("nothing happened")


def test_a_first_signal_waits_and_a_second_does_not(monkeypatch, capfd):
    codes = []
    monkeypatch.setattr(interrupt.os, "_exit", codes.append)
    before = signal.getsignal(signal.SIGTERM)
    with interrupt.on_signals() as stop:
        with stop.protected():
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: stop.exit_status)
            assert (stop.exit_status, codes) == (143, [])
            os.kill(os.getpid(), signal.SIGINT)
            wait_for(lambda: codes)
        assert codes == [130]
    said = capfd.readouterr().err
    assert "once more ends at once" in said
    assert "run the same command again to resume" in said
    assert signal.getsignal(signal.SIGTERM) is before


def test_among_several_processes_the_same_signal_may_come_twice(monkeypatch):
    """From the terminal, and passed on by the process that started this one."""
    codes = []
    monkeypatch.setattr(interrupt.os, "_exit", codes.append)
    monkeypatch.setattr(interrupt.multiprocess, "count", lambda: 2)
    with interrupt.on_signals() as stop, stop.protected():
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: stop.exit_status)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        assert codes == []
        stop._when -= interrupt.ECHO
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: codes)
    assert codes == [130]


def test_where_nothing_is_being_saved_the_first_one_ends(monkeypatch):
    codes = []
    monkeypatch.setattr(interrupt.os, "_exit", codes.append)
    with interrupt.on_signals():
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: codes)
    assert codes == [130]


def test_other_signals_and_ignored_ones_are_left_alone(monkeypatch):
    codes, before = [], threading.active_count()
    monkeypatch.setattr(interrupt.os, "_exit", codes.append)
    others = {signal.SIGUSR1: lambda *_: None, signal.SIGINT: signal.SIG_IGN}
    handlers = {number: signal.signal(number, handler) for number, handler in others.items()}
    try:
        with interrupt.on_signals() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGINT)
            assert threading.active_count() == before + 1
            time.sleep(0.1)
            with stop.protected():
                assert (stop.exit_status, codes) == (0, [])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert threading.active_count() == before


def test_nobody_has_to_read_what_is_said(monkeypatch):
    class Broken:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    codes = []
    monkeypatch.setattr(interrupt.os, "_exit", codes.append)
    monkeypatch.setattr(interrupt.sys, "stderr", Broken())
    with interrupt.on_signals() as stop, stop.protected():
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: stop.exit_status)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: codes)
    assert codes == [143]


@pytest.mark.parametrize("after", [1, 2])
def test_a_run_that_is_asked_to_stop_has_saved_what_it_did(after, tmp_path):
    """With a checkpoint at evaluations only, it stops after the call and saves there."""
    config = {**BASE, "checkpoint_every": None, "eval_every": 3}
    calls = []

    class Asked(interrupt.Stop):
        def protected(self):
            calls.append(1)
            self.exit_status = 143 if len(calls) == after else 0
            return super().protected()

    if after == 1:
        with pytest.raises(interrupt.Stopped, match="stopped at round 3") as stopped:
            runner.run(config, tmp_path / "run", Asked())
        assert (stopped.value.round, stopped.value.code) == (3, 143)
        result = runner.run(config, tmp_path / "run")
        assert result.resumed_at == 3
    else:  # asked for during the last call there is nothing left to stop
        result = runner.run(config, tmp_path / "run", Asked())
    assert_same_run(result, undisturbed(config), tmp_path / "run")
    jax.block_until_ready(result.state)
