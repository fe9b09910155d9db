"""Damaged files are noticed on any mesh: ranks that read parts of a piece add up their checksums."""

import math
from itertools import pairwise

import numpy as np
import pytest
from array_layouts import random_layout, random_shape
from checkpoint_trees import DTYPES, dtype_named, mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import needs_linux

import meshdist
from meshdist.checkpoint import CheckpointError, load, save
from meshdist.checkpoint.byte_runs import overlap_of, whole, within
from meshdist.checkpoint.checksum import checksum_of, text_of
from meshdist.checkpoint.opening import Opened
from meshdist.checkpoint.partial_checksums import sums_within
from meshdist.tensor import Replicate, Shard, distribute_tensor, empty

FORMATS = ["safetensors", "npy", "zarr"]
MESHES = [(1,), (2,), (3,), (2, 2)]


def needs(format):
    if format == "zarr":
        pytest.importorskip("zarr", minversion="3", reason="zarr 3 is not installed")


def added_up(array, blocks):
    sums = [sums_within(array[within(block, whole(array.shape))], block, whole(array.shape)) for block in blocks]
    return text_of(tuple(sum(values) % 2**64 for values in zip(*sums, strict=True)))


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([*DTYPES, ">f8", ">u2"]), st.sampled_from([1, 60, 3000]))
def test_the_sums_of_parts_add_up_to_the_checksum(seed, dtype, columns):
    rng = np.random.default_rng(seed)
    shape = (*rng.integers(1, 6, rng.integers(0, 3)).tolist(), int(rng.integers(1, 9)) * columns)
    array = np.empty(shape, dtype_named(dtype))
    array[...] = np.frombuffer(rng.bytes(array.nbytes), array.dtype).reshape(shape)
    array = np.array(array, order="F") if seed % 3 == 0 else array
    layout = random_layout(rng, shape, (2, 3))
    blocks = {tuple((part.start, part.stop) for part in layout.index(at)) for at in layout.coordinates()}
    blocks = [block for block in blocks if overlap_of(block, whole(shape))]
    assert added_up(array, blocks) == checksum_of(array)


@pytest.mark.parametrize("cuts", [(0, 1, 700, 1000), (0, 4096, 8192, 30000), (0, 30000)])
@pytest.mark.parametrize("dtype", ["uint8", ">f4", "complex128"])
def test_parts_with_runs_of_any_length_add_up(cuts, dtype):
    """Those are summed up one by one or many at once, in parts of the cache's size."""
    array = np.random.default_rng(0).integers(0, 256, (70, 30000)).astype(dtype)[:, : cuts[-1]]
    blocks = [((0, 70), span) for span in pairwise(cuts)]
    assert added_up(array, blocks) == checksum_of(array)


def change_byte(path, name, at):
    """Change a byte of a stored array."""
    opened = Opened.at(path)
    stored = opened.manifest.arrays[name]
    file = opened.folder / stored.file
    if opened.manifest.format == "zarr":
        array = pytest.importorskip("zarr").open_array(str(file), mode="r+")
        data = bytearray(np.asarray(array[...]).tobytes())
        data[at] ^= 1 << at % 8
        array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)
        return
    data = bytearray(file.read_bytes())
    data[(stored.offset or 0) + at] ^= 1 << at % 8
    file.write_bytes(data)


def save_alone(directory, format="safetensors", **tree):
    needs(format)
    meshdist.run(lambda: str(save(directory, tree, step=0, format=format)), 1)


def save_one(directory, array, mesh_shape, seed, format):
    layout = random_layout(np.random.default_rng(seed), array.shape, mesh_shape)
    save(directory, {"x": distribute_tensor(array, mesh_of(mesh_shape), layout.placements)}, step=0, format=format)


