"""The end of a group: of a block, before its first call, on a rank that is not in it, and what new_group takes."""

import sys
import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER
# What a rank that is told may take; the timeout of the groups is far longer.
TOLD_S = 3.0


def on_3_ranks(program, *args):
    return dist.run(program, 3, args, timeout=20)


def sum_of(value, group=None):
    return int(dist.all_reduce(np.array(value), group=group))


# ---- A group as a context


def block():
    before = dist.get_pg_count()
    with dist.new_group([0, 2], group_desc="block") as group:
        if group is NON_MEMBER:
            return None
        assert dist.get_pg_count() == before + 1
        total = sum_of(1, group)
    assert dist.get_pg_count() == before
    with pytest.raises(ValueError, match="'block' has been destroyed"):
        group.barrier()
    return total


def test_a_block_destroys_its_group(world_of_3):
    assert world_of_3.run(block) == [2, None, 2]


def destroyed_inside():
    with dist.new_group() as group:
        dist.destroy_process_group(group)
    with dist.new_group() as group:
        group.barrier()
        new = dist.shrink_group([2], group) if dist.get_rank() < 2 else None
    return sum_of(1, new) if new else None


def test_the_group_of_a_block_may_be_destroyed_or_shrunk_inside():
    assert on_3_ranks(destroyed_inside) == [2, 2, None]


def destroyed_as_a_call_begins():
    """By another thread: what happens then is put between the two steps of this one."""
    group = dist.new_group()
    group.barrier()
    cls, looks = type(group), [1, 2]
    check_usable = cls.check_usable

    def usable_and_destroyed(self, *args):
        check_usable(self, *args)
        if looks.pop() == 1:
            cls.check_usable = check_usable
            dist.destroy_process_group(group)

    cls.check_usable = usable_and_destroyed
    try:
        with pytest.raises(dist.DistBackendError, match=r"all_gather on group .* was destroyed, by another thread"):
            group.all_gather([np.ones(2), np.ones(2)], np.ones(2))
    finally:
        cls.check_usable = check_usable


@pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")
def test_a_call_that_begins_as_another_thread_destroys_its_group_is_told(worlds):
    worlds.world("gloo", 2).run(destroyed_as_a_call_begins)


def raise_inside(met):
    group = dist.new_group(group_desc="block")
    if met:
        group.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(KeyError), group:
            raise KeyError("what went wrong")
        return "raised"
    began_s = time.monotonic()
    with (
        pytest.raises(dist.DistBackendError, match="'block'.*rank 1.*left the block.*KeyError: 'what went wrong'"),
        group,
    ):
        sum_of(1, group)
    assert time.monotonic() - began_s < TOLD_S
    return "told"


@pytest.mark.parametrize("met", [True, False], ids=["after a call", "in the first call"])
def test_who_waits_for_a_rank_whose_block_raised_is_told(world_of_3, met):
    assert world_of_3.run(raise_inside, met) == ["told", "raised", "told"]


def block_of_the_world():
    with dist.group.WORLD as world:
        total = sum_of(1, world)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="init_process_group"):
        dist.barrier()
    return total


def test_a_block_of_the_world_ends_it():
    assert on_3_ranks(block_of_the_world) == [3, 3, 3]


# ---- Before the first call


def give_up(group):
    group.abort("tired of it")


def send_long(group):
    group.send(np.zeros(60_000), 2)  # threads have room for everything
    group.recv(np.zeros(1), 2)


WAYS = {
    "destroyed": (dist.destroy_process_group, "has destroyed the group"),
    "aborted": (dist.abort_process_group, "failed: rank 2 called abort_process_group"),
    "given up": (give_up, "failed: tired of it"),
}
WAITS = {
    "all_reduce": partial(sum_of, 1),
    "recv": lambda group: group.recv(np.zeros(1), 2),
    "send": send_long,
}


def leave_unused(way, wait):
    (how, why), wait_in = WAYS[way], WAITS[wait]
    group = dist.new_group(group_desc="unused")
    if dist.get_rank() == 2:
        how(group)
        return None
    began_s = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=f"'unused'.*rank 2.*{why}") as raised:
        wait_in(group)
    assert raised.value.peer_failed
    assert time.monotonic() - began_s < TOLD_S
    return "told"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wait", WAITS)
def test_who_makes_the_first_call_of_a_group_that_one_rank_gave_up_is_told(world_of_3, way, wait):
    assert world_of_3.run(leave_unused, way, wait) == ["told", "told", None]


def abort_after_a_timeout(all_told):
    one, other = dist.new_group([0, 2], timeout=0.3, group_desc="one"), dist.new_group([1, 2], group_desc="other")
    rank = dist.get_rank()
    if rank == 2:
        try:
            one.barrier()
        except dist.DistTimeoutError:
            dist.abort_process_group()
    elif rank == 1:
        words = (
            r"'other'.*rank 2\) failed: it raised DistTimeoutError: barrier on group 'one' .*: timed out after 0.3 s"
        )
        with pytest.raises(dist.DistBackendError, match=words):
            other.barrier()
    all_told.wait(20)


def test_an_abort_after_a_timeout_says_that_it_timed_out():
    on_3_ranks(abort_after_a_timeout, threading.Barrier(3))


def leave_the_world(all_told):
    group = dist.new_group(group_desc="unused")
    if dist.get_rank() == 2:
        dist.destroy_process_group()
        all_told.wait(20)
        return None
    with pytest.raises(dist.DistBackendError, match="'unused'.*rank 2 called destroy_process_group"):
        sum_of(1, group)
    all_told.wait(20)
    return "told"


def test_who_makes_the_first_call_of_a_group_with_a_rank_that_left_the_world_is_told():
    assert on_3_ranks(leave_the_world, threading.Barrier(3)) == ["told", "told", None]


