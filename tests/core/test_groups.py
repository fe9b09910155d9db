"""new_group and the questions about ranks and groups."""

import os
import warnings

import numpy as np
import pytest

import meshdist as dist
from meshdist import functional

pytestmark = pytest.mark.timeout(60)
NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


def on_4_ranks(program, *args):
    return dist.run(program, 4, args, timeout=20)


# ---- new_group


WRONG_RANKS = {
    "none": ([], ValueError, r"new_group: ranks must be a non-empty list without duplicates, got \[\]"),
    "twice": ([0, 1, 0], ValueError, r"new_group: ranks must be a non-empty list without duplicates, got \[0, 1, 0\]"),
    "too high": ([0, 4], ValueError, "new_group: ranks must be 0 to 3, got 4"),
    "negative": ([-1, 0], ValueError, "new_group: ranks must be 0 to 3, got -1"),
    "fraction": ([0.5, 1], TypeError, "new_group: ranks must be .*integers.*0.5"),
    "text": (["a"], TypeError, "new_group: ranks must be .*integers.*'a'"),
    "a number": (3, TypeError, "new_group: ranks must be .*3"),
}


def refuse_ranks(name):
    ranks, kind, words = WRONG_RANKS[name]
    with pytest.raises(kind, match=words):
        dist.new_group(ranks)


@pytest.mark.parametrize("name", WRONG_RANKS)
def test_wrong_ranks_on_members_and_others(name):
    on_4_ranks(refuse_ranks, name)


def refuse_options():
    with pytest.raises(ValueError, match="unknown backend 'fast'; choose from .*gloo"):
        dist.new_group([0, 1], backend="fast")
    with pytest.raises(ValueError, match="timeout must not be negative"):
        dist.new_group([dist.get_rank()], timeout=-1)
    with pytest.raises(TypeError, match="timeout must be a timedelta or a number"):
        dist.new_group([dist.get_rank()], timeout="1")


def test_wrong_options():
    on_4_ranks(refuse_options)


def orders():
    rank = dist.get_rank()
    sorted_group, kept = dist.new_group([3, 0, 2]), dist.new_group([3, 0, 2], sort_ranks=False)
    if rank == 1:
        return sorted_group is NON_MEMBER, kept is NON_MEMBER
    return sorted_group.ranks, sorted_group.rank(), kept.ranks, kept.rank()


def test_ranks_are_sorted_unless_told_not_to():
    assert on_4_ranks(orders) == [
        ((0, 2, 3), 0, (3, 0, 2), 1),
        (True, True),
        ((0, 2, 3), 1, (3, 0, 2), 2),
        ((0, 2, 3), 2, (3, 0, 2), 0),
    ]


def any_sequence():
    for ranks in ((0, 1, 2, 3), range(4), np.arange(4), [np.int64(rank) for rank in range(4)], None):
        group = dist.new_group(ranks)
        assert group.ranks == (0, 1, 2, 3)
        assert all(type(rank) is int for rank in group.ranks)


def test_ranks_are_any_sequence_of_integers():
    on_4_ranks(any_sequence)


def names():
    group, other = dist.new_group(), dist.new_group()
    described = dist.new_group(group_desc="the pipeline")
    assert len({group.name, other.name, described.name}) == 3
    assert described.label == "the pipeline"
    assert "the pipeline" in repr(described)
    return group.name, other.name, described.name


def test_groups_have_the_same_name_on_all_ranks():
    assert len(set(on_4_ranks(names))) == 1


# ---- Questions


def questions():
    rank, group = dist.get_rank(), dist.new_group([1, 3])
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, 4, "threads")
    assert dist.get_process_group_ranks() == [0, 1, 2, 3]
    assert dist.group.WORLD.ranks == (0, 1, 2, 3)
    if rank not in (1, 3):
        return dist.get_rank(group), dist.get_world_size(group)
    assert dist.get_process_group_ranks(group) == [1, 3]
    assert dist.get_backend(group) == "threads"
    assert [dist.get_group_rank(group, member) for member in (1, 3)] == [0, 1]
    assert [dist.get_global_rank(group, place) for place in (0, 1)] == [1, 3]
    for ask, wrong, words in (
        (dist.get_group_rank, 0, r"\[1, 3\]; got 0"),
        (dist.get_group_rank, -1, r"\[1, 3\]; got -1"),
        (dist.get_global_rank, 2, "0 to 1, got 2"),
        (dist.get_global_rank, -1, "0 to 1, got -1"),
    ):
        with pytest.raises(ValueError, match=words) as raised:
            ask(group, wrong)
        assert isinstance(raised.value, RuntimeError)
        assert "group_group" not in str(raised.value)
        assert group.label in str(raised.value)
    return dist.get_rank(group), dist.get_world_size(group)


