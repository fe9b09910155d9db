"""The names of ranks, groups and calls in messages, and the names by which the ranks of a group find each other."""

import pytest

from meshdist.groups.membership import GroupNames, Membership, listed
from meshdist.groups.non_member import NonMember
from meshdist.lifecycle import is_of_parent
from meshdist.runtime.rank_text import (
    call_process,
    call_rank,
    call_ranks,
    numbers_differ,
    ranks_text,
    same_but_for_rank,
    without_own_rank,
)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([2, 0, 1], "ranks 2, 0, 1"),
        ([0, 1, 2, 3], "ranks 0, 1, 2, 3"),
        ([0, *range(2, 8)], "ranks 0, 2-7"),
        ([*range(17), 18, 19, *range(30, 64)], "ranks 0-16, 18, 19, 30-63"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, and so on, 20 in all"),
    ],
)
def test_many_ranks_are_named_by_runs(ranks, text):
    assert ranks_text(ranks) == text


def test_the_global_rank_is_named_where_it_differs():
    assert not numbers_differ([0, 1, 2])
    assert numbers_differ([0, 2])
    assert call_rank(1, [0, 1, 2]) == "rank 1"
    assert call_rank(1, [0, 2]) == "rank 1 (global rank 2)"
    assert call_process(1, [0, 2], "pid 4711 on node1") == "rank 1 (global rank 2, pid 4711 on node1)"
    assert call_ranks([0, 1], [0, 2, 4]) == "ranks 0, 1 (global ranks 0, 2)"


@pytest.mark.parametrize(
    "text",
    [
        "barrier on group 'world' (rank {0} of 4): they disagree",
        "send on group 'world' (rank {0} of 4, global rank {1}): dst is this rank, {0}, which has posted no receive",
        "halo_exchange on mesh (x=2, y=2) (rank {0}): dim 0 of block is 3 long",
        "DistBackendError: barrier on group 'group {0}' (rank {0} of 2): deadlock: the ranks wait for each other",
    ],
)
def test_the_same_error_of_two_ranks_is_the_same_text(text):
    assert without_own_rank(text.format(0, 4)) == without_own_rank(text.format(1, 13))
    assert same_but_for_rank(text.format(0, 4), 0, text.format(1, 13), 1)


def test_errors_that_differ_in_the_own_rank_alone_are_the_same():
    text = "shard {0} of 8 is missing: /data/shard-{0}.npy has 0 rows"
    assert same_but_for_rank(text.format(0), 0, text.format(3), 3)
    assert not same_but_for_rank(text.format(1), 0, text.format(3), 3)
    assert not same_but_for_rank("the file has 5 rows", 0, "the file has 6 rows", 3)


def test_errors_about_different_ranks_are_different():
    texts = ["all_reduce on group 'a' (rank 0 of 2): rank {0} has ended", "x on group '{0}' (rank 0 of 2): timed out"]
    for text in texts:
        assert without_own_rank(text.format(0)) != without_own_rank(text.format(1))
        assert not same_but_for_rank(text.format(0), 1, text.format(1), 0)


def test_members_are_numbered_in_group_order():
    members = Membership((4, 1), "pair#1", "pair", rank=1)
    assert (members.rank(), members.size(), members.global_rank(0)) == (1, 2, 4)
    assert NonMember().rank() == -1


def test_group_names_count_the_groups_of_the_same_ranks():
    names = GroupNames()
    made = [names.next(ranks, "#") for ranks in ((0, 2), (1, 2), (0, 2))]
    assert made == ["ranks 0,2#1", "ranks 1,2#1", "ranks 0,2#2"]


def test_long_lists_of_ranks_are_shortened():
    assert listed((0, 2)) == "[0, 2]"
    assert listed(tuple(range(100))) == "[0, 1, 2, ..., 99] (100 ranks)"


def test_a_forked_process_is_told_whose_group_it_is():
    expected = "belongs to rank 1 (pid 4711); this process was forked from it and is not a rank"
    assert is_of_parent(1, 4711).partition(". ")[0] == expected
