"""Ranks that fail because of another rank report the first cause, once."""

from __future__ import annotations

import numpy as np
import pytest

import meshdist as dist
from meshdist.errors import CallMade, DistBackendError
from meshdist.runtime.departure import Departure, LeftOut, describe, gave_up, peer_gone

WHERE = "all_reduce on group 'world' (rank {} of 4)"


@pytest.mark.parametrize("hang_report", ["", "  who is waiting for whom:\n  rank 0 is not in a meshdist call"])
def test_the_first_cause_is_said_once_however_many_pass_it_on(hang_report):
    error = DistBackendError("KeyboardInterrupt", error_prefix=WHERE.format(3), hang_report=hang_report)
    for rank in (3, 2, 1):
        departure = Departure.decode(gave_up(error).encode())
        error = peer_gone(f"rank {rank} (global rank {rank + 4}, pid 7 on n)", departure, LeftOut.CALL)
        error.locate(WHERE.format(rank - 1), CallMade("call", rank, "a.py:17"))
    assert str(error) == (
        f"{WHERE.format(0)}: rank 1 (global rank 5, pid 7 on n) failed"
        " because rank 3 (global rank 7, pid 7 on n) failed: "
        f"{WHERE.format(3)}: KeyboardInterrupt; this is call 1, at a.py:17{hang_report and chr(10)}{hang_report}"
    )


@pytest.mark.parametrize("words", ["it raised ValueError: the pump gave up: no oil", "rank 2 (pid 7 on n) has died"])
def test_what_is_no_chain_is_said_as_it_is(words):
    assert describe(gave_up(DistBackendError(words))) == f"failed: {words}"


def test_run_raises_the_error_of_the_rank_that_the_others_waited_for():
    def main():
        rank = dist.get_rank()
        if rank < 2:
            dist.recv(np.ones(1), src=rank + 1)

    with pytest.raises(dist.DistBackendError, match="rank 1 of 3.*: rank 2 has finished without sending"):
        dist.run(main, 3)