def test_questions_about_groups():
    assert on_4_ranks(questions) == [(-1, -1), (0, 2), (-1, -1), (1, 2)]


def test_node_local_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert dist.get_node_local_rank() == 3
    assert dist.get_node_local_rank(7) == 3
    monkeypatch.delenv("LOCAL_RANK")
    assert dist.get_node_local_rank(7) == 7
    with pytest.raises(
        RuntimeError,
        match="LOCAL_RANK is not set; start the script with a launcher such as meshrun, or pass fallback_rank",
    ):
        dist.get_node_local_rank()


# ---- Ranks outside


OUTSIDE = {
    "all_reduce": lambda x, group: dist.all_reduce(x, group=group),
    "broadcast": lambda x, group: dist.broadcast(x, 0, group=group),
    "reduce": lambda x, group: dist.reduce(x, 0, group=group),
    "all_gather": lambda x, group: dist.all_gather([x], x, group=group),
    "all_gather_into_tensor": lambda x, group: dist.all_gather_into_tensor(x, x, group=group),
    "reduce_scatter": lambda x, group: dist.reduce_scatter(x, [x], group=group),
    "reduce_scatter_tensor": lambda x, group: dist.reduce_scatter_tensor(x, x, group=group),
    "all_to_all_single": lambda x, group: dist.all_to_all_single(x, x, group=group),
    "barrier": lambda x, group: dist.barrier(group),
    "send": lambda x, group: dist.send(x, 0, group=group),
    "recv": lambda x, group: dist.recv(x, 0, group=group),
    "isend": lambda x, group: dist.isend(x, 0, group=group),
    "irecv": lambda x, group: dist.irecv(x, 0, group=group),
    "gather": lambda x, group: dist.gather(x, None, 0, group),
    "scatter": lambda x, group: dist.scatter(x, None, 0, group),
    "all_to_all": lambda x, group: dist.all_to_all([x], [x], group),
    "all_gather_coalesced": lambda x, group: dist.all_gather_coalesced([[x]], [x], group),
    "all_reduce_coalesced": lambda x, group: dist.all_reduce_coalesced([x], group=group),
    "monitored_barrier": lambda x, group: dist.monitored_barrier(group),
    "all_reduce_multigpu": lambda x, group: dist.all_reduce_multigpu([x], group=group),
    "broadcast_object_list": lambda x, group: dist.broadcast_object_list([x], 0, group),
    "all_gather_object": lambda x, group: dist.all_gather_object([x], x, group),
    "gather_object": lambda x, group: dist.gather_object(x, None, 0, group),
    "scatter_object_list": lambda x, group: dist.scatter_object_list([None], None, 0, group),
    "send_object_list": lambda x, group: dist.send_object_list([x], 0, group),
    "recv_object_list": lambda x, group: dist.recv_object_list([x], 0, group),
    "send_object": lambda x, group: dist.send_object(x, 0, group),
    "recv_object": lambda x, group: dist.recv_object(0, group),
    "sendrecv_object": lambda x, group: dist.sendrecv_object(x, 0, 0, group),
    "isend_object_list": lambda x, group: dist.isend_object_list([x], 0, group),
    "irecv_object_list": lambda x, group: dist.irecv_object_list(0, group),
}
METHOD_ARGUMENTS = {
    **dict.fromkeys(("send", "recv", "isend", "irecv", "broadcast", "reduce"), lambda x: (x, 0)),
    **dict.fromkeys(("barrier", "monitored_barrier"), lambda x: ()),
    **dict.fromkeys(("gather", "scatter", "gather_object"), lambda x: (x, None, 0)),
    **dict.fromkeys(("send_object_list", "recv_object_list", "broadcast_object_list"), lambda x: ([x], 0)),
    "isend_object_list": lambda x: ([x], 0),
    **dict.fromkeys(("irecv_object_list", "recv_object"), lambda x: (0,)),
    "send_object": lambda x: (x, 0),
    "sendrecv_object": lambda x: (x, 0, 0),
    **dict.fromkeys(("all_reduce_coalesced", "all_reduce_multigpu"), lambda x: ([x],)),
    "all_to_all": lambda x: ([x], [x]),
    "all_gather_coalesced": lambda x: ([[x]], [x]),
    "all_gather_object": lambda x: ([x], x),
    "scatter_object_list": lambda x: ([None], None, 0),
}


