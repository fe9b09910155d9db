"""What the calls of all ranks must have in common, in words and in a fingerprint; and where a call stands."""

import os
import re
from functools import partial

import numpy as np
import pytest

import meshdist as dist
from meshdist import functional
from meshdist.runtime.call import Elements, ShapeRule, Signature
from meshdist.runtime.call_mismatch import CallCheck
from meshdist.runtime.call_site import call_site

pytestmark = pytest.mark.timeout(60)


def test_fingerprints_tell_calls_apart():
    texts = [
        f"{name}({dtype}[{size}])"
        for name in ("barrier", "broadcast")
        for dtype in ("int8", "int16")
        for size in range(50)
    ]
    words = {Signature(text).fingerprint for text in texts}
    assert len(words) == len(texts)
    assert all(0 <= word < 1 << 64 for word in words)
    assert Signature("a").fingerprint == Signature("a").fingerprint


def described(calls, ranks):
    return str(CallCheck(0, ranks).error(calls))


def test_disagreement_joins_the_ranks_of_one_call():
    calls = {0: "a() at x.py:1", 2: "b() at x.py:2", 1: "a() at x.py:1"}
    assert described(calls, range(3)) == (
        "the ranks disagree\n  ranks 0, 1 call a() at x.py:1\n  rank 2 calls b() at x.py:2"
    )
    assert described({3: "a()", 1: "b()"}, range(4)) == "the ranks disagree\n  rank 1 calls b()\n  rank 3 calls a()"


def test_two_threads_that_set_up_a_group_are_told_so():
    headline = "several threads of a rank made the group's first call at the same time"
    advice = "  make all calls on a group from one thread, or create a group for each thread"
    calls = {0: "the set-up of the group at x.py:1", 1: "all_reduce(float64[4], op=sum) at x.py:1"}
    assert described(calls, range(2)).splitlines() == [
        headline,
        "  rank 0 sets up the group at x.py:1",
        "  rank 1 calls all_reduce(float64[4], op=sum) at x.py:1",
        advice,
    ]
    calls = dict.fromkeys((0, 1), "the set-up of the group at an async call")
    assert described(calls, range(2)).splitlines() == [
        headline,
        "  ranks 0, 1 set up the group in an async call",
        advice,
    ]


def of_different_lengths(name):
    x = np.ones(3 + dist.get_rank())
    calls = {
        "all_gather": lambda: functional.all_gather(x),
        "all_gather along an axis": lambda: functional.all_gather(x, axis=0),
        "all_gather_into_tensor": lambda: functional.all_gather_into_tensor(x),
        "gather": lambda: functional.gather(x),
        "all_reduce": lambda: functional.all_reduce(x),
    }
    with pytest.raises(dist.DistBackendError) as raised:
        calls[name]()
    return str(raised.value)


@pytest.mark.parametrize("name", ["all_gather", "all_gather along an axis", "all_gather_into_tensor", "gather"])
def test_arrays_of_different_lengths_are_told_how_to_gather_them(name):
    for message in dist.run(of_different_lengths, 2, (name,), timeout=20):
        assert message.startswith(f"{name.partition(' ')[0]} on group 'world'")
        of = "gather" if name == "gather" else "all_gather"
        advice = f"  to gather arrays of different lengths, call meshdist.functional.{of}(x, "
        assert message.splitlines()[-1].startswith(advice)


def test_other_disagreements_have_no_advice():
    for message in dist.run(of_different_lengths, 2, ("all_reduce",), timeout=20):
        assert len(message.splitlines()) == 3
    calls = {0: "gather(float64[3], root=0) at a.py:1", 1: "gather(float64[4], root=1) at a.py:2"}
    assert "different lengths" not in described(calls, range(2))


def test_disagreement_says_global_ranks_where_they_are_others():
    calls = {0: "a()", 1: "a()", 2: "b()"}
    assert described(calls, (0, 3, 5)) == (
        "the ranks disagree\n  ranks 0, 1 (global ranks 0, 3) call a()\n  rank 2 (global rank 5) calls b()"
    )
    many = dict.fromkeys(range(40), "a()")
    assert described(many, range(40)).startswith("the ranks disagree\n  ranks 0-39 call ")


def test_ranks_that_disagree_are_heard_before_it_is_told():
    said, heard = [], iter([{}, {1: "b()"}, {1: "b()", 2: "b()"}])
    check = CallCheck(0, range(3))
    error = check.explain(check.words(Signature("a()")), 2, said.append, lambda: next(heard))
    assert re.fullmatch(r"the ranks disagree\n  rank 0 calls (a\(\) at \S+)\n  ranks 1, 2 call b\(\)", str(error))
    assert said == [re.search(r"a\(\) at \S+", str(error))[0]]


def where_am_i():
    return call_site()


def test_the_call_site_is_outside_the_package():
    assert re.fullmatch(rf"{os.path.basename(__file__)}:\d+", where_am_i())


