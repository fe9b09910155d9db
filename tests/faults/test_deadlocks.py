"""Ranks that wait for each other in a circle raise when that is proven, long before the timeout."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from trying import attempt, outcomes_of

import meshdist as dist
from meshdist.debug.blocked_rank import BlockedRank, describe, endless_wait

TIMEOUT_S = 300.0
ORDER = "make the same calls on these groups on all ranks, the same number of times and in the same order"
over_tcp = [pytest.param(name, marks=pytest.mark.slow) for name in ("gloo-tcp", "gloo-hosts")]
linux = pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")


def blocked(*ranks):
    """Blocked ranks by rank, from tuples of a rank, the number of its wait, and what it has confirmed."""
    return {rank: BlockedRank(rank, number, tuple(seen), f"call {number}", seen) for rank, number, seen in ranks}


@pytest.mark.parametrize(
    ("ranks", "circle"),
    [
        ([(0, 1, {1: 5}), (1, 5, {0: 1})], [0, 1]),
        ([(0, 1, {3: 2, 1: 5}), (1, 5, {2: 7}), (2, 7, {0: 1}), (3, 2, {})], [0, 1, 2]),
        ([(0, 1, {1: 5})], []),
        ([(0, 1, {1: 4}), (1, 5, {0: 1})], []),  # rank 0 has read of an earlier wait of rank 1
        ([(0, 2, {1: 5}), (1, 5, {0: 1})], []),  # and rank 1 of one of rank 0
        ([(0, 1, {1: 5}), (1, 5, {})], []),  # rank 1 has not looked again
        ([(0, 1, {1: 5}), (1, 5, {2: 3}), (2, 3, {1: 5})], []),  # rank 0 waits for a circle that it is not in
    ],
    ids=["two", "three", "alone", "earlier", "earlier of the other", "not confirmed", "outside"],
)
def test_which_ranks_are_in_a_circle(ranks, circle):
    assert [one.rank for one in endless_wait(0, blocked(*ranks))] == circle


def ended(rank, number, phase):
    return {rank: BlockedRank(rank, number, (), "cell", phase=phase, has_ended=True)}


def test_a_rank_that_has_ended_its_phase_is_waited_for_in_vain():
    ranks = blocked((0, 1, {1: 5}), (1, 5, {2: 3})) | ended(2, 3, phase=0)
    assert (
        describe(endless_wait(1, ranks))
        == "rank 2 has finished the cell, but this rank is still waiting for it in call 5"
    )
    words = (
        "rank 2 has finished the cell, but rank 1 is still waiting for it in call 5, and this rank for rank 1 in call 1"
    )
    assert describe(endless_wait(0, ranks)) == words
    assert endless_wait(1, ranks | ended(2, 3, phase=-1)) == []  # it may have begun the next by now


def test_every_rank_describes_a_circle_in_the_same_words():
    ranks = blocked((4, 1, {7: 2}), (7, 2, {5: 3}), (5, 3, {4: 1}))
    texts = {describe(endless_wait(rank, ranks)) for rank in ranks}
    assert texts == {
        "deadlock: the ranks wait for each other, and none can proceed\n  rank 4 waits for rank 7 in call 1\n"
        "  rank 7 waits for rank 5 in call 2\n  rank 5 waits for rank 4 in call 3\n"
        f"  {ORDER}"
    }


def test_the_advice_on_a_circle_of_receives_names_ranks_for_which_another_message_is_there():
    first, second = (
        BlockedRank(rank, 1, (1 - rank,), "recv(int64[1] from any rank)", {1 - rank: 1}) for rank in (0, 1)
    )
    advice = "let one of them send before it receives, or call sendrecv, which does both at once"
    assert describe([first, second]).endswith(f"\n  {advice}")
    there = replace(second, instead="a message with tag 7 is waiting to be received")
    assert describe([first, there]).endswith(
        "(a message with tag 7 is waiting to be received)\n"
        f"  let rank 1 receive the message that is waiting, with its tag and source; or {advice}"
    )
    both = [replace(one, instead=there.instead) for one in (first, second)]
    assert (
        f"let ranks 0, 1 receive the messages that are waiting, with their tags and sources; or {advice}"
        in describe(both)
    )
    probes = [replace(one, call="probe(from rank 0)") for one in (first, there)]
    assert describe(probes).endswith(
        "its tag and source, which probe(tag=None) finds; or let one of them send before it probes"
    )


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        ("shift", "all ranks along the axis must call shift, with equal by, periodic and tag"),
        ("halo_exchange", "must call halo_exchange, with equal width, periodic, dims and tag"),
        ("sendrecv", "in sendrecv, the dst of each rank must receive from it, with the same tag"),
    ],
)
def test_ranks_whose_exchanges_disagree_are_told_on_what(call, advice):
    instead = "a message with tag 7 is waiting to be received"
    first, second = (
        BlockedRank(rank, 1, (1 - rank,), f"{call}(int64[1] from rank {1 - rank})", instead=instead) for rank in (0, 1)
    )
    assert f" ({instead})\n" in describe([first, second])
    assert describe([first, second]).endswith(advice)


def test_a_published_rank_is_read_as_it_was():
    (one,) = blocked((3, 9, {4: 2, 11: 5})).values()
    assert BlockedRank.decode(one.encode().encode()) == one


def test_an_older_version_is_shown_no_rank_that_takes_a_message_from_any():
    any_source = replace(blocked((3, 9, {4: 2, 5: 1}))[3], from_any=True)
    assert BlockedRank.decode(any_source.encode().encode()) == any_source
    # It does not read a record with a field that it does not know, and knows those of all other ranks.
    assert "from_any" in any_source.encode()
    assert "from_any" not in replace(any_source, from_any=False).encode()


def test_a_set_of_ranks_is_described_by_all_in_the_same_words():
    ranks = blocked((0, 3, {1: 4, 2: 5}), (1, 4, {0: 3}), (2, 5, {0: 3}))
    ranks[0] = replace(ranks[0], from_any=True)
    assert {describe(endless_wait(rank, ranks)) for rank in ranks} == {
        "deadlock: the ranks wait for each other, and none can proceed\n  rank 0 waits for a message from any rank in"
        " call 3\n  rank 1 waits for rank 0 in call 4\n  rank 2 waits for rank 0 in call 5\n"
        f"  {ORDER}"
    }
    for changed in (
        replace(ranks[2], number=6),
        replace(ranks[2], confirmed={0: 2}),
        replace(ranks[2], has_ended=True),
    ):
        assert not any(endless_wait(rank, {**ranks, 2: changed}) for rank in (0, 1))


@pytest.mark.parametrize(
    ("first", "second", "advice"),
    [
        ("barrier(), call 1 on 'a'", "all_reduce(float64[4], op=sum), call 1 on 'b'", ORDER),
        ("probe(from rank 1, any tag)", "probe(from rank 0, any tag)", "let one of them send before it probes"),
        (
            "recv(int64[1] from rank 1)",
            "barrier(), call 1 on 'a'",
            "let rank 1 send before its barrier, or rank 0 call barrier before its recv",
        ),
        (
            "all_reduce(float64[4], op=sum)",
            "send(int64[99999] to rank 0)",
            "let rank 0 receive before its all_reduce, or rank 1 call all_reduce before its send",
        ),
        (
            "send_object_list(2 objects to rank 1, tag=0)",
            "isend_object_list(1 object to rank 0, tag=0)",
            "send with isend_object_list, and wait for it after the receive, or call sendrecv_object",
        ),
        (
            "recv_object_list(2 objects from rank 1, tag=0)",
            "irecv_object_list(objects from rank 0, tag=0)",
            "let one of them send before it receives, or call sendrecv_object, which does both at once",
        ),
        (
            "send_object_list(1 object to rank 1, tag=0)",
            "barrier(), call 1 on 'a'",
            "let rank 1 receive before its barrier, or rank 0 call barrier before its send_object_list",
        ),
    ],
)
def test_what_to_change_stands_at_the_end(first, second, advice):
    ranks = [BlockedRank(rank, 1, (1 - rank,), call, {1 - rank: 1}) for rank, call in enumerate((first, second))]
    assert describe(ranks).splitlines()[-1] == f"  {advice}"


def test_a_circle_of_messages_and_collectives_of_three_ranks_has_no_advice():
    calls = ("recv(int64[1] from rank 1)", "barrier(), call 1 on 'a'", "barrier(), call 1 on 'b'")
    ranks = [BlockedRank(rank, 1, ((rank + 1) % 3,), call, {(rank + 1) % 3: 1}) for rank, call in enumerate(calls)]
    assert describe(ranks).endswith("rank 2 waits for rank 0 in barrier(), call 1 on 'b'")


def two_receives(partner):
    return attempt(lambda: dist.recv(np.ones(4), src=partner))


def two_orders(partner):
    rank = dist.get_rank()
    groups = [dist.new_group(sorted([rank, partner]), group_desc=name) for name in ("rows", "columns")]
    first, second = groups if rank < partner else groups[::-1]
    return attempt(lambda: (first.all_reduce(np.ones(3)), second.all_reduce(np.ones(3))))


def two_later_orders(partner):
    """As above, on groups that have been used before."""
    rank = dist.get_rank()
    groups = [dist.new_group(sorted([rank, partner]), group_desc=name) for name in ("old rows", "old columns")]
    for group in groups:
        group.barrier()
    first, second = groups if rank < partner else groups[::-1]
    return attempt(lambda: (first.barrier(), second.barrier()))


def in_pairs():
    rank = dist.get_rank()
    dist.barrier()
    return (two_receives, two_orders, two_later_orders)[rank // 2](rank ^ 1)


SITE = r"test_deadlocks\.py:\d+"
WORDS = {
    0: (
        r"recv on group 'world' \(rank {rank} of 6\)",
        r"recv\(float64\[4\] from rank {to}, tag=0\), message 1 on 'world'",
    ),
    2: (
        r"all_reduce on group '{group}' \(rank {place} of 2.*\)",
        r"all_reduce\(float64\[3\], op=sum\), call 1 on '{group}'",
    ),
    4: (r"barrier on group 'old {group}' \(rank {place} of 2.*\)", r"barrier\(\), call 2 on 'old {group}'"),
}


@linux
@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", ["threads", "gloo", *over_tcp])
def test_every_rank_of_a_circle_raises_it(new_workers, backend):
    for rank, failure in enumerate(outcomes_of(new_workers, in_pairs, 6, backend)):
        first, second = rank & ~1, rank | 1
        begin, call = WORDS[first]
        groups = ("rows", "columns")
        begin = begin.format(rank=rank, place=rank & 1, group=groups[rank & 1])
        steps = [
            f"rank {one} waits for rank {to} in {call.format(to=to, group=groups[one & 1])}, at {SITE}"
            for one, to in ((first, second), (second, first))
        ]
        receives = "let one of them send before it receives, or call sendrecv, which does both at once"
        advice = ORDER if first else receives
        lines = "\n  ".join(["deadlock: the ranks wait for each other, and none can proceed", *steps, advice])
        words = f"{begin}: {lines}"
        assert failure.kind is dist.DistBackendError
        assert re.fullmatch(words, failure.message), failure.message


def sends_until_it_fails(num_elements, group=None):
    x = np.ones(num_elements)

    def send():
        while True:
            dist.send(x, 1 - dist.get_rank(), group=group)

    return attempt(send)


FULL = "the receiver's buffer of 1088 KiB for unreceived messages is full"


@linux
@pytest.mark.timeout(60)
def test_sends_without_room_for_their_messages_say_so(new_workers):
    steps = [
        rf"rank {one} waits for rank {to} in send\(float64\[1\] to rank {to}, tag=0\), message 8705 on 'world',"
        rf" at {SITE} \({FULL}\)"
        for one, to in ((0, 1), (1, 0))
    ]
    for failure in outcomes_of(new_workers, partial(sends_until_it_fails, 1), 2, "gloo"):
        assert failure.kind is dist.DistBackendError
        assert re.search("\n  ".join(steps), failure.message), failure.message


def sends_before_the_other_receives():
    group = dist.new_group(timeout=0.3)
    failure = sends_until_it_fails(1, group) if dist.get_rank() == 0 else None
    dist.barrier()
    return failure


@linux
@pytest.mark.timeout(60)
def test_a_send_that_waits_for_room_until_its_timeout_says_so(new_workers):
    failure, _ = outcomes_of(new_workers, sends_before_the_other_receives, 2, "gloo")
    assert failure.kind is dist.DistTimeoutError
    assert f"to receive a message; {FULL}" in failure.message


@linux
@pytest.mark.timeout(60)
def test_over_tcp_the_timeout_says_how_much_is_buffered(new_workers):
    failures = outcomes_of(new_workers, partial(sends_until_it_fails, 8000), 2, "gloo-tcp", timeout_s=1.0)
    messages = [failure.message for failure in failures if failure.kind is dist.DistTimeoutError]
    assert messages
    for message in messages:
        assert "to receive a message; a receiver buffers up to 16 MiB of unreceived messages" in message


def around_a_mesh():
    """Each of four ranks waits for the next, to which others have sent more than it reads now; two more send."""
    rank, pair = dist.get_rank(), dist.get_rank() & ~1
    rows = dist.new_group([pair, pair + 1], group_desc="row")
    columns = dist.new_group([rank & 1, (rank & 1) + 2], group_desc="column")
    dist.barrier()
    if rank > 3:
        return attempt(lambda: dist.send(np.ones(100_000), dst=rank ^ 1))
    rows.barrier()
    columns.barrier()
    first = rows if rank in (0, 3) else columns
    return attempt(lambda: first.all_reduce(np.ones(100_000)))


@linux
@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", ["gloo-tcp", "gloo-hosts"])
def test_circles_beside_long_messages(new_workers, backend):
    failures = outcomes_of(new_workers, around_a_mesh, 6, backend)
    steps = [re.findall(r"rank (\d) waits for rank (\d) in (\w+)", failure.message) for failure in failures]
    around = [(*step, "all_reduce") for step in ("01", "13", "32", "20")]
    assert steps == [around] * 4 + [[("4", "5", "send"), ("5", "4", "send")]] * 2, failures


# Longer than it takes to prove a circle.
LATE_S = 2.2


def sent_by_another_thread():
    """Both receive; another thread of one rank, which makes no call yet, sends at last."""
    rank, x, group = dist.get_rank(), np.ones(1), dist.new_group([0, 1])
    group.barrier()
    if rank == 1:
        group.recv(x, 0)
        group.send(x, 0)
        return x.item()
    thread = threading.Timer(LATE_S, lambda: group.send(np.full(1, 7.0), 1))
    thread.start()
    group.recv(x, 1)
    thread.join()
    return x.item()


def sent_by_a_callback():
    """Both receive; one rank has an async call in progress, whose callback sends at last."""
    rank, x = dist.get_rank(), np.ones(1)
    pair, all_three = dist.new_group([2, 3]), dist.new_group([2, 3, 4])
    if rank == 4:
        threading.Event().wait(LATE_S)
        all_three.barrier()
        return 7.0
    work = all_three.barrier(async_op=True)
    if rank == 2:
        work.get_future().add_done_callback(lambda future: pair.isend(np.full(1, 7.0), 1))
    pair.recv(x, 3 - rank)  # ranks of the group
    if rank == 3:
        pair.send(x, 0)
    work.wait()
    return x.item()


def without_a_circle():
    return (sent_by_another_thread if dist.get_rank() < 2 else sent_by_a_callback)()


@linux
@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp", "gloo-hosts"])
def test_what_may_still_come_is_no_circle(new_workers, backend):
    assert outcomes_of(new_workers, without_a_circle, 5, backend) == [7.0] * 5
