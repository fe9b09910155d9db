"""A rank dies: all ranks that wait for it raise within a second and name its rank and process."""

import os
import re
import signal
import sys
import time

import numpy as np
import pytest
from by_hand import KILLED
from trying import attempt
from until import loaded
from worlds import report, worker_rank

import meshdist as dist
from meshdist.launch.spawn import spawn

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
DETECTED_S = 1.0
VICTIM = 1
BOTH_PATHS = pytest.mark.parametrize("backend", ["gloo", "gloo-slots", "gloo-tcp", "gloo-hosts"])


CALLS = {
    "all_reduce": lambda: dist.all_reduce(np.ones(3)),
    "barrier": lambda: dist.barrier(),
    "monitored_barrier": lambda: dist.monitored_barrier(),
    "large all_reduce": lambda: dist.all_reduce(np.ones(4 << 20)),
    "large broadcast": lambda: dist.broadcast(np.ones(1 << 20), VICTIM),
    "reduce": lambda: dist.reduce(np.ones(300_000), VICTIM),
    "all_gather": lambda: dist.all_gather([np.ones(3) for _ in range(3)], np.ones(3)),
    "all_to_all_single": lambda: dist.all_to_all_single(np.ones(3), np.ones(3)),
    "recv": lambda: dist.recv(np.ones(3), VICTIM),
    "large send": lambda: dist.send(np.ones(1 << 20), VICTIM),
    "known send": lambda: dist.send(np.ones(20_000), VICTIM),
    "known irecv": lambda: dist.irecv(np.ones(20_000), VICTIM).wait(),
    "async all_reduce": lambda: dist.all_reduce(np.ones(3), async_op=True).wait(),
    "known async calls": lambda: [work.wait() for work in begin_known_calls()],
}


def begin_known_calls():
    return [dist.all_reduce(x, async_op=True) for x in np.ones((9, 5))]


def call_announced(name):
    return attempt(CALLS[name], announce=True), attempt(dist.barrier)


def connect():
    dist.barrier()
    for _ in range(3):  # async calls of a kind as well
        dist.all_reduce(np.ones(5), async_op=True).wait()
    for peer in range(dist.get_world_size()):
        for _ in range(3):  # messages of a kind that has been sent before go a shorter way
            if peer < dist.get_rank():
                dist.send(np.ones(3), peer)
                dist.recv(np.ones(3), peer)
            elif peer > dist.get_rank():
                dist.recv(np.ones(3), peer)
                dist.send(np.ones(3), peer)
            if peer != dist.get_rank():
                works = [dist.irecv(np.ones(20_000), peer), dist.isend(np.ones(20_000), peer)]
                if peer == VICTIM:
                    works[0].wait()
                    dist.send(np.ones(20_000), peer)
                elif dist.get_rank() == VICTIM:
                    works[0].wait()
                    dist.recv(np.ones(20_000), peer)
                for work in works:
                    work.wait()


def check_death(workers, failures, killed_s):
    for failure, after in failures:
        assert issubclass(failure.kind, dist.DistBackendError), failure
        assert failure.ended_s - killed_s < loaded(DETECTED_S), (failure.ended_s - killed_s, failure)
        assert re.search(
            rf"on group 'world' \(rank [02] of 3\): .*rank 1 \(pid {workers.pids[VICTIM]} on ", failure.message
        ), failure
        assert re.search(f"{KILLED}|No such process", failure.message), failure
        assert re.search(r"; this is (call|message) \d+, at test_killed_ranks.py:\d+", failure.message), failure
        # The group stays broken, and says why.
        assert after.kind is dist.DistBackendError, after
        assert after.took_s < loaded(0.5), after
        assert "barrier on group 'world'" in after.message, after
        assert f"pid {workers.pids[VICTIM]}" in after.message, after


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "first call"])
@pytest.mark.parametrize("name", CALLS)
@BOTH_PATHS
def test_killed_while_others_wait(new_workers, backend, name, connected):
    workers = new_workers(3, backend)
    if connected:
        workers.start(connect)
        workers.gather()
    waiting = [rank for rank in range(workers.size) if rank != VICTIM]
    workers.start(call_announced, name, ranks=waiting)
    for rank in waiting:
        workers.reported(rank)
        workers.until_asleep(rank)
    killed_s = workers.signal(VICTIM, signal.SIGKILL)
    check_death(workers, [workers.outcome(rank) for rank in waiting], killed_s)


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "first call"])
@pytest.mark.parametrize("name", ["all_reduce", "barrier", "large all_reduce", "large broadcast"])
@BOTH_PATHS
def test_killed_while_it_waits_with_others(new_workers, backend, name, connected):
    """Ranks 0 and 1 wait for rank 2, which lives but does not come; rank 1 is killed."""
    workers = new_workers(3, backend)
    if connected:
        workers.start(connect)
        workers.gather()
    workers.start(call_announced, name, ranks=[0, VICTIM])
    for rank in (0, VICTIM):
        workers.reported(rank)
        workers.until_asleep(rank)
    killed_s = workers.signal(VICTIM, signal.SIGKILL)
    check_death(workers, [workers.outcome(0)], killed_s)


