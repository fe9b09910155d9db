"""sendrecv, shift and halo_exchange like earlier ones, which the core makes again."""

import sys
import threading

import cases
import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["threads", "gloo", "gloo-tcp"])
def pair(worlds, request):
    return worlds.world(request.param, 2)


def meet(group):
    """Return calls of sendrecv, shift and halo_exchange with the other rank, which return what came from it."""
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    other = 1 - group.rank()
    into, block = np.zeros(2), np.zeros((6, 3))

    def send_and_receive(x):
        assert dist.sendrecv(x, into, group.ranks[other], group.ranks[other], group) == group.ranks[other]
        return into

    def send_and_receive_along_the_mesh(x):
        assert mesh.sendrecv(x, into, other, other) == other
        return into

    def shift(x):
        return mesh.shift(x)

    def shift_into(x):
        assert mesh.shift(x, out=into, periodic=True) is into
        return into

    def exchange_halos(x):
        block[1:-1] = x[0]
        assert mesh.halo_exchange(block, periodic=True) is block
        assert (block[0] == block[-1]).all()
        return block[0, :2]

    return {
        call.__name__: call
        for call in (send_and_receive, send_and_receive_along_the_mesh, shift, shift_into, exchange_halos)
    }


NAMES = ("send_and_receive", "send_and_receive_along_the_mesh", "shift", "shift_into", "exchange_halos")
each_call = pytest.mark.parametrize("name", NAMES)


def again_and_again(name):
    group = dist.new_group([1, 0], sort_ranks=False)
    call = meet(group)[name]
    results = []
    for number in range(8):
        got = call(np.full(2, 10.0 * number + group.rank()))
        cases.same(got.tolist(), [10.0 * number + 1 - group.rank()] * 2, f"{name}, call {number}")
        results.append(got)
    if name == "shift":
        cases.same([got[0] // 10 for got in results], list(range(8)), "each call returns an array of its own")


@each_call
def test_results_of_each_call(pair, name):
    pair.run(again_and_again, name)


def wrong_after_right():
    group = dist.new_group()
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    other, x, into, block = 1 - group.rank(), np.ones(4), np.zeros(4), np.zeros((5, 2))
    calls = {
        "sendrecv": lambda x, into, block: group.sendrecv(x, into, other, other),
        "shift": lambda x, into, block: mesh.shift(x, out=into),
        "halo_exchange": lambda x, into, block: mesh.halo_exchange(block, periodic=True),
    }
    frozen, frozen_block = np.zeros(4), np.zeros((5, 2))
    for array in (frozen, frozen_block):
        array.flags.writeable = False
    for name, call in calls.items():
        for _ in range(5):
            call(x, into, block)
        with pytest.raises(ValueError, match=f"{name} on .*read-only"):
            call(x, frozen, frozen_block)
        if name != "halo_exchange":
            with pytest.raises(ValueError, match=f"{name} on .*memory"):
                call(x, x, block)
        with pytest.raises(TypeError, match=f"{name} on .*str"):
            call("spam", into, "spam")
        call(x, into, block)  # nothing was sent


def test_wrong_arguments_after_right_ones(pair):
    pair.run(wrong_after_right)


def observed(name):
    group = dist.new_group()
    call = meet(group)[name]
    for _ in range(5):
        call(np.ones(2))
    with dist.profile() as profile:
        call(np.ones(2))
    call(np.ones(2))
    return [(event.name, [part.name for part in event.parts]) for event in profile.events]


@each_call
def test_a_profile_that_begins_later_has_the_call(pair, name):
    of = {"exchange_halos": "halo_exchange"}.get(name, "shift" if "shift" in name else "sendrecv")
    messages = ["isend", "irecv"] if of != "halo_exchange" else ["isend", "isend", "irecv", "irecv"]
    assert pair.run(observed, name) == [[(of, messages)]] * 2


def recorded(name):
    group = dist.new_group()
    call = meet(group)[name]
    for _ in range(5):
        call(np.ones(2))
    last = dist.flight_recorder()["records"][-1]
    return last["text"], last["site"], call.__code__.co_firstlineno


@each_call
def test_the_flight_recorder_has_the_line_of_the_user(pair, name):
    for text, site, first_line in pair.run(recorded, name):
        file, _, line = site.rpartition(":")
        assert file.endswith("test_known_exchanges.py"), (text, site)
        assert first_line < int(line) <= first_line + 3, (text, site)


def after_the_end(name, end):
    group = dist.new_group()
    call = meet(group)[name]
    for _ in range(5):
        call(np.ones(2))
    group.barrier()
    if end == "destroyed":
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="destroy"):
            call(np.ones(2))
    elif group.rank() == 0:
        group.abort("no luck")
        with pytest.raises(dist.DistBackendError, match="no luck"):
            call(np.ones(2))
    else:
        with pytest.raises(dist.DistBackendError, match="rank 0 .*no luck"):
            call(np.ones(2))


@each_call
@pytest.mark.parametrize("end", ["destroyed", "aborted"])
def test_after_the_end_of_the_group(pair, name, end):
    pair.run(after_the_end, name, end)


def one_that_waits(name):
    group = dist.new_group(timeout=0.2)
    call = meet(group)[name]
    for _ in range(5):
        call(np.ones(2))
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistTimeoutError):
            call(np.ones(2))
    dist.barrier()


