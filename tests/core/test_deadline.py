"""Deadlines: seconds or timedelta, and what is left of them."""

import math
import time
from datetime import timedelta

import pytest

from meshdist.system.deadline import DEFAULT_TIMEOUT_S, Deadline, Reminder, seconds

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [(None, DEFAULT_TIMEOUT_S), (0, 0.0), (2, 2.0), (0.25, 0.25), (timedelta(minutes=2), 120.0), (math.inf, math.inf)],
    ids=repr,
)
def test_seconds(timeout, expected):
    assert seconds(timeout) == expected


def test_the_default_is_half_an_hour_or_what_is_said():
    assert DEFAULT_TIMEOUT_S == 1800
    assert seconds(None, 7.0) == 7.0
    assert seconds(1, 7.0) == 1.0


@pytest.mark.parametrize("timeout", ["3", True, [1], b""], ids=repr)
def test_what_is_no_time(timeout):
    with pytest.raises(
        TypeError, match=f"timeout must be a timedelta or a number of seconds, got {type(timeout).__name__}"
    ):
        seconds(timeout)


@pytest.mark.parametrize("timeout", [-1, -0.001, timedelta(seconds=-1), math.nan], ids=repr)
def test_a_negative_time(timeout):
    with pytest.raises(ValueError, match="timeout must not be negative"):
        seconds(timeout)


def test_a_deadline_passes():
    before = time.monotonic()
    deadline = Deadline(100.0)
    assert not deadline.expired()
    left = deadline.remaining_s()
    assert 100.0 - (time.monotonic() - before) - 1e-3 <= left <= 100.0
    assert deadline.slice_s(1.0) == 1.0
    assert deadline.slice_s(1000.0) <= left
    over = Deadline(0)
    assert (over.expired(), over.remaining_s(), over.slice_s(5.0)) == (True, 0.0, 0.0)


def test_a_deadline_may_never_pass():
    deadline = Deadline(math.inf)
    assert not deadline.expired()
    assert deadline.slice_s(0.5) == 0.5


def test_a_long_wait_is_reported_ever_more_rarely(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("meshdist.system.deadline.time.monotonic", lambda: now_s[0])
    reminder = Reminder()
    reports = []
    for second in range(1, 60):
        now_s[0] = 100.0 + second
        waited_s = reminder.due_s()
        if waited_s is not None:
            reports.append(waited_s)
    assert reports == [5.0, 10.0, 20.0, 40.0]
