"""What a rank says at the end of a group about async calls that nobody has waited for."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest
from last_warnings import warnings_at_the_end

import meshdist as dist
from meshdist import DistBackendError
from meshdist.parallel import GradientReducer

pytestmark = pytest.mark.timeout(60)
PLACES = pytest.mark.parametrize("backend", ["gloo", "threads"])
LONG = 1 << 18  # elements; such a message waits for its receiver


def a_collective(group):
    return group.all_reduce(np.ones(4), async_op=True)


def a_known_collective(group):
    x = np.ones(4)
    for _ in range(4):
        group.all_reduce(x, async_op=True).wait()
    return group.all_reduce(x, async_op=True)


def a_collective_that_is_done(group):
    work = group.all_reduce(np.ones(4), async_op=True)
    group.barrier()
    return work


def peer_of(group):
    return 1 - group.rank()


def a_receive(group):
    group.isend(np.ones(1), peer_of(group)).wait()
    work = group.irecv(np.zeros(1), peer_of(group))
    group.barrier()
    return work


def a_known_receive(group):
    x = np.zeros(1)
    for _ in range(4):
        group.isend(x, peer_of(group))
        group.irecv(x, peer_of(group)).wait()
    return a_receive(group)


def a_receive_of_objects(group):
    group.isend_object_list(["a"], peer_of(group))
    work = group.irecv_object_list(peer_of(group))
    group.barrier()
    return work


def a_long_send(group):
    work = group.isend(np.ones(LONG), peer_of(group))
    group.barrier()  # a peer that receives already could have taken the message in the call
    group.recv(np.ones(LONG), peer_of(group))
    return work


def a_known_long_send(group):
    x, y = np.ones(LONG), np.ones(LONG)
    for _ in range(4):
        receive = group.irecv(y, peer_of(group))
        group.isend(x, peer_of(group)).wait()
        receive.wait()
    receive = group.irecv(y, peer_of(group))
    work = group.isend(x, peer_of(group))
    receive.wait()
    return work


FORGOTTEN = {
    a_collective: "all_reduce(float64[4], op=sum), call 1, at ",
    a_known_collective: "all_reduce(float64[4], op=sum), call 5, at ",
    a_collective_that_is_done: "all_reduce(float64[4], op=sum), call 1, at ",
    a_receive: "irecv(float64[1] from rank {peer}, tag=0), message 2, at ",
    a_known_receive: "irecv(float64[1] from rank {peer}, tag=0), message 10, at ",
    a_receive_of_objects: "irecv_object_list(1 object from rank {peer}, tag=0), message 2, at ",
    a_long_send: f"isend(float64[{LONG}] to rank {{peer}}, tag=0), message 1, at ",
    a_known_long_send: f"isend(float64[{LONG}] to rank {{peer}}, tag=0), message 10, at ",
}


def warnings_of(use, is_kept):
    """Return what this rank warns of if the works that `use` returns are kept to the end of the group, or dropped."""
    kept = []

    def begin(group):
        works = use(group)
        if is_kept:
            kept.append(works)

    return warnings_at_the_end(begin)


KEPT = pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "kept"])


@PLACES
@KEPT
@pytest.mark.parametrize("use", FORGOTTEN, ids=lambda use: use.__name__)
def test_a_forgotten_wait_is_named(worlds, backend, use, is_kept):
    if backend == "threads" and use in (a_long_send, a_known_long_send):
        pytest.skip("a thread has the message at once")
    for rank, warnings in enumerate(worlds.world(backend, 2).run(warnings_of, use, is_kept)):
        (warning,) = warnings
        call = FORGOTTEN[use].format(peer=1 - rank)
        assert warning.startswith(f"group 'pair' was destroyed, and 1 async call was never waited for: {call}")
        assert f"{os.path.basename(__file__)}:" in warning


def three_collectives(group):
    return [group.all_reduce(np.ones(4), async_op=True) for _ in range(3)]


def three_of_five_collectives(group):
    works = three_collectives(group)
    group.all_reduce(np.ones(5), async_op=True).wait()
    works.append(group.all_reduce(np.ones(4), async_op=True))
    works[-1].wait()
    return works


def one_kept_and_two_dropped(group):
    works = three_collectives(group)
    return works[1:2]


def kept_in_a_cycle(group):
    works = three_collectives(group)
    works.append(works)


@PLACES
@KEPT
@pytest.mark.parametrize(
    "use", [three_collectives, three_of_five_collectives, one_kept_and_two_dropped, kept_in_a_cycle]
)
def test_of_several_the_first_is_named(worlds, backend, use, is_kept):
    for (warning,) in worlds.world(backend, 2).run(warnings_of, use, is_kept):
        assert (
            "3 async calls were never waited for, the first of them all_reduce(float64[4], op=sum), call 1" in warning
        )


def test_a_work_that_is_let_go_of_meanwhile_counts_once(worlds, monkeypatch):
    """By another thread, such as that of a callback, while those that are kept are looked for."""
    works, get_referrers = [], gc.get_referrers

    def get_referrers_once(*objects):
        found = get_referrers(*objects)
        works.clear()
        return found

    monkeypatch.setattr(gc, "get_referrers", get_referrers_once)
    (warnings,) = worlds.world("threads", 1).run(warnings_at_the_end, lambda group: works.append(a_collective(group)))
    (warning,) = warnings
    assert "1 async call was never waited for" in warning


def begun(group):
    """All kinds of async calls, new and known."""
    peer, works = peer_of(group), []
    for _ in range(4):
        works += [
            group.isend(np.ones(2), peer),
            group.irecv(np.ones(2), peer),
            group.isend(np.ones(LONG), peer),
            group.irecv(np.ones(LONG), peer),
            group.isend_object_list(["a"], peer),
            group.irecv_object_list(peer),
            group.all_reduce(np.ones(2), async_op=True),
            group.all_gather_into_tensor(np.ones(4), np.ones(2), async_op=True),
        ]
    return works


def waited_for(group):
    for work in begun(group):
        work.wait()


def waited_for_with_a_limit(group):
    for work in begun(group):
        work.wait(timeout=30)


def asked_for_results(group):
    for work in begun(group):
        work.result()


def polled(group):
    for work in begun(group):
        while not work.is_completed():
            pass


def asked_for_success(group):
    for work in begun(group):
        work.is_success()


def asked_for_errors(group):
    for work in begun(group):
        assert work.exception() is None


def with_futures(group):
    for future in [work.get_future() for work in begun(group)]:
        future.wait()


def with_wait_any(group):
    works = begun(group)
    while works:
        works.pop(dist.wait_any(works))


def asked_for_sources(group):
    send = group.isend(np.ones(2), peer_of(group))
    group.irecv(np.ones(2), peer_of(group)).source_rank()
    send.wait()


def eager_sends(group):
    for _ in range(5):
        group.isend(np.ones(2), peer_of(group))
        group.isend_object_list(["a"], peer_of(group))
    for _ in range(5):
        group.recv(np.ones(2), peer_of(group))
        group.recv_object_list([None], peer_of(group))


def exchanges(group):
    for size in (2, LONG):
        for _ in range(4):
            group.sendrecv(np.ones(size), np.ones(size), peer_of(group), peer_of(group))


def batches(group):
    peer = group.ranks[peer_of(group)]
    for _ in range(3):
        ops = [dist.P2POp(dist.isend, np.ones(2), peer), dist.P2POp(dist.irecv, np.ones(2), peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def coalesced(group):
    for asynchronously in (False, True):
        with dist.coalescing_manager(group, async_ops=asynchronously) as calls:
            group.all_reduce(np.ones(2), async_op=asynchronously)
            group.all_reduce(np.ones(3), async_op=asynchronously)
            group.isend(np.ones(LONG), peer_of(group))
            group.irecv(np.ones(LONG), peer_of(group))
        calls.wait()


def reduced_gradients(group):
    gradients = {name: np.ones(100) for name in "abc"}
    reducer = GradientReducer(gradients, group=group)
    for _ in range(3):
        for name in reversed(gradients):
            reducer.ready(name, gradients[name])
        reducer.wait()


def a_barrier(group):
    for _ in range(4):
        group.barrier(async_op=True)


@PLACES
@pytest.mark.parametrize(
    "use",
    [
        waited_for,
        waited_for_with_a_limit,
        asked_for_results,
        polled,
        asked_for_success,
        asked_for_errors,
        with_futures,
        with_wait_any,
        asked_for_sources,
        eager_sends,
        exchanges,
        batches,
        coalesced,
        reduced_gradients,
        a_barrier,
    ],
)
def test_silent(worlds, backend, use):
    assert worlds.world(backend, 2).run(warnings_at_the_end, use) == [[], []]


def failed(group):
    work = group.all_reduce(np.ones(2), async_op=True)
    with pytest.raises(DistBackendError):
        group.all_reduce(np.ones(2 + group.rank()))
    return work


def aborted(group):
    work = group.all_reduce(np.ones(2), async_op=True)
    dist.abort_process_group(group)
    return work


@PLACES
@KEPT
@pytest.mark.parametrize("use", [failed, aborted])
def test_silent_if_the_group_is_broken(worlds, backend, use, is_kept):
    assert worlds.world(backend, 2).run(warnings_of, use, is_kept) == [[], []]


PROGRAM = """
import numpy as np
import meshdist as dist

