"""What the pages say about groups: of some ranks, their numbering, and who is outside."""

from datetime import timedelta

import numpy as np
import pytest
from documented import check, place

import meshdist as dist

pytestmark = pytest.mark.timeout(60)


def some_ranks(use_local_synchronization):
    rank, size = place()
    ranks = list(range(1, size))
    group = dist.new_group(ranks, timedelta(seconds=20), "gloo", use_local_synchronization=use_local_synchronization)
    if rank == 0:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        return dist.get_rank(group), dist.get_world_size(group)
    tensor = np.array([rank])
    dist.all_reduce(tensor, group=group)
    found = dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group), tensor.item()
    assert dist.get_process_group_ranks(group) == ranks
    assert [dist.get_group_rank(group, rank) for rank in ranks] == list(range(size - 1))
    assert [dist.get_global_rank(group, place) for place in range(size - 1)] == ranks
    return found


@pytest.mark.parametrize("use_local_synchronization", [False, True])
def test_group_of_some_ranks(initialised, use_local_synchronization):
    size = initialised.size
    members = [(rank - 1, size - 1, "gloo", sum(range(size))) for rank in range(1, size)]
    check(initialised, some_ranks, [(-1, -1), *members], args=(use_local_synchronization,))


def strangers_and_world():
    _, size = place()
    group = dist.new_group([0])
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        with pytest.raises(ValueError, match=str(size - 1)):
            dist.get_group_rank(group, size - 1)
        with pytest.raises(ValueError, match="1"):
            dist.get_global_rank(group, 1)
    assert dist.get_process_group_ranks(None) == list(range(size))
    assert [dist.get_group_rank(dist.group.WORLD, rank) for rank in range(size)] == list(range(size))


def test_ranks_outside_are_refused_and_the_world_is_the_identity(initialised):
    initialised.run(strangers_and_world)


def sub_groups():
    rank, size = place()
    mine, every = dist.new_subgroups(1)
    assert len(every) == size
    tensor = np.array([rank])
    dist.all_reduce(tensor, group=mine)
    pair, _ = dist.new_subgroups_by_enumeration([[0, 1], list(range(2, size))] if size > 2 else [[0, 1]])
    total = np.array([rank])
    dist.all_reduce(total, group=pair)
    return tensor.item(), total.item()


def test_sub_groups(initialised):
    size = initialised.size
    check(initialised, sub_groups, [(rank, 1 if rank < 2 else sum(range(2, size))) for rank in range(size)])
