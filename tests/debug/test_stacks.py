"""The stacks of all threads, asked for at any time."""

import subprocess
import sys

import pytest

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


@pytest.mark.timeout(60)
def test_stacks_can_be_asked_for_while_garbage_is_collected():
    program = [sys.executable, "-c", ASKED_WHILE_GARBAGE_IS_COLLECTED]
    done = subprocess.run(program, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
