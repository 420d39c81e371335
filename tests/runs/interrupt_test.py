"""Tests of signals to a command, and of Ctrl-C in Python."""

import os
import signal
import threading
import time

import jax
import pytest

import fedjax_pfl
from fedjax_pfl.runs import interrupt, run_directory, runner
from tests.runs.common import BASE, assert_resumes, assert_same_run, undisturbed

pytestmark = pytest.mark.slow("whole runs; runner_test has the quick ones")


def wait_for(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("timeout")


@pytest.fixture
def codes(monkeypatch):
    """Exit codes of the process, which does not end."""
    codes = []
    monkeypatch.setattr(interrupt.os, "_exit", codes.append)
    return codes


def send(number):
    os.kill(os.getpid(), number)


def test_a_first_signal_waits_and_a_second_ends(codes, capfd):
    handler = signal.getsignal(signal.SIGTERM)
    with interrupt.on_signals() as stop:
        with stop.protected():
            send(signal.SIGTERM)
            wait_for(lambda: stop.exit_status)
            assert (stop.exit_status, codes) == (143, [])
            send(signal.SIGINT)
            wait_for(lambda: codes)
        assert codes == [130]
    err = capfd.readouterr().err
    assert "once more ends at once" in err
    assert "run the same command again to resume" in err
    assert signal.getsignal(signal.SIGTERM) is handler


def test_several_processes_ignore_a_repeated_signal(codes, monkeypatch):
    """Receives Ctrl-C from the terminal and from the parent process."""
    monkeypatch.setattr(interrupt.multiprocess, "count", lambda: 2)
    with interrupt.on_signals() as stop, stop.protected():
        send(signal.SIGINT)
        wait_for(lambda: stop.exit_status)
        send(signal.SIGINT)
        time.sleep(0.2)
        assert codes == []
        stop._requested_at -= interrupt.ECHO
        send(signal.SIGINT)
        wait_for(lambda: codes)
    assert codes == [130]


def test_a_signal_ends_an_unprotected_command(codes):
    with interrupt.on_signals():
        send(signal.SIGINT)
        wait_for(lambda: codes)
    assert codes == [130]


def test_ignored_and_other_signals_keep_their_handlers(codes):
    threads = threading.active_count()
    actions = {signal.SIGUSR1: lambda *_: None, signal.SIGINT: signal.SIG_IGN}
    handlers = {number: signal.signal(number, action) for number, action in actions.items()}
    try:
        with interrupt.on_signals() as stop:
            send(signal.SIGUSR1)
            send(signal.SIGINT)
            assert threading.active_count() == threads + 1
            time.sleep(0.1)
            with stop.protected():
                assert (stop.exit_status, codes) == (0, [])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert threading.active_count() == threads


def test_a_closed_stderr_does_not_delay_the_end(codes, monkeypatch):
    class Broken:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    monkeypatch.setattr(interrupt.sys, "stderr", Broken())
    with interrupt.on_signals() as stop, stop.protected():
        send(signal.SIGTERM)
        wait_for(lambda: stop.exit_status)
        send(signal.SIGTERM)
        wait_for(lambda: codes)
    assert codes == [143]


@pytest.mark.parametrize("call", [1, 2])
def test_a_stopped_run_has_saved_its_rounds(call, tmp_path):
    """Stops after a call between evaluations; a stop in the last call has no effect."""
    config = {**BASE, "checkpoint_every": None, "eval_every": 3}
    calls = []

    class StopAtCall(interrupt.Stop):
        def protected(self):
            calls.append(1)
            self.exit_status = 143 if len(calls) == call else 0
            return super().protected()

    if call == 1:
        with pytest.raises(interrupt.Stopped, match="stopped at round 3") as stopped:
            runner.run(config, tmp_path / "run", StopAtCall())
        assert (stopped.value.round, stopped.value.code) == (3, 143)
        assert_resumes(config, tmp_path / "run", 3)
    else:
        result = runner.run(config, tmp_path / "run", StopAtCall())
        assert_same_run(result, undisturbed(config), tmp_path / "run")
        jax.block_until_ready(result.state)


def test_ctrl_c_in_python_saves_and_resumes(tmp_path, capfd):
    append = run_directory.append_metrics

    def press_and_append(directory, line):
        if line["round"] == 2:
            signal.raise_signal(signal.SIGINT)
        append(directory, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_directory, "append_metrics", press_and_append)
        line = "stopped at round 2; run the same call again to resume"
        with pytest.raises(KeyboardInterrupt, match=line):
            fedjax_pfl.run(BASE, tmp_path)
    assert "stopping when these rounds are saved" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_resumes(BASE, tmp_path, 2)


def test_ctrl_c_in_the_last_call_of_a_run_stops_its_reference_runs(tmp_path):
    append, config = run_directory.append_metrics, {**BASE, "reference": True}

    def press_and_append(directory, line):
        if directory == tmp_path and line["round"] == BASE["rounds"]:
            signal.raise_signal(signal.SIGINT)
        append(directory, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_directory, "append_metrics", press_and_append)
        with pytest.raises(interrupt.Stopped):
            fedjax_pfl.run(config, tmp_path)
    assert (tmp_path / "report.html").exists()
    assert not list(tmp_path.glob("reference/*/report.html"))
    fedjax_pfl.run(config, tmp_path)
    assert list(tmp_path.glob("reference/*/report.html"))


def test_ctrl_c_in_python_ends_if_nothing_is_being_saved():
    with interrupt.on_keyboard(saves=True) as stop:
        with pytest.raises(KeyboardInterrupt, match="run the same call again to resume"):
            signal.raise_signal(signal.SIGINT)
        with stop.protected():
            signal.raise_signal(signal.SIGINT)
            assert stop.exit_status == 130
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    with interrupt.on_keyboard(saves=False), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