def call_for_ever(name):
    """Call until it fails."""
    for _ in range(3):
        CALLS[name]()
    report("under way")

    def on_and_on():
        while True:
            CALLS[name]()

    return attempt(on_and_on), attempt(dist.barrier)


@pytest.mark.parametrize(
    "name", ["all_reduce", "known async calls", "large all_reduce", "large broadcast", "all_to_all_single"]
)
@BOTH_PATHS
def test_killed_amidst_calls(new_workers, backend, name):
    workers = new_workers(3, backend)
    workers.start(call_for_ever, name)
    for rank in range(workers.size):
        workers.reported(rank)
    killed_s = workers.signal(VICTIM, signal.SIGKILL)
    check_death(workers, [workers.outcome(rank) for rank in (0, 2)], killed_s)


def stream(dst):
    x = np.ones(1 << 20)
    for step in range(1 << 30):
        if step == 3:
            report("under way")
        dist.send(x, dst) if dist.get_rank() == 0 else dist.recv(x, 0)


def try_stream(dst):
    return attempt(lambda: stream(dst)), attempt(dist.barrier)


@pytest.mark.parametrize("victim", [0, 1], ids=["sender", "receiver"])
@BOTH_PATHS
def test_killed_amidst_large_messages(new_workers, backend, victim):
    workers = new_workers(2, backend)
    workers.start(try_stream, 1)
    for rank in range(2):
        workers.reported(rank)
    killed_s = workers.signal(victim, signal.SIGKILL)
    failure, after = workers.outcome(1 - victim)
    assert issubclass(failure.kind, dist.DistBackendError), failure
    assert after.kind is dist.DistBackendError, failure
    assert failure.ended_s - killed_s < loaded(DETECTED_S), failure
    assert f"rank {victim} (pid {workers.pids[victim]} on " in failure.message, failure


@BOTH_PATHS
def test_killed_before_the_call(new_workers, backend):
    workers = new_workers(3, backend)
    workers.start(connect)
    workers.gather()
    workers.signal(VICTIM, signal.SIGKILL)
    assert workers.ended(VICTIM)
    called_s = time.monotonic()
    workers.start(call_announced, "all_reduce", ranks=[0, 2])
    for rank in (0, 2):
        workers.reported(rank)
    check_death(workers, [workers.outcome(rank) for rank in (0, 2)], called_s)


def message_then_end():
    # The two have met before: the channel of their first message is found through the sender.
    if dist.get_rank() == VICTIM:
        dist.send(np.zeros(1), 0)
    if dist.get_rank() == 0:
        dist.recv(np.zeros(1), VICTIM)
    dist.barrier()
    if dist.get_rank() == VICTIM:
        dist.send(np.full(3, 7.0), 0)
        os._exit(0)
    if dist.get_rank() == 0:
        x = np.zeros(3)
        report("about to receive")
        dist.recv(x, VICTIM)
        return x.tolist(), attempt(lambda: dist.recv(x, VICTIM))
    return None


def test_what_a_rank_sent_before_it_ended_is_received(new_workers):
    """The last word arrives, the next receive raises."""
    workers = new_workers(3)
    workers.start(message_then_end)
    workers.reported(0)
    content, failure = workers.outcome(0)
    assert content == [7.0, 7.0, 7.0]
    assert issubclass(failure.kind, dist.DistBackendError), failure
    assert failure.took_s < loaded(DETECTED_S)
    assert f"rank 1 (pid {workers.pids[VICTIM]}" in failure.message