def call_from_outside(name):
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return None
    x = np.ones(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        OUTSIDE[name](x, group)
        work = getattr(group, name)(*METHOD_ARGUMENTS.get(name, lambda x: (x, x))(x))
    assert x.tolist() == [1.0] * 4
    assert work in (None, -1)
    return [(str(warning.message), os.path.basename(warning.filename)) for warning in caught]


@pytest.mark.parametrize("name", OUTSIDE)
def test_calls_from_outside_warn_and_do_nothing(name):
    """As function and as method; the warning points at the user's line."""
    said = f"{name} on a group that this rank is not in does nothing", os.path.basename(__file__)
    # One rank outside: threads share the filters of warnings.
    assert dist.run(call_from_outside, 2, (name,), timeout=20) == [None, [said, said]]


def reduce_from_outside():
    group = dist.new_group([0])
    x = np.ones((5 << 20) // 8)  # so long that members of larger groups reduce into another array
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return functional.all_reduce(x, group=group).tolist() == x.tolist()


def split_from_outside():
    group = dist.new_group([0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            call(np.ones((2, 3)), group=group, axis=1).shape
            for call in (functional.reduce_scatter, functional.reduce_scatter_tensor, functional.all_to_all)
        ]


def test_a_functional_call_from_outside_that_splits_an_array_returns_one_block():
    assert dist.run(split_from_outside, 2, timeout=20) == [[(2, 3)] * 3] * 2


def test_a_functional_call_from_outside_returns_a_copy():
    assert dist.run(reduce_from_outside, 2, timeout=20) == [True, True]


def ask_from_outside():
    assert (NON_MEMBER.rank(), NON_MEMBER.size()) == (-1, -1)
    assert not NON_MEMBER
    assert dist.new_group([2]) if dist.get_rank() == 2 else not dist.new_group([2])
    for ask in (
        lambda: dist.get_group_rank(NON_MEMBER, 0),
        lambda: dist.get_global_rank(NON_MEMBER, 0),
        lambda: dist.get_backend(NON_MEMBER),
    ):
        with pytest.raises(ValueError, match="not a member"):
            ask()
    dist.destroy_process_group(NON_MEMBER)  # nothing to do
    assert dist.is_initialized()


def test_questions_from_outside():
    on_4_ranks(ask_from_outside)


# ---- The end of a group


def destroy_one():
    group = dist.new_group(group_desc="short-lived")
    group.barrier()
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match=r"group 'short-lived' .*: group 'short-lived' has been destroyed; create"):
        group.barrier()
    with pytest.raises(ValueError, match="'short-lived'.*destroyed"):
        dist.destroy_process_group(group)
    dist.barrier()
    again = dist.new_group(group_desc="the next")
    assert again.name != group.name
    return int(again.all_reduce(np.array(1)))


def test_a_destroyed_group(world_of_3):
    assert world_of_3.run(destroy_one) == [3, 3, 3]


def leave_early():
    group = dist.new_group(group_desc="left early")
    group.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
        return "left"
    with pytest.raises(
        dist.DistBackendError, match="all_reduce on group 'left early'.*rank 1.*destroyed the group"
    ) as raised:
        group.all_reduce(np.zeros(3))
    assert raised.value.peer_failed
    with pytest.raises(dist.DistBackendError, match="after an earlier failure.*rank 1.*destroyed the group"):
        group.barrier()
    return "noticed"


def test_who_waits_for_a_rank_that_destroyed_the_group_is_told(world_of_3):
    assert world_of_3.run(leave_early) == ["noticed", "left", "noticed"]


def abort_one():
    group = dist.new_group(group_desc="given up")
    group.barrier()
    if dist.get_rank() == 1:
        dist.abort_process_group(group)
    with pytest.raises(dist.DistBackendError, match="'given up'.*rank 1 called abort_process_group"):
        group.all_reduce(np.zeros(3))


def test_an_aborted_group(world_of_3):
    world_of_3.run(abort_one)