CALLS = {
    "all_reduce(float32[2, 3], op=sum)": lambda x: dist.all_reduce(x),
    "all_reduce(float32[2, 3], op=max)": lambda x: dist.all_reduce(x, "MAX"),
    "reduce(float32[2, 3], op=avg, root=1)": lambda x: dist.reduce(x, 1, "avg"),
    "broadcast(float32[2, 3], root=0)": lambda x: dist.broadcast(x, 0),
    "barrier()": lambda x: dist.barrier(),
    "all_gather(2 x float32[2, 3])": lambda x: dist.all_gather([x.copy(), x.copy()], x),
    "all_gather(float32[6], float32[9])": lambda x: dist.all_gather(
        [np.zeros(6, "f4"), np.zeros(9, "f4")], np.zeros([6, 9][dist.get_rank()], "f4")
    ),
    "all_gather_into_tensor(2 x float32[2, 3])": lambda x: dist.all_gather_into_tensor(np.zeros((2, 2, 3), "f4"), x),
    "reduce_scatter(2 x float32[2, 3], op=sum)": lambda x: dist.reduce_scatter(x.copy(), [x, x]),
    "reduce_scatter_tensor(2 x float32[2, 3], op=sum)": lambda x: dist.reduce_scatter_tensor(
        x.copy(), np.zeros((4, 3), "f4")
    ),
    "all_to_all_single(float32[2, 3])": lambda x: dist.all_to_all_single(x.copy(), x),
    "all_reduce_coalesced(3 arrays float32[2, 3], float32[5], float32[], op=sum)": lambda x: dist.all_reduce_coalesced(
        [x, np.zeros(5, "f4"), np.zeros((), "f4")]
    ),
    "all_reduce_coalesced(2 x float32[2, 3], op=sum)": lambda x: dist.all_reduce_coalesced([x, x.copy()]),
    "all_reduce_coalesced(1 array float32[2, 3], op=sum)": lambda x: dist.all_reduce_coalesced([x]),
}


def disagree_with(text):
    """Rank 0 makes the call, rank 1 another one that nobody confuses it with."""
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError) as raised:
            CALLS[text](np.zeros((2, 3), "f4"))
    else:
        with pytest.raises(dist.DistBackendError) as raised:
            dist.all_reduce(np.zeros(1, "i1"), "bxor")
    return str(raised.value)


@pytest.mark.parametrize("text", CALLS)
def test_how_a_call_is_shown_to_the_others(text):
    """Names, dtype, elements, op and root: on both ranks, with the lines of both."""
    here = re.escape(os.path.basename(__file__))
    for message in dist.run(disagree_with, 2, (text,), timeout=20):
        assert re.search(rf"rank 0 calls {re.escape(text)} at {here}:\d+", message), message
        assert re.search(rf"rank 1 calls all_reduce\(int8\[1\], op=bxor\) at {here}:\d+", message), message


def same_meaning():
    # What does not change the result is not compared: the two shapes of gathered arrays, spellings, layouts.
    rank = dist.get_rank()
    dist.all_reduce(np.zeros((2, 3)), "sum" if rank else dist.ReduceOp.SUM)
    dist.broadcast(np.zeros(6) if rank else np.zeros((6, 2))[:, 0], **({"src": 1} if rank else {"group_src": 1}))
    dist.all_gather_into_tensor(np.zeros((2, 6) if rank else 12), np.zeros(6))
    dist.barrier()


def test_what_does_not_matter_is_not_compared():
    dist.run(same_meaning, 2, timeout=20)


def test_element_counts_know_the_shapes():
    word = Elements([np.zeros((2, 3))])
    assert (word, word.with_shapes) == ("float64[6]", "float64[2, 3]")
    assert [word.compared(rule) for rule in ShapeRule] == ["float64[6]", "float64[6]", "float64[2, 3]"]
    pair = Elements([np.zeros((2, 3)), np.zeros(())], "2 arrays ", is_elementwise=True)
    assert pair.with_shapes == "2 arrays float64[2, 3], float64[]"
    assert pair.compared(ShapeRule.BY_COLLECTIVE) == "2 arrays float64[2, 3], float64[1]"
    assert pair.compared(ShapeRule.ANY_SHAPE) == "2 arrays float64[6, 1]"


def test_calls_that_disagree_are_listed_by_rank():
    calls = {0: "barrier() at a.py:3", 1: "barrier() at a.py:3", 2: "send()"}
    expected = "the ranks disagree\n  ranks 0, 1 call barrier() at a.py:3\n  rank 2 calls send()"
    assert str(CallCheck(0, range(3)).error(calls)) == expected


def test_methods_have_no_argument_group():
    def main():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        for owner in (mesh, dist.new_group()):
            for call in (partial(owner.all_reduce, np.ones(1)), partial(owner.broadcast, np.ones(1), 0), owner.barrier):
                with pytest.raises(TypeError, match="unexpected keyword argument 'group'"):
                    call(group=mesh)

    dist.run(main, 2)
