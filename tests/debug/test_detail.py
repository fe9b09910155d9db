"""Debug level DETAIL compares the order of calls on overlapping groups; records say group and number of a call."""

from __future__ import annotations

import logging
import re
import threading

import numpy as np
import pytest
from worlds import WorkerSet, worker_rank

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
LOGGER = logging.getLogger("meshdist")


@pytest.fixture(autouse=True)
def _untouched(monkeypatch):
    level, handlers = LOGGER.level, list(LOGGER.handlers)
    yield
    LOGGER.setLevel(level)
    LOGGER.handlers[:] = handlers


@pytest.fixture
def detail(monkeypatch):
    monkeypatch.setenv("MESHDIST_DEBUG", "DETAIL")


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture
def kept():
    handler = Kept()
    LOGGER.addHandler(handler)
    yield handler.records
    LOGGER.removeHandler(handler)


def in_orders(orders, ranks=((0, 1), (0, 1))):
    """On each rank, call the two groups in the order that it has; return what that raised."""
    rank = dist.get_rank()
    groups = [
        dist.new_group(list(members), group_desc=name) for members, name in zip(ranks, ("one", "other"), strict=True)
    ]
    try:
        for number in orders[rank]:
            groups[number].all_reduce(np.ones(2))
    except dist.DistBackendError as error:
        return str(error)
    return None


def shared_helper(x):
    dist.all_reduce(x)


def reached_by_two_ways(init_method=None):
    if init_method is not None:
        dist.init_process_group("gloo", init_method, rank=worker_rank(), world_size=2, timeout=30)
    try:
        crossing(first_way if dist.get_rank() == 0 else second_way)
    except dist.DistBackendError as error:
        return str(error)


def crossing(way):
    way(np.ones(2 + dist.get_rank()))


def first_way(x):
    outer_helper(x)


def second_way(x):
    outer_helper(x)


def outer_helper(x):
    inner_helper(x)


def inner_helper(x):
    shared_helper(x)


def lines_of(*functions):
    """Return the line of the one call in each of these functions, as messages name it."""
    return [f"test_detail.py:{function.__code__.co_firstlineno + 1}" for function in functions]


def names_both_ways(text):
    """Return whether the text has the five innermost lines of each side, and no sixth."""
    helper, inner, outer, first, second, fifth = lines_of(
        shared_helper, inner_helper, outer_helper, first_way, second_way, crossing
    )
    ways = re.findall(rf"at {helper}, called from {inner}, {outer}, ({first}|{second}), {fifth}(?!, test)", text)
    return sorted(ways) == sorted([first, second])


def test_a_mismatch_names_the_callers_of_both_sides(detail, worlds):
    assert all(map(names_both_ways, dist.run(reached_by_two_ways, 2, timeout=20)))


def test_a_mismatch_of_processes_names_the_callers_of_both_sides(worlds, tmp_path):
    with WorkerSet(worlds.nursery, 2, {"MESHDIST_DEBUG": "DETAIL"}) as workers:
        workers.start(reached_by_two_ways, f"file://{tmp_path}/store")
        assert all(map(names_both_ways, workers.gather()))


def test_at_other_levels_it_names_the_line_of_the_call(monkeypatch):
    monkeypatch.setenv("MESHDIST_DEBUG", "INFO")
    for text in dist.run(reached_by_two_ways, 2, timeout=20):
        assert lines_of(shared_helper)[0] in text
        assert "called from" not in text


def test_calls_in_one_order_pass(detail):
    assert dist.run(in_orders, 2, ([[0, 1, 1, 0]] * 2,)) == [None, None]


@pytest.mark.parametrize("orders", [[[0, 1], [1, 0]], [[0, 1, 0, 1], [0, 1, 1, 0]]], ids=["at once", "later"])
def test_calls_in_other_orders_are_refused_on_both_ranks(detail, orders):
    reports = dist.run(in_orders, 2, (orders,), timeout=20)
    number = 1 if len(orders[0]) == 2 else 3
    assert None not in reports
    (refused,) = [text for text in reports if ": the ranks call overlapping groups in different orders: " in text[:120]]
    assert f"call {number} on groups " in refused
    assert "all_reduce on 'one' at test_detail.py:" in refused
    assert "all_reduce on 'other' at test_detail.py:" in refused
    assert "make the calls in one order on all ranks" in refused


def test_groups_that_share_one_rank_have_no_order(detail):
    def main():
        rank = dist.get_rank()
        left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
        if rank < 2:
            left.barrier()
        if rank > 0:
            right.barrier()

    dist.run(main, 3, timeout=20)


def test_a_group_may_be_made_later_on_some_ranks(detail):
    def main():
        early = dist.new_group([0, 1], group_desc="early")
        late = dist.new_group([0, 1], group_desc="late") if dist.get_rank() == 0 else None
        early.barrier()
        late = late or dist.new_group([0, 1], group_desc="late")
        late.barrier()
        early.barrier()
        dist.barrier()

    dist.run(main, 2, timeout=20)


