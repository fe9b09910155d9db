"""Backend nccl on the stand-in: failures raise on every rank, and no rank waits forever."""

import logging
import threading

import numpy as np
import pytest
import standin_nccl
from standin_cupy import MACHINE
from until import until

import meshdist as dist
from meshdist.backends.nccl.comm_setup import check_cards

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _two_gpus(standin):
    MACHINE.num_devices = 2


def on_own_gpu(cupy, **how):
    cupy.cuda.Device(dist.get_rank()).use()
    return dist.new_group(backend="standin", **how)


def caught(call):
    with pytest.raises(dist.DistError) as error:
        call()
    return str(error.value)


def come_late(cupy, standin):
    group = on_own_gpu(cupy, timeout=0.5)
    group.all_reduce(cupy.zeros(1))
    words = None
    if group.rank() == 0:
        work = group.all_reduce(cupy.zeros(3), async_op=True)
        words = [caught(lambda: work.wait(20.0)), caught(work.wait), str(work.exception())]
        words.append(caught(lambda: group.all_reduce(cupy.zeros(3))))
        # Its record in the store comes before, and the other rank looks for that at its end.
        until(lambda: standin.aborts, "this rank has given up")
    dist.barrier()  # of the world, which has another backend
    return words


def test_a_rank_that_does_not_come_is_missed_at_the_deadline(standin, cupy, caplog):
    with caplog.at_level(logging.ERROR, "meshdist"):
        words = dist.run(come_late, 2, (cupy, standin), timeout=20)[0]
    assert all("all_reduce on group" in text and "timed out after 0.5 s" in text for text in words)
    assert standin.aborts == 2  # once on each rank
    assert "is broken: all_reduce on group" in caplog.text


def call_again_after_the_end(cupy, standin):
    group, x = on_own_gpu(cupy, timeout=0.5), cupy.zeros(3)
    for _ in range(2):  # checked, and then planned
        group.all_reduce(x)
    words = None
    if group.rank() == 0:
        work = group.all_reduce(x, async_op=True)
        caught(lambda: work.wait(20.0))
        words = [caught(lambda: group.all_reduce(x))]
        assert group.is_broken
        words.append(caught(lambda: group.all_reduce(x)))
        until(lambda: standin.aborts, "this rank has given up")
    dist.barrier()
    return words


def test_a_planned_call_after_a_failure_breaks_the_group_as_any_other(standin, cupy):
    words = dist.run(call_again_after_the_end, 2, (cupy, standin), timeout=20)[0]
    assert "timed out after 0.5 s" in words[0]
    assert "cannot be used after an earlier failure" in words[1]


def meet_in_vain(cupy):
    group = on_own_gpu(cupy, timeout=0.5)
    words = caught(lambda: group.all_reduce(cupy.zeros(3))) if group.rank() == 0 else None
    dist.barrier()
    return words


def test_a_rank_that_never_makes_its_first_call_is_named(standin, cupy):
    words = dist.run(meet_in_vain, 2, (cupy,), timeout=20)[0]
    assert "all_reduce on group" in words
    assert "timed out after 0.5 s waiting for rank 1" in words


def stay_away(cupy):
    rank = dist.get_rank()
    cupy.cuda.Device(rank).use()
    group = dist.new_group(backend="standin", timeout=0.5, device_id=rank)
    words = None
    if rank == 0:
        words = [caught(lambda: group.all_reduce(cupy.zeros(3))), caught(lambda: group.all_reduce(cupy.zeros(3)))]
    dist.barrier()
    return words


def test_a_first_call_that_nccl_blocks_the_host_in_ends_at_the_deadline(standin, cupy):
    words = dist.run(stay_away, 2, (cupy,), timeout=20)[0]
    assert all("all_reduce on group" in text and "timed out after 0.5 s" in text for text in words), words
    assert standin.aborts == 2  # once on each rank


def swap_first(cupy):
    group = on_own_gpu(cupy, timeout=10)
    peer, found = 1 - group.rank(), []
    for number in range(2):
        mine, theirs = cupy.ones(3), cupy.zeros(3)
        mine[...] = float(group.rank() + number)
        works = [group.isend(mine, peer), group.irecv(theirs, peer)]
        for work in works:
            work.wait()
        found.append(theirs.tolist())
    dist.destroy_process_group(group)
    return found


def test_two_ranks_whose_first_messages_are_both_sent(standin, cupy):
    assert dist.run(swap_first, 2, (cupy,), timeout=20) == [
        [[1.0] * 3, [2.0] * 3],
        [[0.0] * 3, [1.0] * 3],
    ]
    assert standin.aborts == 0


