"""The wait graph from the states of ranks: its edges, the cause, and the text."""

import re

import pytest
from sample_states import NOW_S, by_rank, data, record, seen, waiting

from meshdist.debug.attach import long_waits
from meshdist.debug.hang_report import causes, hang_report
from meshdist.debug.report import report_on
from meshdist.debug.states import parse_state
from meshdist.debug.wait_graph import first_difference, who_waits

pytestmark = pytest.mark.timeout(30)
WORLD = {"world": [0, 1, 2]}


def edges(waits):
    return sorted(waits.graph.edges)


def one_absent(num_ranks=3, late=1):
    groups = {"world": list(range(num_ranks))}
    states = [
        seen(rank, [record("world", 1, 9.0), waiting("world", 2, 5.0)], groups, size=num_ranks)
        if rank != late
        else seen(rank, [record("world", 1, 9.0)], groups, in_call=False, size=num_ranks)
        for rank in range(num_ranks)
    ]
    return by_rank(*states)


def test_a_wait_that_has_just_begun_is_no_hang_to_show():
    late = seen(1, [], WORLD, in_call=False, size=2)
    for waited_s, is_hang in ((0.2, False), (0.7, True)):
        lines = long_waits(by_rank(seen(0, [waiting("world", 1, waited_s)], WORLD, size=2), late), {}, 2)
        assert bool(lines) == is_hang
    assert long_waits(by_rank(late), {}, 2) == []


def test_all_wait_for_the_one_that_has_not_come():
    waits = who_waits(one_absent())
    assert edges(waits) == [(0, 1), (2, 1)]
    assert (waits.absent, waits.cycle) == ((1,), ())


def test_the_story_names_the_absent_rank_its_place_and_its_last_call():
    lines = hang_report(who_waits(one_absent()), 3)
    assert lines[0] == "rank 1 has not reached barrier(), call 2 on 'world', at train.py:20"
    call = "barrier(), call 2 on 'world', at train.py:20"
    assert f"ranks 0, 2 have been in {call}, for 5.0 s, waiting for rank 1" in lines
    assert any(
        line.startswith(
            "rank 1 is not in a meshdist call; it has been at data.py:57 in load for 8.9 s; its last call was"
        )
        for line in lines
    )
    assert "stack of rank 1: train.py:3 in <module> > data.py:57 in load" in lines


def test_sixty_four_ranks_are_told_of_in_a_few_lines():
    lines = hang_report(who_waits(one_absent(64, late=17)), 64)
    assert len(lines) < 6
    assert any(line.startswith("ranks 0-16, 18-63 have been in barrier()") for line in lines)


def test_ranks_in_the_calls_of_two_groups_wait_in_a_circle():
    groups = {"world": [0, 1], "a": [0, 1], "b": [0, 1]}
    states = by_rank(
        seen(0, [record("world", 1, 9.0), waiting("a", 1, 5.0)], groups),
        seen(1, [record("world", 1, 9.0), waiting("b", 1, 5.0, "all_reduce(float32[4], op=sum)")], groups),
    )
    waits = who_waits(states)
    assert set(waits.cycle) == {0, 1}
    assert waits.absent == ()
    calls = [
        "barrier(), call 1 on 'a', at train.py:10",
        "all_reduce(float32[4], op=sum), call 1 on 'b', at train.py:10",
    ]
    after = "after barrier(), call 1 on 'world', at train.py:10"
    assert hang_report(waits, 2) == [
        f"the ranks wait for each other: rank 0 waits for rank 1; rank 1 waits for rank 0; {after}, their calls differ",
        *(f"rank {rank} has been in {calls[rank]}, for 5.0 s, waiting for rank {1 - rank}" for rank in (0, 1)),
    ]
    assert causes(waits) == [
        f"the ranks wait for each other: rank 0 waits for rank 1 in {calls[0]}; rank 1 waits for rank 0 in {calls[1]};"
        f" {after}, rank 0 calls {calls[0]} and rank 1 calls {calls[1]}"
    ]


def test_calls_that_differ_from_the_first_on():
    groups = {"world": [0, 1], "a": [0, 1], "b": [0, 1]}
    states = by_rank(seen(0, [waiting("a", 1, 5.0)], groups), seen(1, [waiting("b", 1, 5.0)], groups))
    waits = who_waits(states)
    words = "the ranks wait for each other: rank 0 waits for rank 1; rank 1 waits for rank 0"
    assert hang_report(waits, 2)[0] == f"{words}; already their oldest recorded calls differ"
    mine, theirs = (f"barrier(), call 1 on '{name}', at train.py:10" for name in "ab")
    (cause,) = causes(waits)
    assert cause.endswith(f"; in their oldest recorded calls, rank 0 calls {mine} and rank 1 calls {theirs}")


