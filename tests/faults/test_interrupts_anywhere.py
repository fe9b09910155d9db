"""Ctrl-C anywhere in a wait leaves nothing behind that waits for ever, and spoils no other group.

The interrupted rank may wait again, or leave; either the call ends, or the group is known to be broken.
"""

from __future__ import annotations

import dis
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType, FrameType

import numpy as np
import pytest
from worlds import needs_linux

import meshdist as dist

pytestmark = [needs_linux, pytest.mark.timeout(120)]
FILES = os.path.dirname(dist.__file__), threading.__file__
AGAIN_S = 4.0
LONG = 1 << 17
# As many waits in a row without a place that was not interrupted before.
IN_VAIN = 5


def may_be_interrupted(frame, last):
    """Return whether the interpreter looks for signals after the instruction `last` of a frame; None is its begin."""
    return last is None or INSTRUCTIONS(frame.f_code)[last].startswith(("CALL", "RESUME", "JUMP_BACKWARD"))


@lru_cache
def INSTRUCTIONS(code):
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


class InterruptAnywhere:
    """Sends this rank SIGINT at the first place in FILES at which it got none before."""

    def __init__(self) -> None:
        self.tried: set[tuple[CodeType, int]] = set()
        self.place = ""  # of the last one
        self.is_raised = False
        self._last: dict[FrameType, int] = {}

    def during(self, function: Callable[[], object]) -> bool:
        """Call a function; return whether it was interrupted."""
        self.is_raised = False
        sys.settrace(self._trace)
        try:
            function()
        except KeyboardInterrupt:
            if not self.is_raised:
                raise
        finally:
            sys.settrace(None)
            self._last.clear()
        return self.is_raised

    def _trace(self, frame, event, arg):
        if self.is_raised or not frame.f_code.co_filename.startswith(FILES):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event != "opcode":
            return self._trace
        last, self._last[frame] = self._last.get(frame), frame.f_lasti
        place = frame.f_code, frame.f_lasti
        if place not in self.tried and may_be_interrupted(frame, last):
            self.tried.add(place)
            self.is_raised = True
            self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            signal.raise_signal(signal.SIGINT)
        return self._trace


def all_reduce(group):
    return [group.all_reduce(np.ones(3), async_op=True)]


def many_all_reduces(group):
    return [group.all_reduce(np.ones(size), async_op=True) for size in range(1, 12)]


def irecv(group, size=3):
    if group.rank() == 1:
        return [group.isend(np.ones(size), 0)]
    return [group.irecv(np.ones(size), 1)]


def irecvs(group):
    return irecv(group) + irecv(group)


def long_irecv(group):
    return irecv(group, LONG)


def long_isend(group):
    if group.rank() == 1:
        return [group.irecv(np.ones(LONG), 0)]
    return [group.isend(np.ones(LONG), 1)]


BEGINS = [all_reduce, many_all_reduces, irecv, irecvs, long_irecv, long_isend]


def wait_out(works, place):
    """Wait for calls that another rank, or this one before, may have broken; not for ever."""
    for work in works:
        try:
            work.wait(timeout=AGAIN_S)
        except dist.DistTimeoutError as error:
            raise AssertionError(f"after an interrupt at {place}, wait() does not return") from error
        except (dist.DistError, KeyboardInterrupt):  # the error of a call that was interrupted
            continue


def interrupt_anywhere(begin):
    """Return at how many places a wait was interrupted."""
    interrupt, in_vain = InterruptAnywhere(), np.zeros(1)
    while in_vain[0] < IN_VAIN:
        group = dist.new_group(timeout=AGAIN_S)
        group.barrier()
        works = begin(group)
        dist.barrier()  # the other rank makes no calls that may fail at once
        if dist.get_rank() == 0:
            in_vain[0] = 0 if interrupt.during(works[-1].wait) else in_vain[0] + 1
        wait_out(works, interrupt.place)
        dist.broadcast(in_vain, 0)
        dist.destroy_process_group(group)
    return len(interrupt.tried)


@pytest.mark.parametrize("begin", BEGINS, ids=lambda begin: begin.__name__)
def test_a_wait_that_is_interrupted_anywhere(new_workers, begin):
    workers = new_workers(2, "gloo", timeout_s=90.0)
    workers.start(interrupt_anywhere, begin)
    num_places, _ = workers.gather()
    assert num_places > 10 or begin not in (all_reduce, many_all_reduces)  # messages may have come at once


def receive(group, size=3):
    x = np.full(size, 7.0 * group.rank())
    if group.rank() == 1:
        group.send(x, 0)
    else:
        group.recv(x, 1)


def receive_much(group):
    receive(group, LONG)


def reduce(group, size=3):
    group.all_reduce(np.ones(size))


def reduce_much(group):
    reduce(group, LONG)


def interrupt_calls_anywhere(call):
    """Interrupt a call of one rank anywhere; other groups have to work nevertheless. Return at how many places."""
    interrupt, in_vain = InterruptAnywhere(), np.zeros(1)
    while in_vain[0] < IN_VAIN:
        group = dist.new_group(timeout=AGAIN_S)
        call(group)  # the fast path is there from the second call on
        group.barrier()
        if dist.get_rank() == 0:
            in_vain[0] = 0 if interrupt.during(partial(call, group)) else in_vain[0] + 1
        else:
            with suppress(dist.DistError):  # the group is no more
                call(group)
        dist.destroy_process_group(group)
        dist.broadcast(in_vain, 0)
        much = np.full(LONG, 1.0 + dist.get_rank())
        dist.all_reduce(much)
        assert (much == 3.0).all(), f"after an interrupt at {interrupt.place}, another group gets {much}"
    return len(interrupt.tried)


@pytest.mark.parametrize("call", [receive, receive_much, reduce, reduce_much], ids=lambda call: call.__name__)
def test_a_call_between_hosts_that_is_interrupted_anywhere(new_workers, call):
    workers = new_workers(2, "gloo-tcp", timeout_s=90.0)
    workers.start(interrupt_calls_anywhere, call)
    num_places, _ = workers.gather()
    assert num_places > 100


def interrupt_first_calls_anywhere():
    """Interrupt the first async call of a world of this rank alone, anywhere; the world has to end nevertheless."""
    interrupt, in_vain = InterruptAnywhere(), 0
    dist.destroy_process_group()
    while in_vain < IN_VAIN:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=AGAIN_S)
        in_vain = 0 if interrupt.during(lambda: dist.all_reduce(np.ones(3), async_op=True).wait()) else in_vain + 1
        dist.destroy_process_group()
    return len(interrupt.tried)


def test_a_first_call_that_is_interrupted_anywhere(new_workers):
    workers = new_workers(1, "gloo", timeout_s=90.0)
    workers.start(interrupt_first_calls_anywhere)
    assert workers.gather()[0] > 100