def main():
    for _ in range(3):
        dist.all_reduce(np.ones(4), async_op=True)
    for _ in range(3):
        dist.isend(np.ones(1), 1 - dist.get_rank())
        y = np.zeros(1)
        dist.irecv(y, 1 - dist.get_rank())
        dist.barrier()
    works = [dist.all_reduce(np.ones(4), async_op=True), dist.all_reduce(np.ones(4), async_op=True)]
    works.pop(dist.wait_any(works))
    works[0].wait()
    mesh = dist.DeviceMesh("cpu", [0, 1])
    for _ in range(3):
        mesh.shift(np.ones(4))
        mesh.halo_exchange(np.ones((6, 4)))

dist.run(main, 2)
"""

CHOICES = pytest.mark.parametrize("choice", ["auto", "python"])


@CHOICES
def test_with_and_without_the_core(choice, tmp_path):
    script = tmp_path / "forgot.py"
    script.write_text(PROGRAM)
    environ = {**os.environ, "MESHDIST_CORE": choice}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, check=True)
    for rank in range(2):
        assert (
            f"rank {rank}: group 'world' was destroyed, and 6 async calls were never waited for, the first of them"
            " all_reduce(float64[4], op=sum), call 1, at forgot.py:7;"
        ) in done.stderr


SCRIPT = """
import numpy as np
import meshdist as dist

dist.init_process_group()
x = np.ones(4)
work = dist.all_reduce(x, async_op=True)
y = 2 * x
"""


@CHOICES
@pytest.mark.parametrize("end", ["dist.destroy_process_group()", ""], ids=["destroyed", "exit"])
def test_names_of_a_script_live_to_its_end(choice, end, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + end)
    environ = {**os.environ, "MESHDIST_CORE": choice}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, check=True)
    assert "1 async call was never waited for: all_reduce(float64[4], op=sum), call 1, at script.py:7;" in done.stderr
