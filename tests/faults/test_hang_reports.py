"""The error of a timeout says which rank waits for which, and where."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from trying import attempt
from worlds import report

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
TIMEOUT_S = 4.0


def timed_out(*failures):
    """Return the first failure that is a timeout; the ranks that it tells fail with another error."""
    timeouts = [failure for failure in failures if failure.kind is dist.DistTimeoutError]
    return min(timeouts, key=lambda failure: failure.ended_s)


def busy_in_own_code(enough):
    end = time.monotonic() + 60
    while time.monotonic() < end and not os.path.exists(enough):
        sum(range(1000))


def one_computes(enough):
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    group.barrier()
    if dist.get_rank() == 1:
        busy_in_own_code(enough)
        return None
    failure = attempt(lambda: group.all_reduce(np.ones(4)))
    open(enough, "w").close()
    return failure


def test_a_timeout_shows_where_the_absent_rank_computes(new_workers, tmp_path):
    workers = new_workers(3)
    workers.start(one_computes, str(tmp_path / "enough"))
    first = timed_out(workers.outcome(0), workers.outcome(2))
    assert first.took_s >= TIMEOUT_S
    message = first.message
    assert f"timed out after {TIMEOUT_S:g} s waiting for rank 1 (pid {workers.pids[1]} on " in message
    assert "rank 1 has not reached all_reduce(float64[4], op=sum), call 2 on 'short of time'" in message
    # Rank 2 may have timed out already, or not be there yet.
    assert re.search(
        r"ranks? 0(, 2 have| has) been in all_reduce\(.* at test_hang_reports.py:\d+, for \d+\.\d s", message
    )
    assert re.search(
        r"rank 1 is not in a meshdist call; it has been at test_hang_reports.py:\d+ in busy_in_own_code", message
    )
    assert "its last call was barrier(), call 1 on 'short of time'" in message
    assert re.search(r"stack of rank 1: .* in one_computes > .* in busy_in_own_code", message)


def waits_for_some(enough):
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="of some")
    group.barrier()
    if dist.get_rank():
        busy_in_own_code(enough)
        return None
    works = [group.irecv(np.ones(4), source, tag=tag) for source, tag in ((1, 3), (2, 4))]
    other = group.irecv(np.ones(4), 2, tag=5)
    failure = attempt(lambda: works[dist.wait_any(works)].wait())
    open(enough, "w").close()
    return failure, attempt(other.wait)


def test_a_timeout_shows_the_calls_of_a_wait_any_and_not_others(new_workers, tmp_path):
    workers = new_workers(3)
    workers.start(waits_for_some, str(tmp_path / "enough"))
    message = workers.outcome(0)[0].message
    words = [
        rf"irecv\(float64\[4\] from rank {rank}, tag={tag}\), message {rank} on 'of some', at test_hang_reports.py:\d+"
        for rank, tag in ((1, 3), (2, 4))
    ]
    line = (
        r"rank 0 has been in wait_any of 2 calls, at test_hang_reports.py:\d+, for \d\.\d s, waiting for ranks 1, 2: "
    )
    assert re.search(f"{line}{'; '.join(words)}$", message, re.MULTILINE), message


def two_orders():
    one = dist.new_group(timeout=TIMEOUT_S, group_desc="one")
    other = dist.new_group(timeout=TIMEOUT_S, group_desc="other")
    for group in (one, other):
        group.barrier()
    first, second = (one, other) if dist.get_rank() == 0 else (other, one)

    def calls():
        first.all_reduce(np.ones(4), async_op=True).wait(10 * TIMEOUT_S)
        second.all_reduce(np.ones(4))

    return attempt(calls)


def test_a_timeout_shows_the_circle_and_the_first_call_that_differs(new_workers):
    """The waits have limits, after which the threads may go on: their cycle is not proven before the timeout."""
    workers = new_workers(2, "gloo-tcp")
    workers.start(two_orders)
    outcomes = [workers.outcome(0), workers.outcome(1)]
    assert all(outcome.kind in (dist.DistTimeoutError, dist.DistBackendError) for outcome in outcomes)
    message = timed_out(*outcomes).message
    cause = (
        "the ranks wait for each other: rank 0 waits for rank 1; rank 1 waits for rank 0; after barrier(), call 1 on"
    )
    assert f"{cause} 'other'" in message
    for call in ("call 2 on 'one'", "call 2 on 'other'"):
        # The other rank may have timed out a moment before.
        assert len(re.findall(rf"(has been|was) in all_reduce\(float64\[4\], op=sum\), {call}", message)) == 1
        assert len([line for line in message.splitlines()[1:] if call in line]) == 1


def test_the_lowest_waiting_rank_warns_in_the_log(caplog):
    free = threading.Event()

    def main():
        group = dist.new_group(timeout=8.0, group_desc="patient")
        group.barrier()
        if dist.get_rank() == 1:
            free.wait(20)
        group.barrier()

    class Frees(logging.Handler):
        def emit(self, record):
            if "has been waiting for" in record.getMessage():
                free.set()

    handler = Frees()
    logging.getLogger("meshdist").addHandler(handler)
    try:
        dist.run(main, 3)
    finally:
        logging.getLogger("meshdist").removeHandler(handler)
    warnings = [record for record in caplog.records if "has been waiting for" in record.getMessage()]
    assert {record.levelno for record in warnings} == {logging.WARNING}
    assert len(warnings) == 1
    assert warnings[0].rank in (0, 2)
    assert (warnings[0].group, warnings[0].sequence) == ("patient", 2)
    assert "rank 1 has not reached barrier(), call 2" in warnings[0].getMessage()


def async_and_wait(enough):
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    group.barrier()
    if dist.get_rank() == 1:
        busy_in_own_code(enough)
        return None
    work = group.all_reduce(np.ones(4), async_op=True)
    failure = attempt(work.wait)
    open(enough, "w").close()
    return failure


def test_an_async_call_that_times_out_says_it_as_well(tmp_path):
    failure = dist.run(async_and_wait, 2, (str(tmp_path / "enough"),))[0]
    assert failure.kind is dist.DistTimeoutError
    assert "rank 1 has not reached all_reduce(float64[4], op=sum), call 2 on 'short of time'" in failure.message
    assert "in busy_in_own_code" in failure.message


@pytest.mark.slow
def test_64_ranks_that_are_stuck():
    late = 17

    def main():
        group = dist.new_group(timeout=20.0)
        group.barrier()
        if dist.get_rank() == late:
            done.wait(60)
            return None
        failure = attempt(group.barrier)
        done.set()
        return failure

    done = threading.Event()
    failures = [failure for failure in dist.run(main, 64, timeout=60.0) if failure is not None]
    first = timed_out(*failures)
    assert "rank 17 has not reached barrier(), call 2" in first.message
    assert "ranks 0-16, 18-63 have been in barrier()" in first.message
    assert "rank 17 is not in a meshdist call" in first.message


def wait_for_the_stopped():
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    group.barrier()
    if dist.get_rank() == 1:
        report("stop me")
        time.sleep(60)
        return None
    return attempt(group.barrier)


def test_a_stopped_rank_is_told_of_as_stopped(new_workers):
    # That a process is stopped is seen on its host.
    workers = new_workers(2)
    workers.start(wait_for_the_stopped)
    workers.reported(1)
    workers.signal(1, signal.SIGSTOP)
    failure = workers.outcome(0)
    assert failure.kind is dist.DistTimeoutError
    assert "rank 1 has not reached barrier(), call 2 on 'short of time'" in failure.message
    assert f"rank 1 is stopped by a signal; `kill -CONT {workers.pids[1]}` on " in failure.message


def wait_while_one_computes(enough):
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    group.barrier()
    if dist.get_rank() == 0:
        busy_in_own_code(enough)
        return None
    return attempt(group.barrier, announce=dist.get_rank() == 1)


def test_a_stopped_rank_that_has_made_the_call_is_not_missing(new_workers, tmp_path):
    workers = new_workers(3)
    workers.start(wait_while_one_computes, str(tmp_path / "enough"))
    workers.reported(1)
    workers.until_asleep(1)
    workers.signal(1, signal.SIGSTOP)
    failure = workers.outcome(2)
    workers.signal(1, signal.SIGCONT)
    open(tmp_path / "enough", "w").close()
    assert "rank 0 has not reached barrier(), call 2 on 'short of time'" in failure.message
    assert re.search(r"rank 2 has been in barrier\(\), .* waiting for rank 0\n", failure.message)
    assert "rank 1 is stopped by a signal" in failure.message
    workers.outcome(0)
    workers.outcome(1)


def receive_from_one_that_computes(enough):
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    group.barrier()
    if dist.get_rank() == 0:
        busy_in_own_code(enough)
        return None
    if dist.get_rank() == 1:
        report("stop me")
        time.sleep(60)
        return None
    return attempt(lambda: group.broadcast(np.ones(4), 0))


def test_a_stopped_rank_that_need_not_have_made_the_call_is_missing(new_workers, tmp_path):
    workers = new_workers(3)
    workers.start(receive_from_one_that_computes, str(tmp_path / "enough"))
    workers.reported(1)
    workers.signal(1, signal.SIGSTOP)
    failure = workers.outcome(2)
    open(tmp_path / "enough", "w").close()
    assert "timed out after 4 s waiting for rank 0 " in failure.message
    assert re.search(r"ranks 0, 1 have not reached broadcast\(.*\), call 2 on 'short of time'", failure.message)


def wait_for_one_that_computes(enough, is_async):
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    group.barrier()
    if dist.get_rank() == 0:
        busy_in_own_code(enough)
        return None
    if not is_async:
        return attempt(lambda: group.all_reduce(np.ones(4)), announce=True)
    return attempt(group.all_reduce(np.ones(4), async_op=True).wait, announce=True)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_rank_without_a_processor_until_its_timeout_has_expired_shows_it_too(new_workers, tmp_path, is_async):
    workers = new_workers(2)
    workers.start(wait_for_one_that_computes, str(tmp_path / "enough"), is_async)
    workers.reported(1)
    workers.until_asleep(1)
    workers.signal(1, signal.SIGSTOP)
    time.sleep(TIMEOUT_S)
    workers.signal(1, signal.SIGCONT)
    failure = workers.outcome(1)
    assert failure.kind is dist.DistTimeoutError
    assert "rank 0 has not reached all_reduce(float64[4], op=sum), call 2 on 'short of time'" in failure.message
    assert "rank 0 is not in a meshdist call" in failure.message
    open(tmp_path / "enough", "w").close()
    workers.outcome(0)


WITH_THE_STORE = """
import os, signal, sys, time
import numpy as np
import meshdist as dist

