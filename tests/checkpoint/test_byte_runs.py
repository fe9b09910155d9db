"""Blocks of arrays in files, checksums, names and owners: arithmetic without ranks."""

import math
import os

import numpy as np
import pytest
from array_layouts import random_layout, random_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdist.checkpoint.block_owners import SPLIT_BYTES, Held, assign_pieces, check_alike, index_at, written_layout
from meshdist.checkpoint.byte_runs import read_block, run_bytes, run_offsets, shape_of, whole, within, write_block
from meshdist.checkpoint.checksum import Checksum, checksum_of
from meshdist.checkpoint.file_access import CachedFile
from meshdist.checkpoint.tree_names import Named, merged, rebuilt
from meshdist.tensor import Replicate, Shard
from meshdist.tensor.array_layout import ArrayLayout

spans = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted).map(tuple)
blocks = st.lists(st.tuples(spans, st.integers(0, 3)), max_size=4).map(
    lambda dims: (tuple(stop + more for (_, stop), more in dims), tuple(span for span, _ in dims))
)
QUICK = settings(max_examples=60)


@QUICK
@given(blocks, st.sampled_from(["int8", "float32", "complex128", ">i4"]))
def test_a_block_is_written_and_read_where_it_lies(tmp_path_factory, block, dtype):
    shape, index = block
    whole_array = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    path = tmp_path_factory.getbasetemp() / "block"
    path.write_bytes(b"\xff" * (7 + whole_array.nbytes))
    fd = os.open(path, os.O_RDWR)
    try:
        write_block(CachedFile(fd), 7, shape, index, whole_array[within(index, whole(shape))])
        read = read_block(CachedFile(fd), 7, shape, index, np.dtype(dtype))
    finally:
        os.close(fd)
    np.testing.assert_array_equal(read, whole_array[within(index, whole(shape))])
    expected = np.full(whole_array.nbytes, 0xFF, np.uint8)
    little = whole_array.astype(np.dtype(dtype).newbyteorder("<")).reshape(-1).view(np.uint8)
    positions = np.arange(math.prod(shape)).reshape(shape)[within(index, whole(shape))].reshape(-1)
    itemsize = np.dtype(dtype).itemsize
    mine = (positions[:, None] * itemsize + np.arange(itemsize)).reshape(-1)
    expected[mine] = little[mine]
    assert path.read_bytes() == b"\xff" * 7 + expected.tobytes()
    if math.prod(shape_of(index)):
        assert len(run_offsets(shape, index, 1)) * run_bytes(shape, index, 1) == math.prod(shape_of(index))


class CountedReads:
    """Counts the bytes that os.preadv reads."""

    def __init__(self, monkeypatch):
        self.nbytes, real = 0, os.preadv

        def preadv(fd, buffers, offset):
            count = real(fd, buffers, offset)
            self.nbytes += count
            return count

        monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize(
    ("shape", "index", "most"),
    [
        ((64, 4096), ((16, 32), (0, 4096)), 1),  # rows
        ((8, 1 << 16), ((0, 8), (0, 1 << 14)), 1),  # long runs
        ((8, 1 << 16), ((0, 8), (0, 64)), 1),  # short runs far apart
        ((512, 64), ((0, 512), (16, 32)), 4),  # short runs near each other, with what is between them
        ((4, 512, 64), ((1, 3), (0, 512), (16, 32)), 4),
    ],
)
def test_a_rank_reads_little_but_its_own_bytes(tmp_path, monkeypatch, shape, index, most):
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    array.tofile(tmp_path / "array")
    fd = os.open(tmp_path / "array", os.O_RDONLY)
    counted = CountedReads(monkeypatch)
    try:
        found = read_block(CachedFile(fd), 0, shape, index, array.dtype)
    finally:
        os.close(fd)
    np.testing.assert_array_equal(found, array[within(index, whole(shape))])
    assert found.nbytes <= counted.nbytes <= most * found.nbytes


def plain_checksum(data):
    words = np.frombuffer(data + bytes(-len(data) % 512), "<u8").reshape(-1, 64)
    sums = [sum(map(int, row)) for row in words]
    return f"{sum(sums) % 2**64:016x}{sum(n * s for n, s in enumerate(sums, 1)) % 2**64:016x}"


@QUICK
@given(st.lists(st.integers(0, 1500), max_size=5), st.randoms(use_true_random=False))
def test_checksums_do_not_depend_on_the_parts(lengths, random):
    parts = [random.randbytes(length) for length in lengths]
    checksum = Checksum()
    for part in parts:
        checksum.add(np.frombuffer(part, np.uint8))
        checksum.text()  # may be asked for in between
    assert checksum.text() == plain_checksum(b"".join(parts))


def test_every_changed_byte_and_swapped_sector_changes_the_checksum():
    data = np.random.default_rng(0).integers(0, 256, 1600, dtype=np.uint8)
    good = checksum_of(data)
    for place in range(data.size):
        data[place] ^= 1 << place % 8
        assert checksum_of(data) != good
        data[place] ^= 1 << place % 8
    data[:512], data[512:1024] = data[512:1024].copy(), data[:512].copy()
    assert checksum_of(data) != good


