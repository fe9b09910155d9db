"""wait_any: which of several async calls has ended."""

import threading

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
PLACES = pytest.mark.parametrize("backend", ["gloo", "gloo-tcp", "threads", "mpi-openmpi"])


def in_the_order_of_the_senders(num_bytes):
    """Rank 0 takes the messages of ranks 2 and 1, which rank 1 sends after rank 0 has taken that of rank 2."""
    rank, go = dist.get_rank(), np.zeros(1)
    for _ in range(4):  # the core makes later receives
        if rank == 0:
            rooms = [np.zeros(num_bytes, np.uint8) for _ in range(2)]
            works = [dist.irecv(room, src) for src, room in enumerate(rooms, 1)]
            assert dist.wait_any(works) == 1
            assert works[1].is_completed()
            assert works[1].wait()
            assert rooms[1][-1] == 2
            assert works[1].source_rank() == 2
            dist.send(go, 1)
            assert dist.wait_any(works[:1]) == 0
            assert dist.wait_any(works) == 0
            assert rooms[0][-1] == 1
            works[0].wait()
        else:
            if rank == 1:
                dist.recv(go, 0)
            dist.send(np.full(num_bytes, rank, np.uint8), 0)
        dist.barrier()


@PLACES
@pytest.mark.parametrize("num_bytes", [8, 300_000])
def test_messages_from_several_ranks(worlds, backend, num_bytes):
    worlds.world(backend, 3).run(in_the_order_of_the_senders, num_bytes)


def of_several_groups():
    late, prompt = dist.new_group(), dist.new_group()
    for _ in range(3):
        works = [prompt.all_reduce(np.ones(2), async_op=True)]
        if dist.get_rank() == 0:
            works.append(late.barrier(async_op=True))
            assert dist.wait_any(works[::-1]) == 1
            prompt.barrier()
        else:
            works[0].wait()
            prompt.barrier()
            works.append(late.barrier(async_op=True))
        for work in works:
            work.wait()


@PLACES
def test_calls_of_several_groups(worlds, backend):
    worlds.world(backend, 2).run(of_several_groups)


def none_in_time():
    rank, x = dist.get_rank(), np.zeros(3)
    if rank == 0:
        works = [dist.irecv(x, 1), dist.irecv(np.zeros(1), 1, tag=4)]
        with pytest.raises(dist.DistTimeoutError) as raised:
            dist.wait_any(works, 0.05)
        first, *calls = str(raised.value).splitlines()
        assert first == "wait_any: none of 2 calls has ended after 0.05 s; call wait_any() again"
        assert all(call.startswith("  irecv on group 'world' (rank 0 of 2), ") for call in calls)
        assert len(calls) == 2
        assert "rank 1" in calls[0]
        only = r"wait_any: irecv on group 'world' .* has not ended after 0.05 s, waiting for .*rank 1.*; call wait_any"
        with pytest.raises(dist.DistTimeoutError, match=only):
            dist.wait_any(works[:1], timeout=0.05)
        assert not any(work.has_callbacks for work in works), "a wait leaves nothing behind"
        dist.send(x, 1)
        assert dist.wait_any(works) == 0
        for work in works:
            work.wait()
    else:
        dist.recv(x, 0)
        dist.send(x, 0)
        dist.send(np.zeros(1), 0, tag=4)


@PLACES
def test_a_timeout_can_be_repeated(worlds, backend):
    worlds.world(backend, 2).run(none_in_time)


def one_fails():
    group, other = dist.new_group(), dist.new_group()
    if group.rank() == 1:
        group.abort("no luck")
        dist.barrier()
        other.send(np.zeros(1), 0)
        return
    works = [other.irecv(np.zeros(1), 1), group.irecv(np.zeros(1), 1)]
    assert dist.wait_any(works) == 1
    with pytest.raises(dist.DistBackendError, match="no luck"):
        works[1].wait()
    dist.barrier()
    assert dist.wait_any(works[:1]) == 0
    works[0].wait()


@PLACES
def test_a_call_that_fails_has_ended(worlds, backend):
    worlds.world(backend, 2).run(one_fails)


def each_once():
    """As in a loop around MPI's Waitany."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(4):  # the core makes later receives
        if rank:
            dist.send(np.array([rank]), 0)
            continue
        rooms = np.zeros((size - 1, 1), int)
        works, taken = [dist.irecv(room, src) for src, room in enumerate(rooms, 1)], []
        for _ in works:
            place = dist.wait_any(works)
            works[place].wait()
            taken.append(rooms[place].item())
        assert sorted(taken) == list(range(1, size))
        with pytest.raises(ValueError, match="wait_any: works has no Work to wait for: all have been waited for"):
            dist.wait_any(works)


@PLACES
def test_calls_that_have_been_waited_for_are_passed_over(worlds, backend):
    worlds.world(backend, 3).run(each_once)


def many_waits():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        for number in range(30):
            dist.send(np.array([number]), 0)
        return None
    rooms = {src: np.zeros(1, int) for src in range(1, size)}
    works = {src: dist.irecv(room, src) for src, room in rooms.items()}
    taken = {src: [] for src in rooms}
    while works:
        assert dist.wait_any([None, *works.values()]) > 0
        src = list(works)[dist.wait_any(list(works.values()))]
        works.pop(src).wait()
        taken[src].append(rooms[src].item())
        if len(taken[src]) < 30:
            works[src] = dist.irecv(rooms[src], src)
    return taken


@PLACES
def test_a_master_takes_all_messages(worlds, backend):
    assert worlds.world(backend, 3).run(many_waits)[0] == {src: list(range(30)) for src in (1, 2)}


def test_several_threads_wait_for_one_call():
    def main():
        x, group = np.zeros(1), dist.new_group()
        if dist.get_rank() == 1:
            dist.barrier()
            group.send(x, 0)
            return None
        work, found = group.irecv(x, 1), []
        threads = [threading.Thread(target=lambda: found.append(dist.wait_any([work]))) for _ in range(3)]
        for thread in threads:
            thread.start()
        dist.barrier()
        for thread in threads:
            thread.join(30)
        work.wait()
        return found

    assert dist.run(main, 2)[0] == [0, 0, 0]


@pytest.mark.parametrize(
    ("works", "error", "words"),
    [
        ([], ValueError, "works has no Work to wait for"),
        ([None, None], ValueError, "works has no Work to wait for"),
        (None, TypeError, "works must be a sequence of Works; got None"),
        (5, TypeError, "works must be a sequence of Works; got 5"),
        ([None, 5], TypeError, r"works must be a sequence of Works; works\[1\] is 5"),
        ("spam", TypeError, "got 'spam'"),
        ([dist.Future()], TypeError, r"works\[0\] is <Future: not done>"),
    ],
)
def test_wrong_arguments(works, error, words):
    with pytest.raises(error, match=f"wait_any: .*{words}"):
        dist.wait_any(works)
