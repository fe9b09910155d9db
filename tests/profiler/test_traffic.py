"""The bytes that collectives move, against sums over all ranks of groups on any hosts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdist.collectives.registry import sent_by, sent_bytes
from meshdist.collectives.traffic import Seat

pytestmark = pytest.mark.timeout(60)
hosts_of_groups = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)
S = 2520 * 9  # divides by all numbers of ranks


def sums(collective, hosts, **how):
    sent = [sent_by(collective, S, Seat(rank, hosts), **how) for rank in range(len(hosts))]
    return sum(each.inside for each in sent), sum(each.between for each in sent)


@pytest.mark.parametrize(
    ("collective", "want"),
    [
        ("all_reduce", 1500),
        ("reduce_scatter", 750),
        ("reduce_scatter_tensor", 750),
        ("all_gather", 750),
        ("all_gather_into_tensor", 750),
        ("all_to_all", 750),
        ("all_to_all_single", 750),
        ("gather", 750),
        ("scatter", 750),
        ("broadcast", 1000),
        ("reduce", 1000),
        ("send", 1000),
        ("isend", 1000),
        ("recv", 0),
        ("irecv", 0),
        ("barrier", 0),
    ],
)
def test_standard_costs(collective, want):
    assert sent_bytes(collective, 1000, 4) == want
    assert sent_bytes(collective, 1000, 1) == 0
    assert sent_by(collective, 1000, Seat(0, ["a"]), root=0) == (0, 0)


@pytest.mark.parametrize("function", [lambda: sent_bytes("all_reduc", 1, 2), lambda: sent_by("x", 1, Seat(0, "ab"))])
def test_unknown_collectives_list_the_known(function):
    with pytest.raises(ValueError, match="unknown collective .*; choose from all_gather, .*scatter"):
        function()


@settings(max_examples=200)
@given(hosts_of_groups, st.sampled_from(["all_reduce", "reduce_scatter", "all_gather_into_tensor", "all_to_all"]))
def test_a_rank_sends_the_standard_cost_inside_and_between(hosts, collective):
    for rank in range(len(hosts)):
        assert sum(sent_by(collective, S, Seat(rank, hosts))) == pytest.approx(
            sent_bytes(collective, S, len(hosts)), abs=2
        )


@settings(max_examples=200)
@given(hosts_of_groups)
def test_as_little_as_possible_goes_between_hosts(hosts):
    size, num_hosts = len(hosts), len(set(hosts))
    # Every host must get what the others have, once: of the whole, all but its own part.
    _, between = sums("all_gather", hosts)
    assert between == pytest.approx(S * (num_hosts - 1), abs=size)
    _, between = sums("all_reduce", hosts)
    assert between == pytest.approx(2 * S * (num_hosts - 1), abs=size)


@settings(max_examples=300)
@given(hosts_of_groups, st.integers(0, 8), st.sampled_from(["broadcast", "reduce"]))
def test_a_chain_enters_each_host_once(hosts, root, collective):
    size, num_hosts = len(hosts), len(set(hosts))
    inside, between = sums(collective, hosts, root=root % size)
    assert (inside, between) == (S * (size - num_hosts), S * (num_hosts - 1))


@settings(max_examples=200)
@given(hosts_of_groups, st.integers(0, 8))
def test_gather_and_scatter(hosts, root):
    size, root = len(hosts), root % len(hosts)
    there = hosts.count(hosts[root])
    assert sums("gather", hosts, root=root) == (S * (there - 1), S * (size - there))  # of S bytes of each rank
    part = S // size
    assert sums("scatter", hosts, root=root) == (part * (there - 1), part * (size - there))


def test_parts_of_different_sizes():
    seat = Seat(1, ["a", "b", "b", "a"])
    assert seat.sends([1, 20, 300, 4000]) == (300, 4001)
