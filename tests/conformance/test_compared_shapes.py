"""Arrays with equal numbers of elements but different shapes.

They are compared at debug level DETAIL, and shown in messages at every level.
"""

import contextlib
import logging
import re

import cases
import numpy as np
import pytest

import meshdist as dist
from meshdist import DebugLevel

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _untouched():
    logger = logging.getLogger("meshdist")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@contextlib.contextmanager
def level_of(level):
    dist.barrier()  # threads that join find the level of the process, whoever has set it
    dist.set_debug_level(level)
    try:
        yield
    finally:
        dist.set_debug_level(DebugLevel.OFF)


def shaped(array):
    return array.reshape(2, 3) if dist.get_rank() == 0 else array.reshape(3, 2)


CALLS = {
    "all_reduce": (
        lambda group: group.all_reduce(shaped(np.zeros(6))),
        "all_reduce(float64[6, shape {}], op=sum, shapes compared at debug level DETAIL)",
    ),
    "broadcast": (
        lambda group: group.broadcast(shaped(np.zeros(6)), 0),
        "broadcast(float64[6, shape {}], root=0, shapes compared at debug level DETAIL)",
    ),
    "all_gather_into_tensor": (
        lambda group: group.all_gather_into_tensor(np.zeros((2, *shaped(np.zeros(6)).shape)), shaped(np.zeros(6))),
        "all_gather_into_tensor(2 x float64[6, shape {}], shapes compared at debug level DETAIL)",
    ),
    "all_reduce_coalesced": (
        lambda group: group.all_reduce_coalesced([shaped(np.zeros(6)), np.zeros(2)]),
        "all_reduce_coalesced(2 arrays float64[6, 2, shapes {}, (2,)], op=sum, shapes compared at debug level DETAIL)",
    ),
}


def of_other_shapes(name):
    call, words = CALLS[name]
    group = dist.new_group()
    call(group)  # not compared
    with level_of(DebugLevel.DETAIL):
        one, other = (re.escape(words.replace("{}", str(shape))) for shape in ((2, 3), (3, 2)))
        both = rf"disagree: rank 0 calls {one} at .*; rank 1 calls {other} at"
        with pytest.raises(dist.DistBackendError, match=both):
            call(group)


@pytest.mark.parametrize("name", CALLS)
def test_other_shapes_disagree_at_detail(worlds, name):
    for backend in ("threads", "gloo", "gloo-slots"):
        worlds.world(backend, 2).run(of_other_shapes, name)


def while_the_level_changes():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    x, flat = shaped(np.full(6, rank)), np.full(6, rank)
    dist.barrier()  # as in level_of
    work = group.all_reduce(x, async_op=True)  # begun as it was called, whenever it is carried out
    with level_of(DebugLevel.DETAIL):
        group.all_reduce(flat)
        group.all_reduce(flat.reshape(2, 3))
    work.wait()
    group.all_reduce(shaped(flat))
    cases.same(set(x.flat), {sum(range(size))}, "all_reduce of other shapes")


def test_calls_around_a_change_of_the_level(world_of_several):
    world_of_several.run(while_the_level_changes)


def at_other_levels():
    group = dist.new_group()
    with level_of(DebugLevel.DETAIL if dist.get_rank() == 0 else DebugLevel.OFF):
        group.all_reduce(np.ones(2))
        one, other = r"all_reduce\(int64\[6, shape \(2, 3\)\], op=sum", r" at [^;]*"
        words = rf"rank 0 calls {one}, shapes compared at debug level DETAIL\){other}; rank 1 calls {one}\){other}"
        with pytest.raises(dist.DistBackendError, match=words):
            group.all_reduce(np.zeros((2, 3), int))


def test_ranks_of_other_levels_are_told(worlds):
    worlds.world("gloo", 2).run(at_other_levels)


def shown():
    group = dist.new_group()
    shape = (2, 3) if dist.get_rank() == 0 else (2, 4)
    words = r"all_reduce\(float64\[6, shape \(2, 3\)\], op=sum\).*all_reduce\(float64\[8, shape \(2, 4\)\], op=sum\)"
    with pytest.raises(dist.DistBackendError, match=words):
        group.all_reduce(np.zeros(shape))


def test_a_mismatch_shows_shapes(worlds):
    for backend in ("threads", "gloo"):
        worlds.world(backend, 2).run(shown)
