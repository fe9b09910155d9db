"""Programs whose ranks wait for each other, and what the errors of the ranks say of that."""

from __future__ import annotations

import re
import threading
from typing import NamedTuple

import pytest

import meshdist as dist

# Longer than it takes to prove that ranks wait for each other.
LATE_S = 4.0
BACKENDS = ["threads", "gloo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gloo-tcp", "gloo-hosts"))]
_DEADLOCK = r"deadlock: the ranks wait for each other, and none can proceed"
# Who fails because another rank of the cycle has raised before.
_AFTER_IT = rf"(rank \d( \([^)]*\))? failed|after an earlier failure): .*{_DEADLOCK}"
_WAIT = re.compile(r"\n  rank (\d) waits for (?:rank (\d)|any of ranks ([\d, ]+)|a message from any rank) in (\w+)\(")


class Cycle(NamedTuple):
    """What the ranks are to say.

    Attributes:
        calls: In which call each rank waits.
        awaited: For which rank each one waits: the number, those of several as "1, 2", or "any".
    """

    calls: tuple[str, ...]
    awaited: tuple[str, ...]


def later(seconds=LATE_S):
    threading.Event().wait(seconds)


def check(failures, cycle):
    """Check that each rank raises the cycle, or fails by what another one has raised."""
    told = 0
    for rank, failure in enumerate(failures):
        assert failure.kind is dist.DistBackendError, failure
        assert failure.took_s < 30.0
        is_first = re.search(rf"\(rank {rank} of \d\): {_DEADLOCK}", failure.message)
        assert is_first or re.search(_AFTER_IT, failure.message, re.DOTALL), failure
        found = _WAIT.findall(failure.message)
        waits = sorted((one, call, other or several or "any") for one, other, several, call in found)
        if is_first:
            told += 1
            assert waits == [(str(one), *wait) for one, wait in enumerate(zip(*cycle, strict=True))], failure
    assert told
