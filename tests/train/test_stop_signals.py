"""Signals that stop a run: the first one asks for a last checkpoint, the second one or a long wait ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rayrec.train import Interrupted
from rayrec.train.driver.signals import StopSignals, handling, run_in_background


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends(number: int) -> None:
    asked = threading.Event()
    signals = StopSignals(asked.set, grace_s=60)
    release = threading.Event()
    with handling(signals):
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        threading.Timer(0.9, os.kill, (os.getpid(), number)).start()
        with pytest.raises(Interrupted, match="second interrupt") as caught:
            run_in_background(lambda: release.wait(120), signals)
    release.set()
    assert asked.is_set()
    assert caught.value.signal == number


def test_a_closed_terminal_asks_once_however_often_it_is_heard() -> None:
    """The kernel and the shell each send a SIGHUP."""
    asked = threading.Event()
    signals = StopSignals(asked.set, grace_s=60)
    for _ in range(3):
        signals(signal.SIGHUP)
    assert asked.wait(120) and signals.reason_to_exit is None and signals.interrupted("x").signal == signal.SIGHUP
    signals(signal.SIGINT)
    assert signals.reason_to_exit is not None


@pytest.mark.parametrize("ignored", [True, False])
def test_a_hangup_is_heard_unless_it_is_ignored_as_under_nohup(ignored: bool) -> None:
    action = signal.SIG_IGN if ignored else signal.SIG_DFL
    code = "import signal; from rayrec._runtime.stop_signals import STOP_SIGNALS; print(signal.SIGHUP in STOP_SIGNALS)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, action),
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.stdout.strip() == str(not ignored), done.stderr


def test_a_stop_that_takes_longer_than_its_grace_is_an_end() -> None:
    release = threading.Event()
    signals = StopSignals(lambda: None, grace_s=0.2)
    signals(signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"no final checkpoint was saved within trainer\.grace_s=0\.2 s"):
        run_in_background(lambda: release.wait(120), signals)
    release.set()


def test_an_abandoned_run_is_ended_again_and_again_until_it_has_ended() -> None:
    asked, ended = threading.Semaphore(0), threading.Event()

    def run() -> None:
        for _ in range(3):  # it may start to wait for something else
            assert asked.acquire(timeout=120)
        ended.set()

    def abandon() -> None:
        asked.release()
        raise OSError("an error of it is ignored")

    signals = StopSignals(lambda: None, grace_s=0.0)
    signals(signal.SIGTERM)
    with pytest.raises(Interrupted):
        run_in_background(run, signals, abandon)
    assert ended.is_set()


def test_a_stop_is_asked_for_once() -> None:
    asked = threading.Semaphore(0)
    signals = StopSignals(asked.release, grace_s=1000)
    assert signals.reason_to_exit is None and signals.interrupted("x").signal == signal.SIGINT
    signals(signal.SIGTERM)
    assert asked.acquire(timeout=120) and signals.reason_to_exit is None and signals.received == signal.SIGTERM
    signals(signal.SIGINT)
    assert signals.reason_to_exit == "Exited on the second interrupt; no final checkpoint was saved."
    assert signals.interrupted("x").signal == signal.SIGTERM
    assert not asked.acquire(blocking=False)
    assert Interrupted("x").signal == 2


def test_handlers_are_put_back_and_what_was_raised_is_raised_here() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    heard = StopSignals(lambda: None, grace_s=1000)
    with pytest.raises(KeyError), handling(heard):
        assert signal.getsignal(signal.SIGINT) is heard and signal.getsignal(signal.SIGTERM) is heard
        raise KeyError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    done: list[int] = []
    run_in_background(lambda: done.append(1), heard)
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        run_in_background(lambda: 1 // 0, heard)
    threads: list[threading.Thread] = []
    run_in_background(lambda: threads.append(threading.current_thread()), heard)
    StopSignals(lambda: threads.append(threading.current_thread()), grace_s=1000)(signal.SIGINT)
    while len(threads) < 2:
        time.sleep(0.001)
    assert all(thread.daemon for thread in threads), "none of them keeps a process whose run has ended"
    beside = threading.Thread(target=lambda: handling(heard).__enter__())
    beside.start()
    beside.join()
    assert signal.getsignal(signal.SIGINT) == before[0]