def test_messages_wait_for_their_other_side():
    states = by_rank(
        seen(0, [waiting("world", 1, 3.0, "recv(float32[4] from rank 1, tag=0)", root=1)], WORLD),
        seen(1, [waiting("world", 1, 3.0, "recv(float32[4] from rank 2, tag=0)", root=2)], WORLD),
        seen(2, [waiting("world", 1, 3.0, "recv(float32[4] from rank 0, tag=0)", root=0)], WORLD),
    )
    waits = who_waits(states)
    assert edges(waits) == [(0, 1), (1, 2), (2, 0)]
    assert len(waits.cycle) == 3


@pytest.mark.parametrize(("calls", "has_advice"), [(("isend", "send"), True), (("isend", "barrier"), False)])
def test_ranks_that_all_wait_in_their_sends_are_told_what_to_change(calls, has_advice):
    texts = [
        "barrier()" if call == "barrier" else f"{call}(float64[9] to rank {1 - rank})"
        for rank, call in enumerate(calls)
    ]
    groups = {"world": [0, 1]}
    states = by_rank(
        *(seen(rank, [waiting("world", 1, 3.0, text, root=1 - rank)], groups) for rank, text in enumerate(texts))
    )
    cause = hang_report(who_waits(states), 2)[0]
    advice = "; post an irecv before the send, or call sendrecv, which does both at once"
    assert cause.startswith("the ranks wait for each other: rank 0 waits for rank 1; rank 1 waits for rank 0")
    assert cause.endswith(advice) == has_advice


def test_a_rank_that_receives_from_itself_waits_for_itself():
    itself = waiting("world", 1, 3.0, "irecv(float32[4] from rank 0, tag=0)", root=0)
    cause = hang_report(who_waits(by_rank(seen(0, [itself], WORLD))), 3)[0]
    assert cause.startswith("rank 0 waits for itself in irecv(float32[4] from rank 0, tag=0), message 1 on 'world'")


def last_of_a_wait(rank, records, groups, ended_s, reason="timed out"):
    """The state of a rank whose call failed so many seconds before now."""
    return parse_state({**data(rank, records, groups), "reason": reason, "time_s": NOW_S - ended_s}, "a test")


def receives(source, at_s):
    return waiting("world", 1, at_s, f"recv(float32[4] from rank {source}, tag=0)", root=source)


def test_who_gave_up_a_moment_ago_is_of_the_circle():
    states = by_rank(
        seen(0, [receives(2, 3.0)], WORLD),
        last_of_a_wait(1, [receives(0, 3.0)], WORLD, 1.0),
        last_of_a_wait(2, [receives(1, 3.0)], WORLD, 1.0),
    )
    waits = who_waits(states, {1: "called destroy_process_group()", 2: "has finished"})
    assert (set(waits.cycle), waits.absent) == ({0, 1, 2}, ())
    lines = hang_report(waits, 3, now_s=NOW_S + 5.0)
    where = "recv(float32[4] from rank 1, tag=0), message 1 on 'world', at train.py:10"
    assert f"rank 2 was in {where}, for 2.0 s, waiting for rank 1, and timed out" in lines
    assert lines[-2:] == ["rank 1 called destroy_process_group()", "rank 2 has finished"]


def test_a_report_says_how_the_calls_ended_of_ranks_that_wait_no_more():
    states = by_rank(
        seen(0, [waiting("world", 1, 3.0)], WORLD),
        last_of_a_wait(1, [waiting("world", 1, 3.0)], WORLD, 1.0, "gave up"),
        last_of_a_wait(2, [waiting("world", 1, 3.0)], WORLD, 1.0, "gave up"),
    )
    lines = hang_report(who_waits(states, {1: "has finished", 2: "has finished"}), 3, now_s=NOW_S)
    assert "ranks 1, 2 were in barrier(), call 1 on 'world', at train.py:10, for 2.0 s, and their calls failed" in lines
    how = {"DistTimeoutError: barrier: timed out after 2 s": "timed out", "DistBackendError: rank 0 has died": "failed"}
    for error, words in how.items():
        failed = {**waiting("world", 1, 3.0), "state": "failed", "error": error}
        (_, line) = hang_report(who_waits(by_rank(seen(0, [failed], WORLD))), 1, now_s=NOW_S)
        assert line.startswith(f"rank 0 has been in barrier(), call 1 on 'world', at train.py:10 ({words}), for "), line


