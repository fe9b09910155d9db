"""With a full /dev/shm or restricted sharing, calls work with one warning, or raise; never SIGBUS."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from without_features import logged, with_one_rank_that_does_not_read, without_memfd

import meshdist as dist
from meshdist.groups.world import current_world

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]


LACKS = {
    "no memfd": (without_memfd, "memfd_create is missing or refused: shared memory is in /dev/shm", [1, 1]),
    "no reading": (with_one_rank_that_does_not_read, "cannot read each other's memory (process_vm_readv)", [1, 0]),
}


def warnings_of_many_groups(lack):
    LACKS[lack][0]()
    texts = logged()
    for _ in range(3):
        assert dist.new_group().all_reduce(np.ones(100_000)).sum() == 200_000
    return texts


@pytest.mark.parametrize("lack", LACKS)
def test_what_is_lacking_is_said_once(new_workers, lack):
    workers = new_workers(2)
    workers.start(warnings_of_many_groups, lack)
    _, words, times = LACKS[lack]
    reports = workers.gather()
    assert [len(texts) for texts in reports] == times, reports
    assert all(words in text for texts in reports for text in texts), reports


# ---- /dev/shm of 64 KiB, in a mount namespace of the test's own

SCRIPT = """
import os, sys
import numpy as np
import meshdist as dist

def main(rank, has_memfd):
    if not has_memfd:
        del os.memfd_create
    dist.init_process_group("gloo", timeout=20)
    try:
        for count in (1, 1000, 1_000_000):
            assert dist.all_reduce(np.ones(count)).sum() == 2 * count
            if rank == 0:
                dist.send(np.ones(count), 1)
            else:
                dist.recv(np.ones(count), 0)
        print("all is right", flush=True)
    except dist.DistBackendError as error:
        print("DistBackendError", error, flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    dist.spawn(main, args=(sys.argv[1] == "memfd",), nprocs=2)
    print(os.listdir("/dev/shm"))
"""


def run_with_little(tmp_path, how):
    if shutil.which("unshare") is None:
        pytest.skip("needs the program unshare (util-linux)")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && head -c 60000 /dev/zero > /dev/shm/full && exec "$@"'
    within = ["unshare", "-m", "sh", "-c", mount, "sh"]
    can = subprocess.run([*within, "true"], capture_output=True, text=True, check=False)
    if can.returncode != 0:
        pytest.skip(f"a /dev/shm of one's own cannot be made here: {can.stderr.strip()}")
    return subprocess.run(
        [*within, sys.executable, str(path), how],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MESHDIST_SINGLE_COPY": "0"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_full_dev_shm_does_not_matter(tmp_path):
    done = run_with_little(tmp_path, "memfd")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["all is right", "all is right", "['full']"]


def test_a_full_dev_shm_that_is_needed_is_an_error(tmp_path):
    done = run_with_little(tmp_path, "no memfd")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert [line.partition(" ")[0] for line in lines[:2]] == ["DistBackendError"] * 2, done
    assert " bytes of shared memory are not available: " in lines[0]
    assert "on group 'world'" in lines[1]
    assert lines[2] == "['full']"


def the_memory_goes_before_its_creator_tells_why():
    from meshdist.backends.gloo.shm import shm_group

    rank, store, find = dist.get_rank(), current_world().store, shm_group.find
    if rank == 0:

        def remove_and_fail(segment, size):
            segment.seal()
            store.set("is removed", "")
            store.wait(["has tried"])
            raise dist.DistBackendError("no bytes of shared memory are available: so the test wants it")

        # Before it can be refused for anything else.
        remove_and_fail.num_bytes = shm_group.SharedRegion.num_bytes
        shm_group.SharedRegion = remove_and_fail
    else:

        def find_nothing(*args, **kwargs):
            store.wait(["is removed"])
            try:
                return find(*args, **kwargs)
            finally:
                store.set("has tried", "")

        shm_group.find = find_nothing
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(np.ones(3))
    return str(caught.value)


def test_a_rank_that_finds_its_peers_memory_removed_tells_why(new_workers):
    workers = new_workers(2)
    workers.start(the_memory_goes_before_its_creator_tells_why)
    reports = workers.gather()
    assert all("no bytes of shared memory are available: so the test wants it" in text for text in reports), reports
