"""Locks in which Ctrl-C waits: with the compiled core, and without."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from until import until

from meshdist import core
from meshdist.system.deferring_lock import PlainDeferringLock, deferring_lock

pytestmark = pytest.mark.timeout(60)
KINDS = ["plain"] if core.module is None else ["core", "plain"]


@pytest.fixture(params=KINDS)
def make(request):
    """Make a lock; Ctrl-C raises meanwhile, whatever started the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield deferring_lock if request.param == "core" else PlainDeferringLock
    signal.signal(signal.SIGINT, before)


def press():
    signal.raise_signal(signal.SIGINT)


def test_a_signal_waits_for_the_end_of_all_sections(make):
    one, other, done = make(), make(), []

    def sections():
        with one:
            with one, other:
                press()
                done.append("inner")
            done.append("outer")
        done.append("behind")

    with pytest.raises(KeyboardInterrupt):
        sections()
    assert done == ["inner", "outer"]
    press_outside()


def press_outside():
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_lock_that_is_not_free_defers_nothing(make):
    lock, is_taken, is_over = make(), threading.Event(), threading.Event()

    def take():
        with lock:
            is_taken.set()
            is_over.wait(30)

    other = threading.Thread(target=take)
    other.start()
    assert is_taken.wait(30)
    try:
        assert lock.acquire(False) is False
        press_outside()
    finally:
        is_over.set()
        other.join()
    with lock:
        assert lock.acquire(False) is True
        lock.release()


def test_only_the_thread_that_has_a_lock_releases_it(make):
    lock = make()
    with pytest.raises(RuntimeError):
        lock.release()
    with lock:
        failures = []

        def release():
            try:
                lock.release()
            except RuntimeError as error:
                failures.append(error)

        other = threading.Thread(target=release)
        other.start()
        other.join()
        assert len(failures) == 1


def test_a_handler_that_is_set_later_is_called_behind_a_section(make):
    lock, places, place = make(), [], ""
    with lock:
        pass
    signal.signal(signal.SIGINT, lambda *_: places.append(place))
    for _ in range(20):  # now and then, the lock looks whether there is another one
        with lock:
            pass
    with lock:
        place = "in"
        press()
        place = "behind"
    press()
    assert places == ["behind", "behind"]


@pytest.mark.skipif(core.module is None, reason="needs the compiled core")
@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_with_the_core_the_handler_that_python_knows_is_that_of_the_user(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with deferring_lock():
            assert signal.getsignal(signal.SIGINT) is handler
            if handler is signal.SIG_IGN:
                press()
    finally:
        signal.signal(signal.SIGINT, before)


def test_no_section_is_interrupted_and_no_signal_is_lost(make):
    lock, begun, ended, num_caught, is_over = make(), 0, 0, 0, False

    def send():
        nonlocal is_over
        until(lambda: begun, "sections begin")
        for number in range(300):
            if number % 2:  # the kernel has the thread handle it that it comes to
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            else:
                os.kill(os.getpid(), signal.SIGINT)
            until(lambda number=number: num_caught > number, f"signal {number} has come", 30)
        is_over = True

    sender = threading.Thread(target=send)
    sender.start()
    while not is_over:
        try:
            while not is_over:
                with lock:
                    begun += 1
                    ended += 1
        except KeyboardInterrupt:
            num_caught += 1
    sender.join()
    assert num_caught == 300
    assert begun == ended > 300


FORKED_IN_A_SECTION = """
import os, signal, threading
from meshdist.system.deferring_lock import deferring_lock

def fork():
    global status
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        return
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        os._exit(7)
    os._exit(0)

signal.signal(signal.SIGINT, signal.default_int_handler)
other = threading.Thread(target=fork)
with deferring_lock():
    other.start()
    other.join()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork") or core.module is None, reason="needs os.fork, and the compiled core")
def test_a_child_that_is_forked_in_a_section_can_be_interrupted():
    program = [sys.executable, "-W", "ignore", "-c", FORKED_IN_A_SECTION]
    done = subprocess.run(program, capture_output=True, text=True, timeout=50)
    assert done.stdout == "7\n", done