def test_the_checksum_is_that_of_the_elements_in_order():
    array = np.arange(60000, dtype=np.int32).reshape(300, 200)
    assert checksum_of(array.T) == checksum_of(array.T.copy()) == plain_checksum(array.T.tobytes())
    assert checksum_of(array[::2, 3:].astype(">i4")) == plain_checksum(array[::2, 3:].tobytes())


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("by_chunks", [False, True])
def test_every_element_is_written_once_by_one_who_has_it(seed, by_chunks):
    rng = np.random.default_rng(seed)
    mesh_shape = [(2,), (3,), (2, 2), (2, 3)][seed % 4]
    num_ranks, shape = math.prod(mesh_shape), random_shape(rng)
    layout = written_layout(random_layout(rng, shape, mesh_shape, ("sum",)), 8, by_chunks)
    held = {rank: Held(shape, "float64", layout, tuple(range(num_ranks))) for rank in range(num_ranks)}
    check_alike({"x": held})
    writers = np.zeros(shape, int)
    pieces = assign_pieces({"x": held}, num_ranks, by_chunks)["x"]
    for piece in pieces:
        writers[within(piece.block, whole(shape))] += 1
        coordinate = tuple(int(at) for at in np.unravel_index(piece.owner, mesh_shape))
        own = index_at(layout, coordinate)
        assert all(start <= a and b <= stop for (a, b), (start, stop) in zip(piece.block, own, strict=True))
    assert (writers == 1).all()
    if by_chunks and pieces:  # a grid of equal chunks, but for the last ones
        chunks = [max(rows) for rows in zip(*(shape_of(piece.block) for piece in pieces), strict=True)]
        assert all(a % rows == 0 for piece in pieces for (a, _), rows in zip(piece.block, chunks, strict=True))


def test_what_all_ranks_hold_is_written_by_all():
    rows = 4 * SPLIT_BYTES // 8
    large = Held((rows,), "float64")
    small = {f"b{n}": dict.fromkeys(range(4), Held((10,), "float64")) for n in range(8)}
    pieces = assign_pieces({"w": dict.fromkeys(range(4), large), **small}, 4, False)
    assert [piece.owner for piece in pieces["w"]] == [0, 1, 2, 3]
    assert sorted(piece.owner for name in small for piece in pieces[name]) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_columns_are_written_as_rows():
    columns = ArrayLayout.of((1000, 40), (4,), [Shard(1)])
    assert written_layout(columns, 4, False).placements == (Shard(0),)
    wide = ArrayLayout.of((10, 1 << 20), (4,), [Shard(1)])
    assert written_layout(wide, 4, False) is wide
    assert written_layout(ArrayLayout.of((7,), (2, 2), [Replicate(), Shard(0)]), 4, True).cuts[0].sizes == (4, 3)


def test_trees_are_put_together_again():
    tree = {"a": [np.ones(2), (1, None)], 3: {"x.y": np.float32(2)}, "t": (float("-inf"), 1 << 99, b"\0", 1j, True)}
    named = Named(tree)
    assert sorted(named.arrays) == ["3.x.y", "a.0"]
    found = rebuilt(named.structure, lambda kind, name: named.arrays[name])
    assert found["t"] == tree["t"]
    assert found[3]["x.y"] == 2
    assert found["a"][1] == (1, None)


def test_trees_of_stages_are_merged_and_other_differences_named():
    first, second = ({"w": {"0": np.ones(1)}, "n": 1}, {"w": {"1": np.ones(1)}, "n": 1})
    both = merged([Named(first).structure, Named(second).structure])
    assert rebuilt(both, lambda kind, name: name) == {"w": {"0": "w.0", "1": "w.1"}, "n": 1}
    assert merged([Named([None]).structure, Named([np.ones(1)]).structure]) == ["list", [["array", "0"]]]
    with pytest.raises(ValueError, match=r"tree\['w'\] is a list of 1 on one rank and of 2 on another"):
        merged([Named({"w": [1]}).structure, Named({"w": [1, 2]}).structure])


def in_itself():
    part = [()]
    part.append({"n": ((), part[0]), "b": part})
    return {"a": part}


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({"a": {1, 2}}, TypeError, r"tree\['a'\]: expected arrays, numbers, .* got set; nothing is pickled"),
        ({1.5: 2}, TypeError, r"tree: keys must be strings or integers, got 1.5 \(float\)"),
        ({"a": {"b": np.ones(1)}, "a.b": np.ones(1)}, ValueError, r"'a.b' is the name of two arrays; rename a key"),
        ({"__metadata__": np.ones(1)}, ValueError, "names the header of safetensors; rename a key"),
        ({"a": np.array(["x"])}, TypeError, r"tree\['a'\] has the unsupported dtype <U1; supported are bool"),
        ([np.array([object()])], TypeError, r"tree\[0\] has the unsupported dtype object"),
        (in_itself(), ValueError, r"tree\['a'\]\[1\]\['b'\] is tree\['a'\], which contains it: a tree cannot contain"),
    ],
)
def test_what_cannot_be_saved_is_named(tree, error, message):
    with pytest.raises(error, match=message):
        Named(tree)
