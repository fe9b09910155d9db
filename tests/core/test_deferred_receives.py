"""How often the progress thread looks after receives that may not be waited for: each look costs the rank time."""

from types import SimpleNamespace
from unittest import mock

import pytest

from meshdist.groups import unposted_messages
from meshdist.groups.unposted_messages import DeferredReceives, _IsQuiet
from meshdist.runtime.progress import NAP_S

MS = 1_000_000


@pytest.fixture
def clock():
    now = SimpleNamespace(ns=0)
    with mock.patch.object(unposted_messages, "clock", side_effect=lambda: now.ns):
        yield now


@pytest.fixture
def messages():
    return SimpleNamespace(num_messages=0, num_waits=0, posted=[])


@pytest.fixture
def receives(clock, messages):
    return DeferredReceives(mock.Mock(), messages.posted.append, lambda: messages, mock.Mock())


def test_a_message_that_is_being_taken_is_no_quiet(clock, messages, receives):
    quiet = _IsQuiet(receives)
    messages.num_messages += 1
    assert not quiet.ready()
    for _ in range(5):  # whenever it looks, the only receive is in the hands of the thread that waits for it
        clock.ns += 15 * MS
        messages.num_messages += 1
        assert not quiet.ready()
    clock.ns += 15 * MS
    assert not quiet.ready()
    clock.ns += 15 * MS
    assert quiet.ready()


def test_looks_are_rare_while_all_receives_are_waited_for_in_time(clock, messages, receives):
    clock.ns += 1000 * MS
    assert _IsQuiet(receives).poll_interval_s() > 10 * NAP_S  # also after it has been quiet
    late = SimpleNamespace(record=SimpleNamespace(created=clock.ns), queue=receives, _is_done=False)
    receives.works.append(late)
    clock.ns += MS
    quiet = _IsQuiet(receives)
    quiet.ready()
    assert messages.posted == [late]
    assert quiet.poll_interval_s() == NAP_S


def test_what_a_thread_takes_while_it_waits_is_not_posted_before_that_ends(clock, messages, receives):
    late = SimpleNamespace(record=SimpleNamespace(created=clock.ns), queue=receives, _is_done=False)
    receives.works.append(late)
    clock.ns += MS
    messages.num_waits = 1
    assert not _IsQuiet(receives).ready()
    assert messages.posted == []
    messages.num_waits = 0
    assert not _IsQuiet(receives).ready()
    assert messages.posted == [late]


def test_what_no_wait_takes_for_long_is_posted(clock, messages, receives):
    late = SimpleNamespace(record=SimpleNamespace(created=clock.ns), queue=receives, _is_done=False)
    receives.works.append(late)
    messages.num_waits = 1  # whenever it looks, by a wait that takes other messages
    clock.ns += 30 * MS
    assert not _IsQuiet(receives).ready()
    assert messages.posted == [late]
