"""The compiled core under the address and undefined-behaviour sanitizers."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from meshdist import core

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.slow,
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]
ROOT = Path(__file__).parents[2]
FLAGS = ("-std=c11", "-O1", "-g", "-fPIC", "-pthread", "-shared", "-fno-omit-frame-pointer")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")

PROGRAM = """
import gc, itertools, sys
import numpy as np
import meshdist as dist

def main(rank, size):
    dist.init_process_group("gloo", timeout=60)
    lists = [np.zeros(3) for _ in range(size)]
    row = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    for op, dtype in itertools.product(("sum", "max", "product", "band", "avg"), ("f4", "f8", "i2", "u1", "c8", "?")):
        for count in (0, 1, 7, 1000):
            x = np.ones(count, dtype)
            try:
                for _ in range(4):
                    dist.all_reduce(x, op)
            except TypeError:
                continue
    for number in range(30):
        x = np.ones(3 + number % 5)
        dist.all_reduce(x)
        dist.broadcast(x, src=number % size)
        dist.all_gather(lists, np.ones(3))
        dist.reduce_scatter(lists[0], lists)
        block, whole = np.ones(number + 2), np.ones(size * (number + 2))
        dist.all_gather_into_tensor(whole, block)
        dist.reduce_scatter_tensor(block, whole)
        dist.all_gather([np.zeros_like(block) for _ in range(size)], block)
        rows = [number % 3 + (peer + rank) % 2 for peer in range(size)]
        dist.all_to_all_single(np.zeros((sum(rows), 3)), np.ones((sum(rows), 3)), rows, rows)
        dist.all_to_all_single(np.zeros(2 * size), np.ones(2 * size))
        dist.barrier()
        y = np.ones(2)
        works = [dist.all_reduce(y, async_op=True) for _ in range(20)]
        works[7].get_future().then(lambda done: done.value())
        if number % 2:
            dist.all_reduce(y)
        for work in works[:: 1 - 2 * (rank % 2)]:
            work.wait()
        if rank < 2:
            dist.send(x, 1 - rank)
            dist.recv(x, 1 - rank)
            receiving = dist.irecv(lists[0][: number % 4], 1 - rank, tag=number)
            dist.send(np.ones(number % 4), 1 - rank, tag=number)
            receiving.wait()
            for tags in ((0, 1), (1, 0)):
                taken = [np.zeros(2) for _ in tags]
                works = [dist.irecv(into, 1 - rank, tag=tag) for into, tag in zip(taken, (0, 1))]
                works += [dist.isend(y, 1 - rank, tag=tag) for tag in tags]
                for work in works:
                    work.wait()
            for count in (10_000, 50_000, 1 << 17, 200_000):
                long, into = np.ones(count), np.zeros(count)
                works = [dist.irecv(into, 1 - rank), dist.isend(long, 1 - rank)]
                for work in works:
                    work.wait()
                for sender in (0, 1):
                    dist.send(long, 1 - rank) if rank == sender else dist.recv(into, 1 - rank)
                receiving = dist.irecv(into, 1 - rank)
                dist.send(long, 1 - rank)
                receiving.wait()
        if rank:
            for tag in (6, 1, 2, 3, 4, 5):
                objects = [b"." * (number << 9)]
                dist.send(y, 0, tag=tag) if tag not in (4, 5) else dist.send_object_list(objects, 0, tag=tag)
            dist.send_object(objects, 0, tag=7)
        else:
            for _ in range(1, size):
                dist.recv(y, tag=6)
                dist.irecv(y, tag=1).wait()
                dist.wait_any([dist.irecv(y, tag=2)])
                dist.recv(y, dist.probe(tag=3).source, tag=3)
                while dist.iprobe(tag=4) is None:
                    pass
                dist.recv_object_list([None], tag=4)
                dist.irecv_object_list(tag=5).result()
                dist.recv_object(tag=7)
        around = (rank + 1) % size, (rank - 1) % size
        dist.sendrecv(y, np.zeros(2), *around)
        for _ in range(3):
            row.shift(y, out=np.zeros(2))
            row.halo_exchange(np.ones((4, 3)), periodic=bool(number % 2))
            cube = np.ones((9, 5, 4))
            row.halo_exchange(cube, dims=[2])
            row.shift(cube[::-2, :, 1], out=cube[:5, :, 3])
            dist.sendrecv(cube[:, -2], cube[:, 0], *around)
            works = [dist.irecv(cube[..., 0], around[1]), dist.isend(cube[..., 2], around[0])]
            for work in works:
                work.wait()
        long, longs = np.ones(50_000), [np.zeros(50_000) for _ in range(size)]
        dist.all_reduce(long, "max")
        dist.broadcast(long, src=number % size)
        dist.all_gather(longs, long)
        dist.all_to_all(longs, [long] * size)
        dist.reduce_scatter(long, longs, "avg")
        with dist.new_group() as group:
            for _ in range(4):
                group.all_reduce(x, op=dist.ReduceOp.MAX)
    # In every way, one after another; some lengths are no multiple of a chunk, and some blocks have fewer chunks.
    whole, parts = np.ones(300_003, "f4"), [np.ones(100_001, "f4") for _ in range(size)]
    tables = [np.ones((200, 1500), "f4") for _ in range(size)]
    unequal = [np.ones(1 + 70_000 * ((rank + peer) % 3), "f4") for peer in range(size)]
    for _ in range(70):
        dist.all_reduce(whole, "max")
        dist.reduce(whole, 1, "max")
        dist.broadcast(whole, src=2)
        dist.all_gather_into_tensor(whole, parts[0])
        dist.scatter(parts[0], parts if rank == 1 else None, src=1)
        dist.reduce_scatter(parts[0], parts, "min")
        dist.all_to_all_single(whole, whole.copy())
        dist.all_to_all([np.empty_like(array) for array in unequal], unequal)
        for length in (3, 700):
            dist.all_to_all([table[:, :length] for table in tables], [table[::-1, -length:] for table in tables])
    group = dist.new_group()
    for _ in range(4):
        group.all_reduce(x)
        group.all_reduce(y, async_op=True).wait()
    try:
        group.all_reduce(x) if rank else group.barrier()
    except dist.DistBackendError:
        pass
    with dist.new_group() as group:
        for _ in range(4):
            group.all_reduce(y, async_op=True).wait()
        works = [group.all_reduce(y, async_op=True) for _ in range(3)]
        try:
            works[2].wait() if rank else group.abort("enough")
        except dist.DistBackendError:
            pass
    gc.collect()
    dist.destroy_process_group()

if __name__ == "__main__":
    dist.spawn(main, args=(3,), nprocs=3)
    print(dist.core.status())
"""


def test_nothing_is_found(tmp_path):
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"the compiler {compiler[0]} is not here")
    shutil.copytree(ROOT / "meshdist", tmp_path / "meshdist", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    place = tmp_path / "meshdist" / "core"
    sources = [str(path) for path in sorted(place.glob("*.c"))]
    target = place / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = f"-I{sysconfig.get_path('include')}"
    made = subprocess.run(
        [*compiler, *FLAGS, *SANITIZERS, include, *sources, "-o", target], capture_output=True, text=True
    )
    runtime = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if made.returncode != 0 or not os.path.isabs(runtime):
        pytest.skip(f"the sanitizers are not here: {made.stderr.strip() or runtime}")
    (tmp_path / "program.py").write_text(PROGRAM)
    packages = [path for path in sys.path if path.endswith("-packages")]
    env = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "MESHDIST_CORE": "require",
        "MESHDIST_TUNING": "force",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *packages]),
    }
    command = [sys.executable, tmp_path / "program.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("used (")