# ---- Aborted by another thread


def abort_from_a_thread():
    group = dist.new_group(group_desc="watched")
    group.barrier()
    if dist.get_rank() == 1:
        return None  # it never calls again
    work = group.all_reduce(np.ones(3), async_op=True)
    dist.abort_process_group(group)
    with pytest.raises(dist.DistBackendError, match="abort_process_group"):
        work.wait(TOLD_S)
    return "ended"


def test_an_abort_ends_what_this_rank_waits_for(world_of_3):
    assert world_of_3.run(abort_from_a_thread) == ["ended", None, "ended"]


# ---- Ranks that are not in it


def outside():
    for call in (dist.destroy_process_group, dist.abort_process_group):
        call(NON_MEMBER)
    with NON_MEMBER as group:
        assert group is NON_MEMBER
    assert dist.is_initialized()


def test_the_end_of_a_group_that_this_rank_is_not_in():
    on_3_ranks(outside)
    dist.destroy_process_group(NON_MEMBER)  # torch's scripts do so after the end of the world as well
    assert not dist.is_initialized()


# ---- Before its messages are received


def received_after_the_end(src):
    """The memory that rank 0 makes in between would get the number of a descriptor that it has closed."""
    group, x = dist.new_group(), np.zeros(2)
    if dist.get_rank() == 0:
        group.send(np.array([1.0, 2.0]), 1)
        dist.destroy_process_group(group)
        later = dist.new_group()
        later.send(np.array([3.0, 4.0]), 1)
        dist.send(x, 1)
    elif dist.get_rank() == 1:
        later = dist.new_group()
        dist.recv(x, 0)  # rank 0 has destroyed the first group
        assert group.recv(x, src) == 0
        assert x.tolist() == [1, 2]
        later.recv(x, 0)
        assert x.tolist() == [3, 4]
        dist.destroy_process_group(group)
    else:
        later = dist.new_group()
    dist.destroy_process_group(later)


@pytest.mark.parametrize("src", [0, None], ids=["named", "any"])
def test_what_was_sent_before_the_end_of_a_group_is_received_after_it(world_of_several, src):
    world_of_several.run(received_after_the_end, src)


# ---- What new_group takes


def descriptions():
    named, other = (
        dist.new_group(group_desc="tensor"),
        dist.new_group(None, None, None, None, True, "data", None, False),
    )
    assert (named.group_desc, other.group_desc) == ("tensor", "data")
    assert dist.new_group().group_desc
    assert named.group_name == named.name
    assert dist.group.WORLD is dist.GroupMember.WORLD
    # Descriptions are for people: ranks may have their own.
    own = dist.new_group(group_desc=f"as rank {dist.get_rank()} calls it")
    return sum_of(1, own)


def test_descriptions():
    assert on_3_ranks(descriptions) == [3, 3, 3]


def counts():
    assert dist.get_pg_count() == 1
    one, all_ranks = dist.new_group([1]), dist.new_group()
    assert dist.get_pg_count() == (3 if dist.get_rank() == 1 else 2)
    for group in (one, all_ranks):
        dist.destroy_process_group(group)
    return dist.get_pg_count()


def test_groups_are_counted():
    assert on_3_ranks(counts) == [1, 1, 1]


def takes_options():
    group = dist.new_group(
        timeout=timedelta(seconds=7), backend="THREADS", pg_options={"fast": True}, device_id="cuda:1"
    )
    assert (group.timeout_s, group.backend_name, group.pg_options) == (7.0, "threads", {"fast": True})
    assert group.device_id == "cuda:1"
    part = dist.split_group(group, [[0, 1, 2]])
    assert (part.timeout_s, part.pg_options, part.device_id) == (7.0, {"fast": True}, "cuda:1")
    for device in ("cpu", "cuda", 0, SimpleNamespace(type="cuda", index=0), None):
        assert dist.new_group(device_id=device).device_id == device


def test_options_are_kept():
    on_3_ranks(takes_options)


WRONG_OPTIONS = {
    "backend": ({"backend": "fast"}, ValueError, "unknown backend 'fast'; choose from .*gloo"),
    "backend type": ({"backend": 3}, TypeError, "backend must be"),
    "timeout": ({"timeout": -1}, ValueError, "timeout must not be negative"),
    "timeout type": ({"timeout": "1"}, TypeError, "timeout must be a timedelta or a number"),
    "group_desc": ({"group_desc": 3}, TypeError, "new_group: group_desc must be a string, got 3"),
    "device_id": ({"device_id": "gpu:0"}, ValueError, "new_group: device_id must be .*'cuda:<index>', got 'gpu:0'"),
    "device index": ({"device_id": -1}, ValueError, "new_group: device_id must be .*got -1"),
    "device number": ({"device_id": "cuda:x"}, ValueError, "new_group: device_id must be .*got 'cuda:x'"),
    "device type": ({"device_id": 0.5}, TypeError, "new_group: device_id must be a device.*got 0.5"),
}


def refuse(name):
    options, kind, words = WRONG_OPTIONS[name]
    for ranks in (None, [0], [1, 2]):
        with pytest.raises(kind, match=words):
            dist.new_group(ranks, **options)
    assert dist.get_pg_count() == 1
    return sum_of(1, dist.new_group())


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options_on_members_and_others(name):
    assert on_3_ranks(refuse, name) == [3, 3, 3]


def after_the_world():
    world = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="init_process_group"):
        dist.new_group()
    with pytest.raises((ValueError, dist.DistBackendError), match="destroyed"):
        world.all_reduce(np.array(1))


def test_no_group_is_made_after_the_world():
    on_3_ranks(after_the_world)
