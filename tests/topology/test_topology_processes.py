"""Topologies of processes: hosts found from what ranks left in the store, and collectives measured."""

import topology_programs as programs
from worlds import WorkerSet, needs_linux

import meshdist

pytestmark = needs_linux


def test_ranks_that_came_in_turns_are_placed_by_host(worlds):
    store = meshdist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with WorkerSet(worlds.nursery, 4, {"MESHDIST_SINGLE_COPY": "0"}) as workers:
        workers.start(programs.join_in_turns, store.port, 4)
        workers.gather()
        workers.start(programs.place)
        mesh, hosts = [[0, 2], [1, 3]], [(0, 2), (1, 3)]
        assert workers.gather() == [(mesh, hosts, 2.0), (mesh, hosts, 4.0)] * 2
    store.close()


def test_calibration_is_the_same_on_all_ranks(worlds):
    found = worlds.world("gloo", 3).run(programs.calibrate, 0.2, 4096)
    kinds, seconds, predicted = found[0]
    assert kinds == [(2,), (3,)]
    assert all(times > 0 for curve in seconds for times in curve)
    assert predicted == seconds[0][-1]
    assert [each[:2] for each in found] == [(kinds, seconds)] * 3
