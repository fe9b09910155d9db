"""The steps of ranks that share memory, as each of them sees them."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from meshdist.backends.gloo.shm.flag_barrier import BarrierWait, FlagBarrier, PeerSet, flag_barrier_class
from meshdist.backends.gloo.shm.segment import create
from meshdist.backends.gloo.shm.shared_region import STATE, SharedRegion
from meshdist.errors import DistBackendError
from meshdist.runtime.call import Signature
from meshdist.runtime.departure import Departure
from meshdist.runtime.waiting import is_ready

ONE, OTHER = Signature("all_reduce(float32[1])"), Signature("all_reduce(float32[2])")
CALLS = ((0, ONE), (2, OTHER))
MISMATCH = 3


def error_of(wait):
    with pytest.raises(DistBackendError) as raised:
        wait.check()
    return str(raised.value)


@pytest.fixture(params=sorted({FlagBarrier, flag_barrier_class()}, key=lambda kind: kind.__name__))
def barriers(request):
    """Three ranks of a group, all in this process."""
    segment = create(SharedRegion.num_bytes(3), [os.getpid()])
    members = PeerSet(
        ended=lambda rank: False,
        how_ended=lambda rank: pytest.fail("no rank has ended"),
        ring=lambda rank, number: None,
        describe="rank {}".format,
        number=lambda rank: rank,
        ranks=range(3),
    )
    yield [request.param(SharedRegion(segment, 3), rank, 3, members) for rank in range(3)]
    segment.seal()


def test_a_rank_that_looks_late_has_no_part_in_a_disagreement_after_its_call(barriers):
    words = [barrier.signal(ONE.fingerprint) for barrier in barriers]
    # The others go on, each to another call, and tell what they call.
    later = [BarrierWait(barriers[rank], barriers[rank].signal(call.fingerprint), call) for rank, call in CALLS]
    with ThreadPoolExecutor() as pool:
        errors = list(pool.map(error_of, later))
    wait = BarrierWait(barriers[1], words[1], ONE)
    wait.check()
    assert is_ready(wait)
    region = barriers[1].region
    assert [region.words[region.line(rank, STATE)] for rank in range(3)] == [MISMATCH, 0, MISMATCH]
    for error in errors:
        assert "rank 0 calls all_reduce(float32[1])" in error
        assert "rank 2 calls all_reduce(float32[2])" in error
        assert "rank 1" not in error
    # It learns of it in its next call.
    assert "the ranks disagree" in error_of(BarrierWait(barriers[1], barriers[1].signal(ONE.fingerprint), ONE))


def test_a_rank_that_has_not_come_is_named_with_what_it_did_instead(barriers):
    wait = BarrierWait(barriers[0], barriers[0].signal(ONE.fingerprint), ONE)
    barriers[1].signal(ONE.fingerprint)
    barriers[2].leave(Departure.of_status(1))
    assert wait.missing() == "rank 2"
    assert np.array_equal(wait.awaits(), [2])
    with pytest.raises(DistBackendError, match="rank 2 "):
        wait.check()