def groups_without_the_dead():
    group = dist.new_group([0, 2])
    report("about to wait")
    failures = attempt(dist.barrier)
    return failures, int(group.all_reduce(np.array(1)))


def test_groups_without_the_dead_rank_go_on(new_workers):
    workers = new_workers(3)
    workers.start(groups_without_the_dead, ranks=[0, 2])
    for rank in (0, 2):
        workers.reported(rank)
        workers.until_asleep(rank)
    workers.signal(VICTIM, signal.SIGKILL)
    for rank in (0, 2):
        failure, total = workers.outcome(rank)
        assert issubclass(failure.kind, dist.DistBackendError)
        assert total == 2


# ---- The rank with the store


def join_over(url):
    dist.init_process_group("gloo", init_method=url, rank=worker_rank(), world_size=3, timeout=30)


@pytest.mark.parametrize("name", ["all_reduce", "recv from 0"])
def test_the_rank_that_holds_the_store_is_killed(new_workers, port, name):
    """Over tcp:// that is rank 0; its death is named as any other's, also where the store is needed."""
    workers = new_workers(3, join=False)
    workers.start(join_over, f"tcp://127.0.0.1:{port}")
    workers.gather()
    workers.start(first_call_without_0, name, ranks=[1, 2])
    for rank in (1, 2):
        workers.reported(rank)
        workers.until_asleep(rank)
    killed_s = workers.signal(0, signal.SIGKILL)
    for rank in (1, 2):
        failure = workers.outcome(rank)
        assert issubclass(failure.kind, dist.DistBackendError), failure
        assert failure.ended_s - killed_s < loaded(DETECTED_S), failure
        assert f"rank 0 (pid {workers.pids[0]} on " in failure.message, failure


def first_call_without_0(name):
    call = CALLS["all_reduce"] if name == "all_reduce" else lambda: dist.recv(np.ones(3), 0)
    return attempt(call, announce=True)


# ---- A rank that ends by itself


def end_early(rank, folder, how):
    dist.init_process_group("gloo", timeout=30)
    dist.barrier()
    if rank == VICTIM:
        note(folder, rank, f"{time.monotonic()}")
        if how == "destroys":
            dist.destroy_process_group()
        elif how == "_exit":
            os._exit(0)
        return
    failure = attempt(lambda: dist.all_reduce(np.ones(3)))
    note(folder, rank, f"{failure.ended_s} {failure.kind.__name__} {failure.message}")
    dist.destroy_process_group()


def note(folder, rank, text):
    with open(os.path.join(folder, str(rank)), "w") as file:
        file.write(text)


@pytest.mark.parametrize("how", ["returns", "_exit", "destroys"])
def test_a_rank_that_ends_early_with_status_0(tmp_path, how):
    spawn(end_early, args=(str(tmp_path), how), nprocs=3)
    ended_s = float((tmp_path / "1").read_text())
    for rank in (0, 2):
        noticed_s, kind, message = (tmp_path / str(rank)).read_text().split(" ", 2)
        assert kind == "DistBackendError", message
        assert float(noticed_s) - ended_s < loaded(DETECTED_S) + 0.5, message  # the interpreter takes a while to end
        assert re.search(r"all_reduce on group 'world' .*rank 1 \(pid \d+ on ", message), message


def send_and_die():
    dist.isend(np.ones(3), 1)
    os.kill(os.getpid(), signal.SIGKILL)


def receive_from(src):
    return attempt(lambda: dist.recv(np.zeros(3), src))


@pytest.mark.parametrize("src", [0, None])
def test_a_sender_that_is_killed_takes_along_what_nobody_has_begun_to_receive_and_is_named(new_workers, src):
    workers = new_workers(2)
    workers.start(send_and_die, ranks=[0])
    assert workers.ended(0)
    workers.start(receive_from, src, ranks=[1])
    failure = workers.outcome(1)
    assert issubclass(failure.kind, dist.DistBackendError)
    assert failure.took_s < loaded(DETECTED_S)
    assert re.search(
        rf"recv on group 'world' .*: rank 0 \(pid {workers.pids[0]} on [^)]*\) {KILLED}; ", failure.message
    )
