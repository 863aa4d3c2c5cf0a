import os
import signal
import threading
import time

import pytest

import hyperslab as hs
from hyperslab.train.process import STOP_SIGNALS, StopSignals


@pytest.fixture
def alone():
    return hs.init(device="cpu")


@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_a_signal_is_noted_once_and_told_from_then_on(alone, name):
    with StopSignals(alone) as signals:
        assert signals.poll() is None
        os.kill(os.getpid(), getattr(signal, name))
        assert [signals.poll(), signals.poll(), signals.heard] == [name] * 3


def test_the_first_of_several_signals_is_told(alone):
    with StopSignals(alone) as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.poll() == "SIGUSR1"


def test_a_second_interrupt_is_not_waited_with(alone):
    with StopSignals(alone):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back_and_what_was_ignored_stays_ignored(alone):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handlers = [signal.getsignal(getattr(signal, name)) for name in STOP_SIGNALS]
    try:
        with StopSignals(alone) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.poll() is None
        assert [signal.getsignal(getattr(signal, name)) for name in STOP_SIGNALS] == handlers
    finally:
        signal.signal(signal.SIGHUP, before)


def test_until_exit_late_signals_are_ignored_after_all_went_well(alone):
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in STOP_SIGNALS}
    try:
        with StopSignals(alone, until_exit=True):
            os.kill(os.getpid(), signal.SIGTERM)
        for name in STOP_SIGNALS:
            os.kill(os.getpid(), getattr(signal, name))
    finally:
        for name, handler in handlers.items():
            signal.signal(getattr(signal, name), handler)
    with pytest.raises(RuntimeError), StopSignals(alone, until_exit=True):
        raise RuntimeError
    assert {name: signal.getsignal(getattr(signal, name)) for name in STOP_SIGNALS} == handlers


def test_outside_the_main_thread_nothing_is_installed(alone):
    def body():
        with StopSignals(alone) as signals:
            polls.append(signals.poll())

    polls, handler = [], signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert polls == [None]
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.ranks(2)
def test_all_ranks_hear_of_a_signal_to_one_after_the_same_step():
    mesh = hs.init(sample=2, device="cpu")
    told = []
    with StopSignals(mesh) as signals:
        for step in range(6):
            if step == 2 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            told.append(signals.poll())
        assert told == [None] * 3 + ["SIGUSR1"] * 3
        told = signals._channel.tell_all(told)
    assert told[0] == told[1]


@pytest.mark.ranks(2)
def test_a_poll_does_not_wait_for_the_other_ranks(tmp_path):
    mesh = hs.init(sample=2, device="cpu", timeout_seconds=60)
    polled = tmp_path / "polled"
    with StopSignals(mesh) as signals:
        while mesh.rank == 0 and not polled.exists():
            time.sleep(0.005)
        assert signals.poll() is None
        polled.touch()
