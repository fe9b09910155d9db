"""How ranks are numbered: the list that all read alike, and the waiting for the last."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest

from meshdist.bootstrap.rank_assignment import Arrival, RankAssignment, number_ranks
from meshdist.errors import DistTimeoutError
from meshdist.store import HashStore
from meshdist.system.deadline import Deadline

pytestmark = pytest.mark.timeout(60)


def arrival(token, rank=-1, world_size=3, host="a"):
    return Arrival(token, rank, world_size, host, f"pid of {token} on {host}")


def roster_of(*entries):
    roster = RankAssignment()
    for entry in entries:
        if isinstance(entry, str):
            roster.leave(entry)
        else:
            roster.arrive(entry)
    return roster


def test_ranks_go_by_arrival():
    assert roster_of(arrival("x"), arrival("y")).ranks == {}
    assert roster_of(arrival("x"), arrival("y"), arrival("z")).ranks == {"x": 0, "y": 1, "z": 2}


def test_who_asks_for_a_rank_has_it_whenever_it_comes():
    for order in permutations([arrival("x", 1), arrival("y"), arrival("z", 0)]):
        assert roster_of(*order).ranks == {"x": 1, "y": 2, "z": 0}


def test_ranks_of_one_host_are_neighbours():
    hosts = ["a", "b", "a", "c", "b", "a"]
    came = [arrival(str(number), world_size=6, host=host) for number, host in enumerate(hosts)]
    assert roster_of(*came).ranks == {"0": 0, "2": 1, "5": 2, "1": 3, "4": 4, "3": 5}


def test_a_rank_of_the_same_number_is_refused_and_the_first_one_taken():
    roster = roster_of(arrival("x", 1), arrival("y", 1), arrival("z"), arrival("w"))
    assert re.search(r"rank 1 has already joined \(pid of x on a\)", roster.refusals["y"])
    assert roster.ranks == {"x": 1, "z": 0, "w": 2}


def test_another_world_size_is_refused():
    roster = roster_of(arrival("x"), arrival("y", world_size=2), arrival("z"))
    assert roster.refusals == {"y": "the other ranks say that the world size is 3, this one says 2"}
    assert not roster.ranks


def test_all_or_none_is_numbered():
    entries = [arrival("x"), arrival("y", world_size=2), arrival("z"), arrival("w")]
    roster = RankAssignment(all_or_none=True)
    for entry in entries:
        roster.arrive(entry)
    assert not roster.ranks
    assert roster.objections == [f"pid of y on a: {roster.refusals['y']}"]
    for entry in ("x", "z", "w"):
        roster.leave(entry)
    for entry in (arrival("x"), arrival("z"), arrival("w")):
        roster.arrive(entry)
    assert len(roster.ranks) == 3


def test_one_too_many_is_refused():
    roster = roster_of(arrival("x"), arrival("y"), arrival("z"), arrival("late"))
    assert re.search(r"the 3 ranks have already joined \(pid of x on a; pid of y .*group_name", roster.refusals["late"])


def test_who_leaves_makes_room_and_changes_nobody_else():
    assert roster_of(arrival("x", 1), "x", arrival("y", 1)).refusals == {}
    roster = roster_of(arrival("x"), arrival("y"), arrival("z"), "y", arrival("new"))
    assert roster.ranks == {"x": 0, "z": 2, "new": 1}
    assert roster_of(arrival("x"), "x", arrival("y", world_size=5)).refusals == {}


def test_what_is_missing_is_said():
    words = roster_of(arrival("x", 2)).shortfall(HashStore(), 3, "by now")
    assert words == "1 of 3 ranks joined by now; ranks 0, 1 are missing: were they started with this store?"
    words = roster_of(arrival("x", 2), arrival("y"), "y").shortfall(HashStore(), 3, "by now")
    assert words == "2 ranks joined by now (pid of x on a, rank 2; pid of y on a); 1 missing"


def test_all_agree_in_threads():
    store = HashStore()
    with ThreadPoolExecutor(4) as pool:
        asked = [-1, 2, -1, 0]
        numbers = list(pool.map(lambda rank: number_ranks(store, rank, 4, Deadline(30.0)), asked))
    assert sorted(numbers) == [0, 1, 2, 3]
    assert (numbers[1], numbers[3]) == (2, 0)


def test_a_refused_one_is_told_at_once_and_the_others_go_on():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(number_ranks, store, 1, 3, Deadline(30.0))
        store.wait(["numbering/arrivals"], 30.0)
        cases = ((1, 3, "rank 1 has already joined"), (-1, 2, "world size is 3, this one says 2"))
        for rank, world_size, words in cases:
            with pytest.raises(ValueError, match=words):
                number_ranks(store, rank, world_size, Deadline(30.0))
        others = [pool.submit(number_ranks, store, -1, 3, Deadline(30.0)) for _ in range(2)]
        assert first.result(timeout=30) == 1
        assert sorted(other.result(timeout=30) for other in others) == [0, 2]


def test_who_gives_up_does_not_count():
    store = HashStore()
    with pytest.raises(DistTimeoutError, match=r"\(2 ranks\): 1 rank joined within 0.1 s \(pid \d+ on .*\); 1 missing"):
        number_ranks(store, -1, 2, Deadline(0.1))
    with pytest.raises(DistTimeoutError, match=r"\(rank 1 of 3\): 1 of 3 ranks joined within 0.1 s; ranks 0, 2 are"):
        number_ranks(HashStore(), 1, 3, Deadline(0.1))
    with ThreadPoolExecutor(2) as pool:
        numbers = list(pool.map(lambda _: number_ranks(store, -1, 2, Deadline(30.0)), range(2)))
    assert sorted(numbers) == [0, 1]


def test_ctrl_c_while_waiting_takes_the_arrival_back():
    store, paused = HashStore(), threading.Event()

    def interrupted():
        paused.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        number_ranks(store, 0, 2, Deadline(30.0), interrupted)
    assert paused.is_set()
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda rank: number_ranks(store, rank, 2, Deadline(30.0)), range(2))) == [0, 1]
