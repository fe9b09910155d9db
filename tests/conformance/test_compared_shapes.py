"""Arrays with equal numbers of elements but different shapes.

Reductions and broadcasts compare them, other collectives at debug level DETAIL; messages show them at every level.
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


BY_DEFAULT = {
    "all_reduce": (
        lambda group: group.all_reduce(shaped(np.zeros(6))),
        "all_reduce(float64{}, op=sum)",
    ),
    "reduce": (
        lambda group: group.reduce(shaped(np.zeros(6)), 1, "max"),
        "reduce(float64{}, op=max, root=1)",
    ),
    "broadcast": (
        lambda group: group.broadcast(shaped(np.zeros(6)), 0),
        "broadcast(float64{}, root=0)",
    ),
    "scan": (
        lambda group: group.scan(shaped(np.zeros(6))),
        "scan(float64{}, op=sum)",
    ),
    "all_reduce_coalesced": (
        lambda group: group.all_reduce_coalesced([shaped(np.zeros(6)), np.zeros(2)]),
        "all_reduce_coalesced(2 arrays float64{}, float64[2], op=sum)",
    ),
}


def call_and_meet(call, group):
    """Ranks that only give data may return from the call before the others have come."""
    call(group)
    group.barrier()


def of_other_shapes(name, level):
    call, words = BY_DEFAULT[name]
    with level_of(level):
        one, other = (re.escape(words.replace("{}", str(shape))) for shape in ([2, 3], [3, 2]))
        both = rf"disagree[^\n]*\n  rank 0 call(?:s|ed) {one} .*\n  rank 1 call(?:s|ed) {other} "
        group = dist.new_group()
        with pytest.raises(dist.DistBackendError, match=both):
            call_and_meet(call, group)


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_other_shapes_disagree(worlds, name):
    for backend in ("threads", "gloo"):
        worlds.world(backend, 2).run(of_other_shapes, name, DebugLevel.OFF)
    worlds.world("gloo", 2).run(of_other_shapes, name, DebugLevel.DETAIL)


def of_other_shapes_on_hosts():
    shape = (2, 3) if dist.get_rank() < dist.get_world_size() - 1 else (6,)
    words = r"call all_reduce\(float32\[2, 3\], op=sum\).*\n  rank \d calls all_reduce\(float32\[6\], op=sum\)"
    with pytest.raises(dist.DistBackendError, match=words):
        dist.new_group().all_reduce(np.zeros(shape, "f4"))


def test_other_shapes_disagree_between_hosts(worlds):
    worlds.world("gloo-tcp", 3).run(of_other_shapes_on_hosts)
    worlds.world("gloo-hosts", 4).run(of_other_shapes_on_hosts)


def of_few_elements(shapes, size):
    group = dist.new_group()
    for level in (DebugLevel.OFF, DebugLevel.DETAIL):
        with level_of(level):
            x = np.full(shapes[dist.get_rank()], 1.5)
            assert group.all_reduce(x) is x
            group.broadcast(x, 0)
            cases.same(x.reshape(-1).tolist(), [3.0] * size, "all_reduce and broadcast")
            assert x.shape == shapes[dist.get_rank()]


@pytest.mark.parametrize(("shapes", "size"), [([(), (1,)], 1), ([(1, 1), ()], 1), ([(0, 3), (0,)], 0)])
def test_one_element_or_none_has_any_shape(worlds, shapes, size):
    """There is one way only to match their elements."""
    for backend in ("threads", "gloo"):
        worlds.world(backend, 2).run(of_few_elements, shapes, size)


CALLS = {
    "all_gather_into_tensor": (
        lambda group: group.all_gather_into_tensor(np.zeros((2, *shaped(np.zeros(6)).shape)), shaped(np.zeros(6))),
        "all_gather_into_tensor(2 x float64{}, shapes compared at debug level DETAIL)",
    ),
    "scatter": (
        lambda group: group.scatter(shaped(np.zeros(6)), [np.zeros((2, 3))] * 2 if dist.get_rank() == 0 else None, 0),
        "scatter(float64{}, root=0, shapes compared at debug level DETAIL)",
    ),
}


def of_other_shapes_at_detail(name):
    call, words = CALLS[name]
    group = dist.new_group()
    call(group)  # not compared
    with level_of(DebugLevel.DETAIL):
        one, other = (re.escape(words.replace("{}", str(shape))) for shape in ([2, 3], [3, 2]))
        both = rf"disagree[^\n]*\n  rank 0 call(?:s|ed) {one} .*\n  rank 1 call(?:s|ed) {other} "
        with pytest.raises(dist.DistBackendError, match=both):
            call_and_meet(call, group)


@pytest.mark.parametrize("name", CALLS)
def test_other_shapes_disagree_at_detail(worlds, name):
    for backend in ("threads", "gloo", "gloo-slots"):
        worlds.world(backend, 2).run(of_other_shapes_at_detail, name)


def gathered(group, x):
    whole = np.zeros((group.size(), *x.shape), x.dtype)
    return whole, group.all_gather_into_tensor(whole, x, async_op=True)


def while_the_level_changes():
    rank = dist.get_rank()
    x, flat = shaped(np.full(6, rank)), np.full(6, rank)
    group = dist.new_group()
    dist.barrier()  # as in level_of
    whole, work = gathered(group, x)  # begun as it was called, whenever it is carried out
    with level_of(DebugLevel.DETAIL):
        gathered(group, flat)[1].wait()
        gathered(group, flat.reshape(2, 3))[1].wait()
    work.wait()
    gathered(group, shaped(flat))[1].wait()
    cases.same(whole.reshape(-1, 6)[:, 0].tolist(), list(range(dist.get_world_size())), "all_gather of other shapes")


def test_calls_around_a_change_of_the_level(world_of_several):
    world_of_several.run(while_the_level_changes)


def at_other_levels():
    group = dist.new_group()
    with level_of(DebugLevel.DETAIL if dist.get_rank() == 0 else DebugLevel.OFF):
        group.all_reduce(np.ones((2, 3)))  # they compare the shapes of reductions at every level
        one, other = r"all_gather_into_tensor\(2 x int64\[2, 3\]", r" at .*"
        words = rf"rank 0 calls {one}, shapes compared at debug level DETAIL\){other}\n  rank 1 calls {one}\){other}"
        with pytest.raises(dist.DistBackendError, match=words):
            group.all_gather_into_tensor(np.zeros((4, 3), int), np.zeros((2, 3), int))


def test_ranks_of_other_levels_are_told(worlds):
    worlds.world("gloo", 2).run(at_other_levels)


def shown():
    group = dist.new_group()
    shape = (2, 3) if dist.get_rank() == 0 else (2, 4)
    words = r"all_reduce\(float64\[2, 3\], op=sum\).*\n.*all_reduce\(float64\[2, 4\], op=sum\)"
    with pytest.raises(dist.DistBackendError, match=words):
        group.all_reduce(np.zeros(shape))


def test_a_mismatch_shows_shapes(worlds):
    for backend in ("threads", "gloo"):
        worlds.world(backend, 2).run(shown)
