"""The stacks of all threads, asked for at any time."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from until import until

import meshdist as dist
from meshdist.debug import stacks as stacks_module
from meshdist.debug.stacks import own_threads, stacks

ASKED_WHILE_GARBAGE_IS_COLLECTED = """
import gc, threading
from meshdist.debug.stacks import stacks

class Ring:
    def __init__(self):
        self.ring, self.local = self, threading.local()
        self.local.x = 1

def deep(number):
    deep(number - 1) if number else threading.Event().wait()

threading.Thread(target=deep, args=[20], daemon=True).start()
# So many objects after the last time, garbage is collected: at any point of the call, the one that matters among them.
for number in range(200):
    gc.disable()
    gc.collect()
    dicts = [{} for _ in range(50)]
    del dicts  # what a dict is made of without an allocation
    Ring()
    gc.set_threshold(number + 1)
    gc.enable()
    assert len(stacks()) == 2
assert gc.isenabled()
print("well")
"""

# Here a finalizer lets the other thread end, and the memory of its frames is used again.
A_THREAD_ENDS_MEANWHILE = """
import gc, threading
from meshdist.debug.stacks import stacks

class EndsThread:
    def __init__(self, thread, event):
        self.ring, self.thread, self.event = self, thread, event
    def __del__(self):
        self.event.set()
        self.thread.join(20)
        self.other = threading.Thread(target=deep, args=[9, wait_event], daemon=True)
        self.other.start()

def deep(number, event):
    deep(number - 1, event) if number else event.wait(20)

wait_event = threading.Event()
for number in range(0, 150, 2):
    gc.disable()
    gc.collect()
    event = threading.Event()
    thread = threading.Thread(target=deep, args=[20, event], daemon=True)
    thread.start()
    EndsThread(thread, event)
    gc.set_threshold(number + 1)
    gc.enable()
    stacks()
    gc.collect()
    wait_event.set()
    wait_event = threading.Event()
print("well")
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("program", [ASKED_WHILE_GARBAGE_IS_COLLECTED, A_THREAD_ENDS_MEANWHILE], ids=["local", "end"])
def test_stacks_can_be_asked_for_while_garbage_is_collected(program):
    program = [sys.executable, "-c", program]
    done = subprocess.run(program, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


def test_stacks_can_be_asked_for_while_another_thread_that_waits_for_this_one_reads_them():
    with stacks_module._no_garbage_is_collected(), ThreadPoolExecutor(1) as other:
        assert threading.get_ident() in other.submit(stacks).result(timeout=20)


@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])
def test_a_stack_ends_at_the_users_line_but_at_detail(level):
    before, found = dist.get_debug_level(), {}

    def main():
        if dist.get_rank() == 0:
            found["thread"] = threading.get_ident()
            dist.recv(np.empty(1), 1)
            return
        until(lambda: "thread" in found and stacks()[found["thread"]].in_call, "rank 0 waits")
        found["stack"] = stacks()[found["thread"]]
        dist.send(np.ones(1), 0)

    dist.set_debug_level(level)
    try:
        dist.run(main, 2)
    finally:
        dist.set_debug_level(before)
    stack = found["stack"]
    assert stack.place.endswith("in main")
    assert (stack.lines[-1] == stack.place) == (level is dist.DebugLevel.OFF)


IN_A_PROCESS = """
import meshdist as dist
from meshdist.debug.stacks import stacks

def main(rank):
    [stack] = stacks().values()
    print(*stack.lines, sep="\\n")

if __name__ == "__main__":
    dist.spawn(main)
"""


def test_the_stack_of_a_spawned_rank_begins_with_its_function(tmp_path):
    (tmp_path / "script.py").write_text(IN_A_PROCESS)
    program = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=50)
    first = done.stdout.splitlines()[0]
    assert first.endswith("script.py:6 in main"), done


def test_a_pool_that_has_nothing_to_do_runs_no_code_of_the_user():
    before, is_over = own_threads((), ()), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        until(lambda: own_threads((), ()) == before, "the thread is idle")
        pool.submit(is_over.wait)
        until(lambda: len(own_threads((), ())) == len(before) + 1, "the thread is busy")
        is_over.set()


def test_the_event_loop_that_zarr_leaves_behind_runs_no_code_of_the_user():
    zarr = pytest.importorskip("zarr")
    zarr.save_array(zarr.storage.MemoryStore(), np.ones(2))
    assert any(thread.name == "zarr_io" for thread in threading.enumerate())
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    assert "zarr_io" not in {names.get(number) for number in own_threads((), ())}


def receive_from_each_other():
    dist.recv(np.empty(1), 1 - dist.get_rank())


@pytest.mark.timeout(60)
def test_beside_an_idle_pool_a_circle_of_threads_is_proven():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with pytest.raises(dist.DistBackendError, match="deadlock: the ranks wait for each other"):
            dist.run(receive_from_each_other, 2, timeout=40)


def test_the_traceback_of_a_rank_that_is_a_thread_goes_on_in_the_code_of_the_user():
    def main():
        dist.recv(np.ones(3), 7)

    with pytest.raises(ValueError, match="src must be a rank in the group") as caught:
        dist.run(main, 2)
    here, ours, inner = (entry.path.name for entry in caught.traceback)
    assert (here, ours, inner) == (Path(__file__).name, "user_traceback.py", Path(__file__).name)