@each_call
def test_a_call_that_the_other_rank_does_not_make_times_out(pair, name):
    pair.run(one_that_waits, name)


def open_ends():
    group = dist.new_group()
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    into = np.full(2, -1.0)
    for number in range(6):
        got, new = mesh.shift(np.full(2, number), periodic=False), mesh.shift(np.full(2, 1.0), 1, False, into)
        if group.rank() == 0:
            cases.same((got, new, into.tolist()), (None, None, [-1, -1]), "nothing before")
        else:
            cases.same((got.tolist(), new is into, into.tolist()), ([number] * 2, True, [1, 1]), "after rank 0")


def test_shifts_with_open_ends(pair):
    pair.run(open_ends)


def no_leaks():
    group = dist.new_group()
    calls = meet(group)
    x = np.ones(2)
    for call in calls.values():
        for _ in range(5):
            call(x)
    before = sys.getrefcount(x)
    for call in calls.values():
        for _ in range(50):
            call(x)
    return sys.getrefcount(x) - before


def test_no_reference_to_the_arrays_is_kept(pair):
    assert pair.run(no_leaks) == [0, 0]


LENGTHS = (1, 6_000, 9_000, 40_000, 100_000, 300_000)


def exchanges_of_all_lengths():
    """Return what was wrong; in every other turn, one of the ranks comes later than the other one waits in the core."""
    group = dist.new_group()
    rank, other = group.rank(), 1 - group.rank()
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    wrong = []
    for length in LENGTHS:
        x, into, block = np.zeros(length), np.zeros(length), np.zeros((4, length))
        for turn in range(8):
            x[:], block[1:-1] = 10 * turn + rank, 10 * turn + rank
            if turn % 4 == 3 * rank and turn > 3:
                threading.Event().wait(0.01)
            group.sendrecv(x, into, other, other)
            wrong += [("sendrecv", length, turn)] * bool((into != 10 * turn + other).any())
            if turn % 4 == 2 - rank:
                threading.Event().wait(0.01)
            mesh.shift(x, periodic=False, out=into)
            x[:] = -1  # it may be changed now
            group.barrier()
            wrong += [("shift", length, turn)] * (rank == 1 and bool((into != 10 * turn).any()))
            mesh.halo_exchange(block, periodic=True)
            wrong += [("halo", length, turn)] * bool((block[[0, -1]] != 10 * turn + other).any())
    return wrong


def test_exchanges_of_all_lengths(pair):
    assert pair.run(exchanges_of_all_lengths) == [[], []]