def turn_around(cupy):
    group = on_own_gpu(cupy, timeout=10)
    x = cupy.ones(3)
    group.send(x, 1) if group.rank() == 0 else group.recv(x, 0)
    words = None
    if group.rank() == 1:
        work = group.isend(x, 0)  # the first that goes this way; received later
        words = caught(lambda: work.wait(0.1))
    dist.barrier()
    group.recv(x, 1) if group.rank() == 0 else work.wait()
    dist.destroy_process_group(group)
    return words


def test_the_first_message_the_other_way_does_not_block_the_host(standin, cupy):
    words = dist.run(turn_around, 2, (cupy,), timeout=20)[1]
    assert "isend on group" in words
    assert "not done after 0.1 s" in words


def wait_on_two_lanes(cupy):
    group = on_own_gpu(cupy, timeout=0.5)
    x, words = cupy.zeros(3), None
    group.all_reduce(x)
    group.send(x, 1) if group.rank() == 0 else group.recv(x, 0)
    if group.rank() == 0:
        works = [group.irecv(cupy.zeros(3), 1), group.all_reduce(x, async_op=True)]
        words = [caught(lambda work=work: work.wait(20.0)) for work in works]
    dist.barrier()
    return words


def test_communicators_are_aborted_together(standin, cupy):
    words = dist.run(wait_on_two_lanes, 2, (cupy,), timeout=20)[0]
    assert all("timed out after 0.5 s" in text for text in words), words
    assert standin.aborts >= 3  # that of the group and two of the pair


def batch_alone(cupy):
    group = on_own_gpu(cupy, timeout=0.5)
    group.barrier()
    words = None
    if group.rank() == 0:
        batch = [dist.P2POp(dist.isend, cupy.zeros(3), group=group, group_peer=1)]
        words = caught(lambda: dist.batch_isend_irecv(batch))
    dist.barrier()
    return words


def test_a_batch_that_nobody_answers_ends_at_the_deadline(standin, cupy):
    assert "timed out after 0.5 s" in dist.run(batch_alone, 2, (cupy,), timeout=20)[0]


def give_up(cupy):
    group = on_own_gpu(cupy)
    group.all_reduce(cupy.zeros(1))
    if group.rank() == 1:
        group.abort("it has had enough")
        words = caught(lambda: group.all_reduce(cupy.zeros(1)))
    else:
        work = group.all_reduce(cupy.zeros(1), async_op=True)
        words = caught(lambda: work.wait(30.0))
    dist.barrier()
    return words


def test_a_rank_that_gives_up_is_noticed(standin, cupy):
    words = dist.run(give_up, 2, (cupy,), timeout=20)
    assert "rank 1 failed: it has had enough" in words[0]
    assert "it has had enough" in words[1]
    assert standin.aborts == 2


def fail_inside(cupy, standin):
    group = on_own_gpu(cupy)
    group.all_reduce(cupy.zeros(1))
    with MACHINE.held(cupy.cuda.get_current_stream()):
        work = group.all_reduce(cupy.zeros(1), async_op=True)
        dist.barrier()  # the status is that of both, and would fail a call that is still to be made
        standin.async_status = 6
        return caught(lambda: work.wait(20.0))


def test_errors_of_nccl_come_in_its_words(standin, cupy):
    for words in dist.run(fail_inside, 2, (cupy, standin), timeout=20):
        assert "NCCL says: status 6" in words
        assert "all_reduce on group" in words
    assert standin.aborts == 2


def break_the_gpu(cupy):
    group = on_own_gpu(cupy)
    group.all_reduce(cupy.zeros(1))
    with MACHINE.held(cupy.cuda.get_current_stream()):
        works = [group.all_reduce(cupy.zeros(1), async_op=True), group.barrier(async_op=True)]
        MACHINE.fault = 700
        words = [caught(lambda: works[0].wait(20.0)), caught(works[1].wait)]
        dist.destroy_process_group(group)
    return words


def test_errors_of_cuda_are_no_waiting(standin, cupy):
    for words in dist.run(break_the_gpu, 1, (cupy,), timeout=20)[0]:
        assert "CUDA says: cudaError 700" in words
        assert "all_reduce on group" in words or "barrier on group" in words
    MACHINE.fault = 0
    for stream in list(MACHINE.streams.values()):
        stream.synchronize()


def share(cupy):
    cupy.cuda.Device(0).use()
    group = dist.new_group(backend="standin")
    return caught(lambda: group.all_reduce(cupy.zeros(1)))


def test_two_ranks_on_one_gpu(standin, cupy):
    for words in dist.run(share, 2, (cupy,), timeout=20):
        assert "ranks 0 and 1 share one GPU, 0000:00:00.0 on " in words
        assert "cupy.cuda.Device(local_rank).use()" in words
    assert standin.log == []


