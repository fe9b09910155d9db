"""Slices that differ between ranks: the ranks are told of the circle, or where the missing ranks wait."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from worlds import needs_linux

import meshdist
from meshdist.backends.group_setup import SetUpWait
from meshdist.device_mesh import init_device_mesh
from meshdist.runtime.waiting import Waitable
from meshdist.store import HashStore
from meshdist.system.deadline import Deadline

TIMEOUT_S = 30.0


def crossing():
    """On 4 ranks: rank 0 calls on the transposed mesh, the others on the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if meshdist.get_rank() == 0:
        mesh = mesh.transpose()
    with pytest.raises(meshdist.DistError) as error:
        mesh.all_reduce(np.ones(1))
    return str(error.value)


def check_reports(reports):
    for words in reports:
        assert "the ranks wait for each other, and none can go on: rank 0 waits for rank" in words
        assert "call 1 on 'tp,dp'" in words
        assert "call 1 on 'world'" in words


def test_ranks_that_wait_for_each_other_in_two_groups():
    raised = threading.Barrier(4)

    def program():
        words = crossing()
        raised.wait(30)  # a rank that has ended is what the others would hear of
        return words

    check_reports(meshdist.run(program, 4, timeout=TIMEOUT_S))


@needs_linux
def test_processes_that_wait_for_each_other_in_two_groups(worlds):
    from worlds import WorkerSet

    with WorkerSet(worlds.nursery, 4, timeout_s=TIMEOUT_S) as workers:
        workers.join()
        workers.start(crossing)
        check_reports(workers.gather())


class Peer(Waitable):
    """A peer that has not come before `is_there`."""

    is_there = False

    def ready(self):
        return self.is_there

    def check(self):
        return

    def arm(self, bell):
        return

    def disarm(self, bell):
        return

    def missing(self):
        return "rank 5"


def test_the_order_of_the_ranks_is_blamed_where_it_differs_alone():
    store, deadline = HashStore(), Deadline(30)
    wait = SetUpWait(Peer(), SimpleNamespace(world_store=store, name="a#1", label="a", rank=0, ranks=(3, 5)))
    while store.num_keys() == 0:
        assert not deadline.expired()
        wait.check()
    for ranks, is_told in (((3, 5), False), ((5, 3), True), ((5, 3, 1), False)):
        words = SetUpWait(
            Peer(), SimpleNamespace(world_store=store, name="b#1", label="b", rank=0, ranks=ranks)
        ).missing()
        assert "waited meanwhile in the first call on group 'a' (ranks 3, 5)" in words
        assert ("different order" in words) == is_told


def test_word_is_taken_back_when_the_peer_has_come():
    store, peer = HashStore(), Peer()
    mine = SimpleNamespace(world_store=store, name="pair#1", label="pair", rank=1, ranks=(5, 3))
    theirs = SimpleNamespace(world_store=store, name="pair#2", label="other", rank=0, ranks=(3, 5))
    wait, deadline = SetUpWait(peer, mine), Deadline(30)
    wait.check()
    assert store.num_keys() == 0
    while store.num_keys() == 0:
        assert not deadline.expired()
        wait.check()
    assert SetUpWait(peer, mine).missing() == "rank 5"
    words = SetUpWait(peer, theirs).missing()
    assert words.startswith(
        "rank 5; rank 0 (global rank 3) waited meanwhile in the first call on group 'pair' (ranks 5, 3), and groups"
    )
    peer.is_there = True
    assert wait.ready()
    assert store.num_keys() == 0
