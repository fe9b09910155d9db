"""The steps of ranks that share memory, as each of them sees them."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from meshdist.backends.gloo.shm.flag_barrier import (
    AHEAD,
    BarrierWait,
    FlagBarrier,
    PeerSet,
)
from meshdist.backends.gloo.shm.flag_barrier_kinds import flag_barrier_class
from meshdist.backends.gloo.shm.segment import create
from meshdist.backends.gloo.shm.shared_region import NUM_EARLY_SLOTS, NUM_PHASES, STATE, SharedRegion
from meshdist.errors import DistBackendError
from meshdist.runtime.call import Signature
from meshdist.runtime.departure import Departure
from meshdist.runtime.waiting import is_ready

ONE, OTHER = Signature("all_reduce(float32[1])"), Signature("all_reduce(float32[2])")
LATER = Signature("barrier()")
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


def signal_early(barrier, givers, call):
    return barrier.signal(call.fingerprint, barrier.early_return(givers, num_bytes=8).awaited)


def send_early(barrier, call=ONE):
    """Give in a call from which the rank returns as soon as it need not wait for the others."""
    barrier.record_call(call.text.encode())
    return BarrierWait(barrier, signal_early(barrier, range(0), call), call)


def take_from(giver, barrier, call=ONE):
    barrier.record_call(call.text.encode())
    return BarrierWait(barrier, signal_early(barrier, range(giver, giver + 1), call), call)


def test_a_rank_that_gives_is_only_so_many_steps_ahead(barriers):
    root, *others = barriers
    for _ in range(AHEAD):
        assert is_ready(send_early(root))
    blocked = send_early(root)
    for other in others:
        assert not is_ready(blocked)
        assert {"rank 1", "rank 2"} >= set(blocked.missing().split(", "))
        assert is_ready(take_from(0, other))
    assert is_ready(blocked)


def test_signals_are_told_apart_however_far_the_ranks_are_ahead(barriers):
    root = barriers[0]
    random = np.random.default_rng(7)
    steps, waiting = [0, 0, 0], [None, None, None]
    for _ in range(3000):
        rank = int(random.integers(3))
        if waiting[rank] is None or is_ready(waiting[rank]):
            waiting[rank] = send_early(root) if rank == 0 else take_from(0, barriers[rank])
            steps[rank] += 1
        # Those before the current one are complete.
        done = [step if is_ready(wait) else step - 1 for step, wait in zip(steps, waiting, strict=True) if wait]
        assert max(steps) - min(steps) <= AHEAD + 1
        assert steps[0] >= max(done[1:], default=0)
    assert min(steps) > 10 * NUM_PHASES


def test_an_early_slot_is_used_again_only_after_all_have_taken_what_was_in_it(barriers):
    """In steps of all kinds, whatever follows whatever, and however the ranks take turns."""
    for barrier in barriers:
        barrier.most_early_bytes = barrier.region.early_slots.slot_bytes
    random = np.random.default_rng(11)
    kinds = random.choice(["long", "few bytes", "all"], size=4000, p=[0.6, 0.25, 0.15]).tolist()
    steps, waiting, ahead = [0, 0, 0], [None, None, None], []
    while min(steps) < len(kinds) - 1:
        rank = int(random.integers(3))
        if steps[rank] == len(kinds) - 1 or not (waiting[rank] is None or is_ready(waiting[rank])):
            continue
        barrier, kind = barriers[rank], kinds[steps[rank] + 1]
        if kind == "all":
            waiting[rank] = BarrierWait(barrier, barrier.signal(ONE.fingerprint), ONE)
        else:
            barrier.record_call(ONE.text.encode())
            early = barrier.early_return(range(1), num_bytes=8 if kind == "few bytes" else 2000)
            assert early.awaited.is_long == (kind == "long")
            waiting[rank] = BarrierWait(barrier, barrier.signal(ONE.fingerprint, early.awaited), ONE)
        steps[rank] += 1
        earlier = steps[0] - NUM_EARLY_SLOTS
        if rank == 0 and kind == "long":
            ahead.append(steps[0] - min(steps))
            if earlier > 0 and kinds[earlier] == "long":
                done = [step if is_ready(wait) else step - 1 for step, wait in zip(steps, waiting, strict=True)]
                assert min(done[1:]) >= earlier
    assert max(ahead) >= NUM_EARLY_SLOTS - 1


def test_another_call_of_a_rank_that_went_on_is_found_in_the_next_call_of_all(barriers):
    assert is_ready(send_early(barriers[0], ONE))
    assert is_ready(send_early(barriers[1], OTHER))
    assert is_ready(take_from(0, barriers[2], ONE))
    waits = [BarrierWait(barrier, barrier.signal(LATER.fingerprint), LATER) for barrier in barriers]
    assert not any(wait.ready() for wait in waits)
    with ThreadPoolExecutor() as pool:
        errors = list(pool.map(error_of, waits))
    for error in errors:
        assert "ranks 0, 2 called all_reduce(float32[1]), then went on to test_flag_barrier.py:" in error
        assert "rank 1 called all_reduce(float32[2]), then went on to test_flag_barrier.py:" in error


def test_the_call_of_a_rank_that_went_on_is_told_though_it_calls_nothing_more(barriers):
    assert is_ready(send_early(barriers[0], ONE))
    wait = BarrierWait(barriers[1], barriers[1].signal(OTHER.fingerprint), OTHER)
    assert not wait.ready()
    error = error_of(wait)
    assert re.search(r"rank 0 called all_reduce\(float32\[1\]\)\n  rank 1 calls all_reduce\(float32\[2\]\) at ", error)


def test_a_rank_may_leave_after_it_has_given(barriers):
    assert is_ready(send_early(barriers[1]))
    barriers[1].leave(Departure.of_status(0))
    barriers[0].record_call(b"")
    wait = BarrierWait(barriers[0], signal_early(barriers[0], range(3), ONE), ONE)
    wait.check()
    assert wait.missing() == "rank 2"
    assert is_ready(send_early(barriers[2]))
    assert is_ready(wait)
    # Not after it has only begun to take.
    early = take_from(2, barriers[0])
    with pytest.raises(DistBackendError, match="rank 1 "):
        early.check()


def test_ranks_that_are_a_step_ahead_are_not_under_way_to_it(barriers):
    begin = barriers[0].signal(ONE.fingerprint)
    end = barriers[0].next_word(ONE.fingerprint, 1)
    for other in barriers[1:]:
        assert other.signal(ONE.fingerprint) == begin
    assert barriers[0].arrived(begin)
    assert barriers[0].underway(end) == [1, 2]
    barriers[1].signal(ONE.fingerprint)
    assert barriers[0].underway(end) == [2]
    barriers[2].leave(Departure.of_status(1))
    assert barriers[0].underway(end) == []
    barriers[0].signal(ONE.fingerprint)
    assert barriers[0].arrived(begin)