def share_well(cupy):
    cupy.cuda.Device(0).use()
    # Threads of one process share the default stream, on which one rank would wait behind the other.
    with dist.new_group(backend="standin") as group, cupy.cuda.Stream(non_blocking=True):
        x = cupy.ones(2)
        group.all_reduce(x)
        return x.tolist()


def test_two_ranks_on_one_gpu_where_nccl_lets_them(standin, cupy, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert "share one GPU" in dist.run(share, 2, (cupy,), timeout=20)[0]
    standin.version = 23003
    assert dist.run(share_well, 2, (cupy,), timeout=20) == [[2.0, 2.0]] * 2


def test_different_versions_of_nccl():
    cards = {rank: {"gpu": [f"gpu {rank}", ""], "version": 22703 + rank, "shares": False} for rank in (0, 1)}
    words = r"different versions of NCCL, 2.27.3 \(rank 0\), 2.27.4 \(rank 1\)"
    with pytest.raises(dist.DistBackendError, match=words):
        check_cards(cards)


def eagerly(cupy, standin):
    rank = dist.get_rank()
    group = dist.new_group(backend="standin", device_id=f"cuda:{rank}")
    dist.barrier()
    num_made = len(standin.shared)
    with cupy.cuda.Device(rank):
        x = cupy.ones(2)
        group.all_reduce(x)
    with pytest.raises(dist.DistBackendError, match=r"no GPU 7 \(device_id\), this process sees 2"):
        dist.new_group(backend="standin", device_id=7)
    return num_made, x.tolist()


def with_the_worlds_gpu(cupy, num_ranks):
    rank = dist.get_rank()
    dist.group.WORLD.device_id = rank  # as init_process_group does with its device_id
    group = dist.new_group(backend="standin")
    group.barrier()  # which has no array that would say where
    objects = [None] * num_ranks
    group.all_gather_object(objects, rank)
    return objects


def test_groups_have_the_gpu_of_their_world(standin, cupy):
    assert dist.run(with_the_worlds_gpu, 2, (cupy, 2), timeout=20) == [[0, 1], [0, 1]]


def test_a_group_that_is_given_a_device_meets_at_once(standin, cupy):
    assert dist.run(eagerly, 2, (cupy, standin), timeout=20) == [(1, [2.0, 2.0])] * 2


def leave_early(cupy, have_met):
    group = on_own_gpu(cupy)
    group.all_reduce(cupy.zeros(1))
    if have_met:
        group.send(cupy.zeros(1), 1) if group.rank() == 0 else group.recv(cupy.zeros(1), 0)
    if group.rank() == 0:
        work = group.isend(cupy.zeros(1), 1)  # which nobody receives
    dist.barrier()  # of the world: the other rank destroys the group only then
    dist.destroy_process_group(group)
    return str(work.exception()) if group.rank() == 0 else None


@pytest.mark.parametrize("have_met", [False, True])
def test_messages_that_nobody_receives_do_not_keep_a_group_open(standin, cupy, have_met):
    words = dist.run(leave_early, 2, (cupy, have_met), timeout=30)[0]
    assert "has destroyed the group" in words or "a message was not received" in words, words


def disagree(cupy):
    group = on_own_gpu(cupy)
    for _ in range(3):
        group.all_reduce(cupy.ones((2, 3)))
        work = group.all_gather_into_tensor(cupy.zeros(4), cupy.zeros(2), async_op=True)
        work.wait()
    rank = group.rank()
    return caught(lambda: group.all_reduce(cupy.ones((2, 3) if rank else (3, 2)), op="max" if rank else "sum"))


def test_calls_are_compared_at_level_detail(standin, cupy):
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # here: the level is that of the process, and the ranks are threads
    try:
        said = dist.run(disagree, 2, (cupy,), timeout=20)
    finally:
        dist.set_debug_level(before)
    for words in said:
        assert "all_reduce on group" in words
        assert "rank 0 calls all_reduce(float64[3, 2], op=sum" in words
        assert "rank 1 calls all_reduce(float64[2, 3], op=max" in words
    assert len([entry for entry in standin.log if entry[0] == "all_reduce"]) == 6


def test_a_default_group_of_both_kinds(standin, cupy):
    def both():
        cupy.cuda.Device(dist.get_rank()).use()
        group = dist.new_group(backend="cpu:threads,cuda:standin")
        assert dist.get_backend_config(group) == "cpu:threads,cuda:standin"
        x, y = np.ones(2), cupy.ones(2)
        group.all_reduce(x)
        group.all_reduce(y)
        objects = [None, None]
        group.all_gather_object(objects, dist.get_rank())
        group.barrier()
        return x.tolist(), y.tolist(), objects

    assert dist.run(both, 2, timeout=20) == [([2.0, 2.0], [2.0, 2.0], [0, 1])] * 2
    assert {kind for kind, *_ in standin.log} == {"all_reduce"}


def send_before(cupy):
    """Rank 0 sends before a collective, and rank 1 receives before it."""
    group, x, message = on_own_gpu(cupy, timeout=10), cupy.ones(2), cupy.ones(3)
    group.all_reduce(x)
    if group.rank() == 0:
        group.send(message, 1)  # of few bytes: it does not wait for the receiver
    else:
        group.recv(message, 0)
    group.all_reduce(x)
    return x.tolist()


def send_behind(cupy):
    """Rank 1 sends before a collective, and rank 0 receives behind it."""
    group, x, message = on_own_gpu(cupy, timeout=10), cupy.ones(2), cupy.ones(3)
    group.all_reduce(x)
    work = group.isend(message, 0) if group.rank() == 1 else None
    found = group.all_reduce(x).tolist()
    if work is None:
        group.recv(message, 1)
    else:
        work.wait()
    return found


def receive_before(cupy):
    """Rank 1 posts its receive before a collective, and rank 0 sends behind it."""
    group, x, message = on_own_gpu(cupy, timeout=10), cupy.ones(2), cupy.ones(3)
    group.all_reduce(x)
    work = group.irecv(message, 0) if group.rank() == 1 else None
    found = group.all_reduce(x).tolist()
    if work is None:
        group.send(message, 1)
    else:
        work.wait()
    return found


@pytest.mark.parametrize("program", [send_before, send_behind, receive_before])
def test_first_messages_and_collectives_in_any_order(standin, cupy, program):
    assert dist.run(program, 2, (cupy,), timeout=20) == [[4.0, 4.0]] * 2
    assert standin.aborts == 0


def exchange_in_a_ring(cupy):
    group, x = on_own_gpu(cupy, timeout=10), cupy.ones(2)
    rank, size = group.rank(), group.size()
    group.all_reduce(x)
    sent, theirs = cupy.asarray(np.full(3, float(rank))), cupy.zeros(3)
    works = [group.isend(sent, (rank + 1) % size), group.irecv(theirs, (rank - 1) % size)]
    group.all_reduce(x)
    for work in works:
        work.wait()
    return theirs.tolist(), x.tolist()


def test_first_messages_in_a_ring_around_a_collective(standin, cupy):
    MACHINE.num_devices = 4
    found = dist.run(exchange_in_a_ring, 4, (cupy,), timeout=20)
    assert found == [([float((rank - 1) % 4)] * 3, [16.0, 16.0]) for rank in range(4)]
    assert standin.aborts == 0


def destroy_early(cupy):
    group = on_own_gpu(cupy, timeout=20)
    x = cupy.ones(3)
    group.all_reduce(x)
    group.barrier()
    if group.rank() == 1:
        dist.destroy_process_group(group)
        return None
    return caught(lambda: group.all_reduce(x, async_op=True).wait(20.0))


def test_a_rank_that_has_left_in_order_is_missed_before_the_deadline(standin, cupy, monkeypatch):
    monkeypatch.setattr("meshdist.backends.nccl.backend._LEFT_S", 0.2)
    words = dist.run(destroy_early, 2, (cupy,), timeout=20)[0]
    assert "all_reduce on group" in words
    assert "rank 1 has destroyed the group without making this call" in words


def end_early(cupy):
    first, second = on_own_gpu(cupy, timeout=20), on_own_gpu(cupy, timeout=20)
    x = cupy.ones(3)
    for group in (first, second):
        group.all_reduce(x)
        group.barrier()
    if group.rank() == 1:
        dist.destroy_process_group()
        return None
    return caught(lambda: second.all_reduce(x, async_op=True).wait(20.0))


def test_a_rank_tells_all_groups_that_it_leaves_before_the_end_of_the_first(standin, cupy, monkeypatch):
    monkeypatch.setattr("meshdist.backends.nccl.backend._LEFT_S", 0.2)
    left = threading.Event()

    def finalize(self):  # NCCL may wait for the other rank
        assert left.wait(20), "the other rank waits in another group"

    def abort(self, abort=standin_nccl.StandInCommunicator.abort):
        left.set()
        abort(self)

    monkeypatch.setattr(standin_nccl.StandInCommunicator, "finalize", finalize)
    monkeypatch.setattr(standin_nccl.StandInCommunicator, "abort", abort)
    words = dist.run(end_early, 2, (cupy,), timeout=20)[0]
    assert "rank 1 has destroyed the group without making this call" in words