def test_who_gave_up_before_anybody_waited_for_it_is_of_no_circle():
    states = by_rank(
        seen(0, [receives(2, 3.0)], WORLD),
        last_of_a_wait(2, [receives(0, 9.0)], WORLD, 4.0),
    )
    waits = who_waits(states, {2: "called destroy_process_group()"})
    assert (waits.cycle, waits.absent) == ((), (2,))


def test_who_gave_up_has_come_to_the_call_of_the_others():
    states = by_rank(
        seen(0, [waiting("world", 1, 3.0)], WORLD),
        seen(1, [], WORLD, in_call=False),
        last_of_a_wait(2, [waiting("world", 1, 3.0)], WORLD, 1.0),
    )
    assert who_waits(states, {2: "called destroy_process_group()"}).absent == (1,)


def test_a_message_is_not_sent_or_not_received_by_its_other_side():
    sends = waiting("world", 1, 3.0, "send(float32[4] to rank 2, tag=0)", root=2)
    states = by_rank(
        seen(0, [receives(1, 3.0)], WORLD),
        seen(1, [sends], WORLD),
        seen(2, [], WORLD, in_call=False),
    )
    text = "\n".join(hang_report(who_waits(states), 3))
    assert "rank 2 has not received the message that rank 1 is sending in send(float32[4] to rank 2, tag=0)" in text
    states[1] = seen(1, [], WORLD, in_call=False)
    text = "\n".join(hang_report(who_waits(states), 3))
    assert "rank 1 has not sent the message that rank 0 is waiting for in recv(float32[4] from rank 1, tag=0)" in text
    assert "have not completed any call yet" in text


def test_ranks_that_lack_in_different_calls_are_told_of_one_by_one():
    groups = {"a": [0, 1], "b": [2, 3]}
    states = by_rank(
        seen(0, [waiting("a", 1, 3.0)], groups),
        seen(1, [], groups, in_call=False),
        seen(2, [waiting("b", 1, 3.0)], groups),
        seen(3, [], groups, in_call=False),
    )
    assert hang_report(who_waits(states), 4)[:2] == [
        "rank 1 has not reached barrier(), call 1 on 'a', at train.py:10",
        "rank 3 has not reached barrier(), call 1 on 'b', at train.py:10",
    ]


def in_a_wait(*places, since_s=3.0):
    """Return the state of a rank with six receives in progress, which waits for any of those at some places."""
    text = "irecv(float64[4] from rank {}, tag=0)"
    calls = [waiting("world", n, 10.0 - n, text.format(n % 3 + 1), root=n % 3 + 1, tag=0) for n in range(6)]
    awaits = {"calls": list(places), "since_s": NOW_S - since_s}
    return parse_state({**data(0, calls, {"world": [0, 1, 2, 3]}), "awaits": awaits}, "a test")


def test_the_calls_of_a_wait_any_are_named_and_the_rest_counted():
    lines = hang_report(who_waits(by_rank(in_a_wait(1, 2))), 4)
    one, other = (f"irecv(float64[4] from rank {n + 1}, tag=0), message {n} on 'world'" for n in (1, 2))
    expected = "rank 0 has been in wait_any of 2 calls, at data.py:57, for 3.0 s, waiting for ranks 1, 2, 3"
    assert f"{expected}: {one}, at train.py:10; {other}, at train.py:20" in lines
    lines = hang_report(who_waits(by_rank(in_a_wait(*range(6)))), 4)
    assert any(line.startswith("rank 0 has been in wait_any of 6 calls") for line in lines), lines
    assert any(line.endswith("message 3 on 'world', at train.py:30; and 2 more") for line in lines), lines


def test_the_call_that_a_rank_waits_for_is_named_and_not_a_later_one():
    lines = hang_report(who_waits(by_rank(in_a_wait(1))), 4)
    assert any(line.startswith("rank 0 has been in irecv(float64[4] from rank 2") for line in lines), lines


@pytest.mark.parametrize("places", [[6], [-1], ["x"], None])
def test_awaited_calls_that_are_not_there_are_refused(places):
    with pytest.raises(ValueError, match="is not a file of the flight recorder"):
        parse_state({**data(0, [], WORLD), "awaits": {"calls": places, "since_s": NOW_S}}, "a test")


def test_a_message_from_any_waits_for_all():
    states = by_rank(
        seen(0, [waiting("world", 1, 3.0, "recv(float32[4] from any rank, tag=0)")], WORLD),
        seen(1, [], WORLD, in_call=False),
        seen(2, [], WORLD, in_call=False),
    )
    assert edges(who_waits(states)) == [(0, 1), (0, 2)]