def test_nothing_is_compared_at_other_levels(monkeypatch):
    monkeypatch.setenv("MESHDIST_DEBUG", "INFO")

    def main():
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        order = groups if dist.get_rank() == 0 else groups[::-1]
        for work in [group.all_reduce(np.ones(2), async_op=True) for group in order]:
            work.wait()

    dist.run(main, 2, timeout=20)


def test_async_calls_in_other_orders_are_refused(detail):
    def main():
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        order = groups if dist.get_rank() == 0 else groups[::-1]
        for work in [group.all_reduce(np.ones(2), async_op=True) for group in order]:
            work.wait()

    with pytest.raises(dist.DistBackendError, match="different orders"):
        dist.run(main, 2, timeout=20)


def test_the_store_keeps_nothing_of_the_orders(detail):
    sizes = []

    def main():
        group = dist.new_group([0, 1])
        x = np.ones(1)
        for _ in range(3):
            group.all_reduce(x)
            dist.all_reduce(x)
        dist.barrier()
        from meshdist.runtime.context import current_world

        before = current_world().store.num_keys()
        dist.barrier()
        for _ in range(20):
            group.all_reduce(x)
            dist.all_reduce(x)
        dist.barrier()
        sizes.append(current_world().store.num_keys() - before)
        dist.barrier()

    dist.run(main, 2, timeout=20)
    assert max(sizes) <= 4


def test_records_of_calls_have_group_and_number(detail, kept):
    def main():
        group = dist.new_group(group_desc="pair")
        group.barrier()
        group.all_reduce(np.ones(2))
        if dist.get_rank() == 0:
            group.send(np.ones(2), 1)
        else:
            group.recv(np.ones(2), 0)

    dist.run(main, 2, timeout=20)
    found = [
        (record.group, record.sequence, record.getMessage().partition(" on ")[0])
        for record in kept
        if record.levelno == logging.DEBUG and record.rank == 0
    ]
    assert found == [("pair", 1, "barrier"), ("pair", 2, "all_reduce"), ("pair", 1, "send")]
    others = [record for record in kept if "created group" in record.getMessage()]
    assert {(record.group, record.sequence) for record in others} == {(None, None)}


def test_slow_calls_are_logged_at_info(monkeypatch, kept):
    monkeypatch.setenv("MESHDIST_DEBUG", "INFO")
    late = threading.Event()

    def main():
        dist.barrier()
        if dist.get_rank() == 1:
            late.wait(1.5)
        dist.barrier()

    dist.run(main, 2, timeout=100)
    (slow,) = [record for record in kept if "has been waiting for" in record.getMessage()]
    assert slow.getMessage().startswith("barrier on group 'world' (rank 0 of 2): has been waiting for ")
    assert slow.getMessage().endswith(", for rank 1")
    assert (slow.rank, slow.group, slow.sequence, slow.levelno) == (0, "world", 2, logging.INFO)


# ---- check_replicated


def checked(make):
    try:
        dist.check_replicated(make(dist.get_rank()), name="weights")
    except dist.DistBackendError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: np.arange(6.0).reshape(2, 3),
        lambda rank: np.arange(6.0).reshape(2, 3).T,
        lambda rank: np.float32([1.0, np.nan]),
        lambda rank: np.array(7),
        lambda rank: np.zeros((0, 3)),
        lambda rank: np.arange(12)[::2] if rank else np.arange(0, 12, 2),
    ],
    ids=["array", "transposed", "nan", "0-d", "empty", "strided on one"],
)
def test_equal_arrays_pass(make):
    assert dist.run(checked, 3, (make,)) == [None] * 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda rank: np.array([1.0, 0.0 if rank == 1 else 2.0]), "content differs: ranks 0, 2; rank 1"),
        (lambda rank: np.array(-0.0 if rank == 1 else 0.0), "content differs: ranks 0, 2; rank 1"),
        (
            lambda rank: np.zeros(4 - rank // 2),
            "dtype or shape differs: ranks 0, 1 have float64[4]; rank 2 has float64[3]",
        ),
        (
            lambda rank: np.zeros(2, np.float32 if rank else np.float64),
            "dtype or shape differs: rank 0 has float64[2]; ranks 1, 2 have float32[2]",
        ),
    ],
    ids=["content", "sign of zero", "shape", "dtype"],
)
def test_arrays_that_differ_are_told_on_all_ranks(make, words):
    for rank, text in enumerate(dist.run(checked, 3, (make,))):
        where = f"check_replicated on group 'world' (rank {rank} of 3)"
        assert text == f"{where}: weights must be the same on all ranks, and its {words}"


def test_what_is_no_array_is_refused():
    with pytest.raises(TypeError, match=r"check_replicated on group 'world' \(rank 0 of 1\): weights"):
        dist.run(lambda: dist.check_replicated("text", name="weights"), 1)
