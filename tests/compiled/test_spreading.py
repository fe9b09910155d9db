"""Ranks that share processors are spread over them."""

import os
import subprocess
import sys

import pytest
from worlds import needs_linux

from meshdist import core

pytestmark = [needs_linux, pytest.mark.timeout(60)]
HAS_TWO = sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1
needs_core = pytest.mark.skipif(core.module is None or not HAS_TWO, reason="needs the core and two processors")

# One process stands for a rank whose peers have written where they run: the words are their places, and when one moved.
RANK = """
import os, sys
from meshdist import core

here, there = sorted(os.sched_getaffinity(0))[:2]
others = [{"here": here, "there": there}.get(place, -1) + 1 for place in sys.argv[2].split(",")]
words = memoryview(bytearray(8 * (len(others) + 2))).cast("Q")
words[1 : 1 + len(others)] = memoryview(b"".join(place.to_bytes(8, "little") for place in others)).cast("Q")
num_ranks = len(others) + 1
is_known = False
while not is_known:  # the kernel may have moved it to the other one just before
    os.sched_setaffinity(0, {here})
    if sys.argv[1] == "free":
        os.sched_setaffinity(0, {here, there})
    words[num_ranks] = 0
    before = os.sched_getaffinity(0)
    core.module.spread_ranks(words, 0, 1, num_ranks, num_ranks, 0)
    core.module.yield_processor()
    assert os.sched_getaffinity(0) == before
    has_moved = words[num_ranks] > 0
    is_known = words[0] == (there if has_moved else here) + 1
print("moved" if has_moved else "stayed")
if sys.argv[1] == "forked":
    words[0] = 0
    child = os.fork()
    if not child:
        core.module.yield_processor()
        os._exit(words[0])
    assert os.waitpid(child, 0)[1] == 0
core.module.begin_sleep()
assert words[0] == 0
core.module.yield_processor()
assert words[0] > 0
others = memoryview(bytearray(24)).cast("Q")
core.module.spread_ranks(others, 0, 1, 2, 1, 0)
assert words[0] == 0
core.module.leave_places(words)
core.module.yield_processor()
assert words[0] == 0 < others[0]
core.module.leave_places(others)
core.module.yield_processor()
assert others[0] == 0
"""


@needs_core
@pytest.mark.parametrize(
    ("how", "others", "expected"),
    [
        ("free", "here,here,there", "moved"),
        ("free", "here,none,none", "moved"),
        ("free", "here,there", "stayed"),
        ("free", "here,there,there", "stayed"),
        ("free", "none,none,there", "stayed"),
        ("bound", "here,here,there", "stayed"),
        ("forked", "here,there,there", "stayed"),
    ],
)
def test_a_rank_leaves_a_crowded_processor(how, others, expected):
    done = subprocess.run([sys.executable, "-c", RANK, how, others], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr


JOB = """
import os
import numpy as np
import meshdist as dist
from meshdist.core import module

def part_of_a_world():
    size = dist.get_world_size()
    assert not module.is_spread()
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    mesh["tp"].all_reduce(np.ones(1))
    found = [None] * size
    dist.all_gather_object(found, module.is_spread())
    return found

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
dist.init_process_group()
found = [part_of_a_world()]
dist.destroy_process_group()
dist.init_process_group()
found.append(part_of_a_world())
dist.destroy_process_group()
if os.environ["RANK"] == "0":
    print(found, module.is_spread())
"""


@needs_core
@pytest.mark.parametrize(("num_ranks", "switch", "expected"), [(4, "", True), (4, "0", False), (2, "1", False)])
def test_ranks_are_spread_where_they_share_processors(tmp_path, num_ranks, switch, expected):
    (tmp_path / "job.py").write_text(JOB)
    launch = [sys.executable, "-m", "meshdist.launch.meshrun", "-n", str(num_ranks), str(tmp_path / "job.py")]
    environment = {**os.environ, "MESHDIST_SPREADING": switch}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=50, env=environment)
    assert done.stdout == f"{[[expected] * num_ranks] * 2} False\n", done