dist.init_process_group("gloo", timeout=TIMEOUT_S)
dist.barrier()
if dist.get_rank() == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
begun = time.monotonic()
try:
    dist.all_reduce(np.ones(4))
except dist.DistTimeoutError as error:
    print(f"after {time.monotonic() - begun:.3f} s: {error}", flush=True)
os._exit(0)
""".replace("TIMEOUT_S", "4")


def test_a_stopped_rank_that_holds_the_store_is_told_of_as_well(tmp_path, port):
    script = tmp_path / "script.py"
    script.write_text(WITH_THE_STORE)
    place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command, pipe = [sys.executable, str(script)], subprocess.PIPE
    ranks = [subprocess.Popen(command, env={**place, "RANK": str(k)}, stdout=pipe, text=True) for k in (0, 1)]
    try:
        said, _ = ranks[1].communicate(timeout=40)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = re.match(r"after ([\d.]+) s: .*timed out after 4 s waiting for rank 0 ", said)
    assert found, said
    assert float(found[1]) < 4 + 2, said
    assert f"rank 0 is stopped by a signal; `kill -CONT {ranks[0].pid}` on " in said


def frozen_in_a_library():
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)  # zeros: as PTHREAD_MUTEX_INITIALIZER
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def wait_for_the_frozen():
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    group.barrier()
    if dist.get_rank() == 1:
        frozen_in_a_library()
    return attempt(group.barrier)


def test_a_rank_that_is_frozen_in_a_library_shows_the_line_that_called_it(new_workers):
    workers = new_workers(2)
    workers.start(wait_for_the_frozen)
    failure = workers.outcome(0)
    assert failure.kind is dist.DistTimeoutError
    assert "rank 1 has not reached barrier(), call 2 on 'short of time'" in failure.message
    words = r"rank 1 did not respond: blocked in native code, called at .*"
    assert re.search(words + r"test_hang_reports.py:\d+ in frozen_in_a_library", failure.message), failure
