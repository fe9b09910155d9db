"""Ranks return from rooted calls and scans before the others have come: data stays right, with the core, without, and
mixed.
"""

import os
import subprocess
import sys

import pytest

from meshdist import core

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]

# All ranks draw the same calls; each draws its own delays, in which it spins.
PROGRAM = """
import os, sys
rank, size, num_calls, cores, place = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
os.environ["MESHDIST_CORE"] = "require" if cores == "all" or (cores == "even" and rank % 2 == 0) else "python"
import random
import numpy as np
import meshdist as dist

dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size, timeout=60)
calls, delays = random.Random(size), random.Random(1000 * size + rank)
everyone = range(size)

def mine(count, of):
    return np.arange(count) + 1000.0 * of + number

def as_expected(x, expected):
    assert x.tolist() == expected.tolist(), (number, kind, root, x.tolist(), expected.tolist())

kinds = ("broadcast", "reduce", "gather", "scatter", "scan", "async broadcast", "async reduce")
others = ("all_reduce", "exscan", "barrier", "large broadcast", "large all_gather", "message", "second group")
second = dist.new_group()
number = 0
while number < num_calls:
    kind, root, count = calls.choice(kinds + kinds + others), calls.randrange(size), calls.choice((1, 1, 3, 20))
    for number in range(number, number + calls.randrange(1, 40)):
        for _ in range(delays.randrange(3000) if delays.random() < 0.05 else 0):
            pass
        total = sum(mine(count, other) for other in everyone)
        if kind == "broadcast":
            x = mine(count, rank)
            dist.broadcast(x, root)
            as_expected(x, mine(count, root))
            x[:] = -1
        elif kind == "async broadcast":
            x, y = mine(count, rank), mine(count, rank + 1)
            works = [dist.broadcast(each, root, async_op=True) for each in (x, y)]
            for work in works:
                work.wait()
            as_expected(x, mine(count, root))
            as_expected(y, mine(count, root + 1))
        elif kind in ("reduce", "async reduce"):
            x = mine(count, rank)
            if kind == "reduce":
                dist.reduce(x, root)
            else:
                dist.reduce(x, root, async_op=True).wait()
            if rank == root:
                as_expected(x, total)
            x[:] = -1
        elif kind == "gather":
            x, blocks = mine(count, rank), [np.zeros(count) for _ in everyone] if rank == root else None
            dist.gather(x, blocks, root)
            for other in everyone if rank == root else ():
                as_expected(blocks[other], mine(count, other))
            x[:] = -1
        elif kind == "scatter":
            x, blocks = np.zeros(count), [mine(count, other) for other in everyone] if rank == root else None
            dist.scatter(x, blocks, root)
            as_expected(x, mine(count, rank))
        elif kind in ("scan", "exscan"):
            x, end = mine(count, rank), rank + (kind == "scan")
            (dist.scan if kind == "scan" else dist.exscan)(x)
            as_expected(x, sum((mine(count, other) for other in range(end)), np.zeros(count)))
            x[:] = -1
        elif kind == "all_reduce":
            x = mine(count, rank)
            dist.all_reduce(x)
            as_expected(x, total)
        elif kind == "barrier":
            dist.barrier()
        elif kind == "large broadcast":
            x = mine(30_000, rank)
            dist.broadcast(x, root)
            as_expected(x[::999], mine(30_000, root)[::999])
        elif kind == "large all_gather":
            x = np.zeros(size * 5000)
            dist.all_gather_into_tensor(x, mine(5000, rank))
            as_expected(x[::777], np.concatenate([mine(5000, other) for other in everyone])[::777])
        elif kind == "message" and size > 1:
            x = np.zeros(count)
            work = dist.irecv(x, (rank - 1) % size)
            dist.send(mine(count, rank), (rank + 1) % size)
            work.wait()
            as_expected(x, mine(count, (rank - 1) % size))
        elif kind == "second group":
            x, y = mine(count, rank), mine(count, rank + 5)
            dist.broadcast(x, root)
            second.broadcast(y, root)
            as_expected(x, mine(count, root))
            as_expected(y, mine(count, root + 5))
dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("cores", ["all", "even", "none"])
def test_no_slot_is_written_before_it_is_read(tmp_path, cores, size):
    if cores != "none" and core.module is None:
        pytest.skip(f"there is no compiled core: {core.missing}")
    num_calls = 8000 if cores == "all" else 4000
    rest = (str(size), str(num_calls), cores, f"file://{tmp_path}/store")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), *rest], env=env, stdout=-1, stderr=-1, text=True)
        for rank in range(size)
    ]
    try:
        assert [rank.communicate(timeout=100) for rank in ranks] == [("done\n", "")] * size
    finally:
        for rank in ranks:
            rank.kill()
