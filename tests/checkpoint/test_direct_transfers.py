"""Large blocks go past the page cache, and are the same bytes wherever they begin and end."""

import errno
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import meshdist
from meshdist.checkpoint import load, save
from meshdist.checkpoint.direct_io import DirectFile, HugePages, is_cached
from meshdist.checkpoint.file_access import CachedFile, is_in_memory
from meshdist.tensor import Shard, distribute_tensor, empty

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="direct transfers are for Linux")
MIB = 1 << 20


class Transfers:
    """Counts the bytes that go through descriptors with O_DIRECT, or refuses them as a file system may."""

    def __init__(self, monkeypatch, refused=False):
        import fcntl

        self._counts, preadv, pwrite = [], os.preadv, os.pwrite

        def counted(call, fd, *arguments):
            is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            if is_direct and refused:
                raise OSError(errno.EINVAL, "Invalid argument")
            count = call(fd, *arguments)
            self._counts.append(count * is_direct)
            return count

        monkeypatch.setattr(os, "preadv", lambda *arguments: counted(preadv, *arguments))
        monkeypatch.setattr(os, "pwrite", lambda *arguments: counted(pwrite, *arguments))

    @property
    def nbytes(self):
        return sum(self._counts)


@pytest.fixture
def path(tmp_path):
    """A file of 16 MiB where direct transfers are possible."""
    path = tmp_path / "file"
    path.write_bytes(b"\xff" * (16 * MIB))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct transfers")
    return path


def drop(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    cached = is_cached(fd, 0, path.stat().st_size)
    os.close(fd)
    if cached:
        pytest.skip("this file system keeps its pages in memory")


def write(path, parts):
    file = DirectFile(os.open(path, os.O_WRONLY), path, HugePages())
    for offset, data in parts:
        file.write(data, offset)
    file.flush()
    file.close()
    os.close(file.fd)


def read(path, offset, nbytes, kind=DirectFile):
    fd = os.open(path, os.O_RDONLY)
    file = CachedFile(fd) if kind is CachedFile else DirectFile(fd, path, HugePages())
    out = np.zeros(nbytes, np.uint8)
    try:
        parts = list(file.fill(out, offset))
    finally:
        file.close()
        os.close(fd)
    assert sum(part.size for part in parts) == nbytes
    assert all(np.shares_memory(part, out) for part in parts if part.size)
    return out


@pytest.mark.parametrize("refused", [False, True], ids=["direct", "refused"])
@pytest.mark.parametrize(
    ("offset", "sizes"),
    [(0, [2 * MIB]), (4096, [4 * MIB, 4 * MIB]), (5001, [MIB, 300_001, MIB + 7]), (8 * MIB - 1, [4 * MIB + 3, 1])],
)
def test_bytes_are_written_and_read_where_they_lie(path, monkeypatch, offset, sizes, refused):
    data = np.random.default_rng(offset).integers(0, 256, sum(sizes), np.uint8)
    transfers = Transfers(monkeypatch, refused)
    starts = np.cumsum([0, *sizes])
    parts = [(offset + a, data[a:b].copy()) for a, b in pairwise(starts)]
    write(path, [*parts, (15 * MIB, np.zeros(9, np.uint8))])
    expected = np.full(16 * MIB, 0xFF, np.uint8)
    expected[offset : offset + data.size] = data
    expected[15 * MIB : 15 * MIB + 9] = 0
    assert path.read_bytes() == expected.tobytes()
    drop(path)
    assert (read(path, offset, data.size) == data).all()
    assert (transfers.nbytes >= 2 * (data.size - 3 * 4096)) == (not refused)


def test_a_file_that_ends_early_is_an_error(path):
    os.truncate(path, 3 * MIB + 17)
    drop(path)
    assert (read(path, 3, 3 * MIB + 14) == 0xFF).all()
    drop(path)
    with pytest.raises(EOFError, match=f"the file ends at byte {3 * MIB + 17}"):
        read(path, 3, 3 * MIB + 15)


def test_what_is_in_the_page_cache_is_read_from_there(path, monkeypatch):
    drop(path)
    read(path, 0, 16 * MIB, CachedFile)
    transfers = Transfers(monkeypatch)
    read(path, 0, 16 * MIB)
    assert transfers.nbytes == 0


def save_both(directory, w):
    mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    save(directory, {"w": distribute_tensor(w, mesh, [Shard(0)]), "b": w}, step=0)


def test_what_all_ranks_read_goes_through_the_page_cache(path, tmp_path, monkeypatch):
    w = np.arange(MIB, dtype="f8").reshape(1024, 1024)
    meshdist.run(save_both, 2, args=(tmp_path / "runs", w))
    file = tmp_path / "runs" / "step-0" / "model.safetensors"
    drop(file)
    transfers = Transfers(monkeypatch)

    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        like = {"w": empty(w.shape, w.dtype, mesh=mesh, placements=[Shard(0)])}
        part = load(tmp_path / "runs", like, strict=False)["w"]
        first = transfers.nbytes
        meshdist.barrier()
        assert (load(tmp_path / "runs", {"b": np.empty_like(w)}, strict=False)["b"] == w).all()
        return (part.to_local() == w[mesh.get_rank() * 512 :][:512]).all(), first

    found = meshdist.run(program, 2)
    assert all(right for right, _ in found)
    assert transfers.nbytes == w.nbytes == max(first for _, first in found)


@pytest.fixture
def in_memory():
    """A folder of a file system that is in memory."""
    if not is_in_memory(Path("/dev/shm")):
        pytest.skip("/dev/shm is on a disk")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_ranks_write_several_files_where_these_are_in_memory(in_memory, tmp_path, monkeypatch):
    monkeypatch.setattr("meshdist.checkpoint.planning._LEAST_FILE_BYTES", 1 << 16)
    arrays = {f"w{number}": np.arange(number, number + (1 << 18), dtype=np.float64) for number in range(5)}

    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,))
        tree = {name: distribute_tensor(array, mesh, [Shard(0)]) for name, array in arrays.items()}
        for folder in (in_memory, in_memory, tmp_path):
            save(folder / "checkpoints", tree, keep=1)
            found = load(
                folder / "checkpoints",
                {name: empty((1 << 18,), np.float64, mesh=mesh, placements=[Shard(0)]) for name in arrays},
            )
            assert all(np.array_equal(found[name].full(), array) for name, array in arrays.items())
        return [len([*folder.glob("*/*/*.safetensors")]) for folder in (in_memory, tmp_path)]

    # Of a quarter of the bytes or less.
    assert meshdist.run(program, 2)[0] == [5, 5 if is_in_memory(tmp_path) else 1]