def test_a_rank_that_computes_while_its_async_call_waits_is_in_no_circle():
    groups = {"a": [0, 1], "b": [0, 1]}
    states = by_rank(
        seen(0, [waiting("a", 1, 5.0)], groups, in_call=False),
        seen(1, [waiting("b", 1, 5.0)], groups),
    )
    waits = who_waits(states)
    assert (waits.cycle, waits.absent) == ((), (0,))
    report = "\n".join(hang_report(waits, 2))
    assert "and has not completed any call yet; 1 async call is in progress" in report


def test_a_queued_call_has_not_come():
    states = by_rank(
        seen(0, [waiting("world", 1, 5.0)], {"world": [0, 1]}),
        seen(1, [record("world", 1, 5.0, state="queued")], {"world": [0, 1]}),
    )
    assert edges(who_waits(states)) == [(0, 1)] or (0, 1) in edges(who_waits(states))


def test_dead_and_silent_ranks_are_told_apart():
    states = by_rank(seen(0, [waiting("world", 2, 5.0)], WORLD))
    waits = who_waits(states, {1: "has died"})
    lines = hang_report(waits, 3)
    assert waits.absent == (1,)
    assert "rank 1 has died" in lines
    assert "rank 2 did not respond" in lines


def test_ranks_that_all_came_wait_for_nobody():
    states = by_rank(*(seen(rank, [waiting("world", 2, 5.0)], WORLD) for rank in range(3)))
    waits = who_waits(states)
    assert edges(waits) == []
    assert hang_report(waits, 3)[0].startswith("all ranks have reached")


def test_the_first_difference_leaves_out_what_one_rank_can_no_longer_show():
    groups = {"a": [0, 1], "b": [0, 1]}
    one = seen(0, [record("b", 1, 20.0), record("a", 7, 9.0), waiting("a", 8, 5.0)], groups)
    other = seen(1, [record("a", 7, 9.0), record("b", 2, 8.0), waiting("a", 8, 5.0)], groups)
    # Rank 1 made call 1 on b as well: the call after it is in its records.
    difference = first_difference(one, other)
    assert difference is not None
    assert (difference.before.group, difference.before.sequence) == ("a", 7)
    assert (difference.mine.group, difference.theirs.group) == ("a", "b")


def test_ranks_that_do_the_same_do_not_differ():
    groups = {"world": [0, 1]}
    calls = [record("world", 1, 9.0), waiting("world", 2, 5.0)]
    assert first_difference(seen(0, calls, groups), seen(1, calls, groups)) is None


@pytest.mark.parametrize("broken", [{}, [], None, {"format": 1}, {**data(0, [], WORLD), "groups": [1]}])
def test_other_json_is_refused_with_its_place(broken):
    with pytest.raises(ValueError, match="^some file is not a file of the flight recorder"):
        parse_state(broken, "some file")


def test_another_format_is_named():
    with pytest.raises(ValueError, match="expected format 1, got 2"):
        parse_state({**data(0, [], WORLD), "format": 2}, "some file")


def test_a_rank_that_sets_up_its_first_call_is_in_it():
    (_, line) = hang_report(who_waits(by_rank(seen(0, [], WORLD))), 1, now_s=NOW_S)
    assert line.startswith("rank 0 is in a meshdist call at data.py:57 in load for ")
    assert line.endswith(" s, of which there is no record")


def test_a_report_begins_with_the_call_that_the_absent_rank_misses_first():
    tp, world = {"tp": [0, 1]}, {"world": [0, 1, 2, 3]}
    others = {"tp": [2, 3], **world}
    states = by_rank(
        seen(0, [waiting("tp", 1, 5.0, "all_reduce(float32[4], op=sum)")], {**tp, **world}),
        seen(1, [], {**tp, **world}, in_call=False),
        *(seen(rank, [record("tp", 1, 6.0), waiting("world", 1, 5.0)], others) for rank in (2, 3)),
    )
    first, *_ = hang_report(who_waits(states), 4)
    assert first == "rank 1 has not reached all_reduce(float32[4], op=sum), call 1 on 'tp', at train.py:10"


def test_all_durations_of_a_report_are_as_of_one_time():
    began_s = 60.0  # before now
    old = {**data(0, [waiting("world", 1, began_s)], WORLD, size=2), "time_s": NOW_S - 8}
    fresh = {**data(1, [], WORLD, in_call=False, size=2), "began_s": NOW_S - began_s}
    states = by_rank(*(parse_state(state, "a test") for state in (old, fresh)))
    lines = [*long_waits(states, {}, 2, NOW_S), *report_on(states, {}, NOW_S).splitlines()]
    assert {re.search(r"for (\S+) s", line)[1] for line in lines if re.search(r"for \S+ s\b", line)} == {"60.0"}