def load_one(directory, array, mesh_shape, seed):
    layout = random_layout(np.random.default_rng(seed), array.shape, mesh_shape)
    like = empty(array.shape, array.dtype, mesh=mesh_of(mesh_shape), placements=layout.placements)
    return load(directory, {"x": like})["x"].full().tobytes() == array.tobytes()


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
    first=st.sampled_from(MESHES),
    then=st.sampled_from(MESHES),
    at=st.integers(0, 2**20),
)
def test_a_changed_byte_is_noticed_on_any_mesh(tmp_path_factory, format, seed, dtype, first, then, at):
    needs(format)
    rng = np.random.default_rng(seed)
    array = (rng.integers(0, 2, random_shape(rng)) + 1).astype(dtype_named(dtype))
    directory = tmp_path_factory.mktemp("damage")
    meshdist.run(save_one, math.prod(first), args=(directory, array, first, seed, format))
    assert all(meshdist.run(load_one, math.prod(then), args=(directory, array, then, seed + 1)))
    if array.nbytes:
        change_byte(directory, "x", at % array.nbytes)
        with pytest.raises(CheckpointError, match="damaged: array 'x' is not what was written, at "):
            meshdist.run(load_one, math.prod(then), args=(directory, array, then, seed + 1))


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)]])
@pytest.mark.parametrize(("format", "options"), [*((format, {}) for format in FORMATS), ("npy", {"strict": False})])
def test_all_ranks_raise_the_error_that_names_the_file_and_the_array(tmp_path, placements, format, options):
    save_alone(tmp_path, format, x=np.arange(64 * 64.0).reshape(64, 64))
    change_byte(tmp_path, "x", 64 * 64 * 8 - 1)
    file = {"safetensors": "model.safetensors", "npy": "x.npy", "zarr": "x"}[format]
    expected = (
        f"load from {tmp_path}: {tmp_path / 'step-0' / file} is damaged: array 'x' is not what was written, at"
        " [0:64, 0:64]; load another checkpoint"
    )

    def program():
        like = {"x": empty((64, 64), mesh=mesh_of((2,)), placements=placements)}
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path, like, **options)
        return str(caught.value)

    assert meshdist.run(program, 2) == [expected] * 2


def load_columns(directory):
    like = {"x": empty((64, 64), mesh=mesh_of((2,)), placements=[Shard(1)])}
    with pytest.raises(CheckpointError, match="array 'x' is not what was written"):
        load(directory, like)


@needs_linux
def test_ranks_that_are_processes_notice_damage(worlds, tmp_path):
    save_alone(tmp_path, x=np.arange(64 * 64.0).reshape(64, 64))
    change_byte(tmp_path, "x", 1000)
    worlds.world("gloo", 2).run(load_columns, tmp_path)


def test_elements_that_several_ranks_read_count_once(tmp_path):
    """Replicas along an axis, and submeshes that load the same array, with the same cuts and with others."""
    x = np.arange(42.0).reshape(6, 7)
    save_alone(tmp_path, x=x)

    def program():
        mesh = mesh_of((2, 3))
        rows, stage = mesh["b"], mesh["a"].get_local_rank()
        likes = [
            empty((6, 7), mesh=mesh, placements=[Replicate(), Shard(0)]),
            empty((6, 7), mesh=mesh, placements=[Shard(1), Replicate()]),
            empty((6, 7), mesh=rows, placements=[Shard(1)]),
            empty((6, 7), mesh=rows, placements=[Shard(stage)]),
        ]
        return [np.array_equal(load(tmp_path, {"x": like})["x"].full(), x) for like in likes], [
            _raises(lambda like=like: load(other, {"x": like})) for like in likes
        ]

    other = tmp_path / "other"
    save_alone(other, x=x)
    change_byte(other, "x", 41 * 8)
    assert meshdist.run(program, 6) == [([True] * 4, [True] * 4)] * 6


def _raises(call):
    try:
        call()
    except CheckpointError as error:
        return "array 'x' is not what was written" in str(error)
    return False


def test_a_mesh_of_which_some_ranks_do_not_load_an_array(tmp_path):
    save_alone(tmp_path, x=np.arange(6.0))

    def program():
        like = empty((6,), mesh=mesh_of((2,)), placements=[Shard(0)])
        tree = {"x": like} if meshdist.get_rank() == 0 else {}
        return load(tmp_path, tree, strict=False).keys() == tree.keys()

    assert meshdist.run(program, 2) == [True] * 2


def test_nothing_more_is_exchanged_than_without_checksums(tmp_path):
    save_alone(tmp_path, x=np.arange(64.0))

    def program():
        like = empty((64,), mesh=mesh_of((2,)), placements=[Shard(0)])
        with meshdist.profile() as parts:
            load(tmp_path, {"x": like})
        with meshdist.profile() as whole_pieces:
            load(tmp_path, {"x": np.empty(64)})
        return len(parts.events) == len(whole_pieces.events)

    assert meshdist.run(program, 2) == [True] * 2
