"""Stacks: of a frame, and of a process as its signal handler records it."""

import os
import signal
import sys

import pytest

from meshdist.debug.stack_without_gil import StackFile, stack_of_process
from meshdist.debug.stacks import stack_of


def test_stack_of_a_frame_is_in_no_call():
    assert not stack_of(sys._getframe()).in_call


@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd and /proc")
def test_signal_records_the_stack():
    before = signal.signal(signal.SIGURG, lambda *_: None)
    file = StackFile(signal.SIGURG)
    try:
        os.kill(os.getpid(), signal.SIGURG)
        assert stack_of_process(os.getpid())
    finally:
        file.close()
        signal.signal(signal.SIGURG, before)
