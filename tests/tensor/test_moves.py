"""Blocks moved over a real world: random pairs of layouts against NumPy."""

import numpy as np
import pytest
from array_layouts import check_blocks, ops_of, random_blocks, random_layout, random_pair, random_shape
from placed_arrays import cases
from worlds import needs_linux

import meshdist
from meshdist.device_mesh import init_device_mesh
from meshdist.tensor import DTensor
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.moves import gather_to, move
from meshdist.tensor.placements import Partial, Replicate, Shard

DTYPES = ("float64", "float32", "complex64", "int8", "bool")
WORLDS = [
    pytest.param("threads", (1,), id="threads 1"),
    pytest.param("threads", (2,), id="threads 2"),
    pytest.param("threads", (3,), id="threads 3"),
    pytest.param("threads", (2, 2), id="threads 2x2"),
    pytest.param("threads", (1, 2, 2), id="threads 1x2x2"),
    pytest.param("gloo", (3,), id="gloo 3", marks=needs_linux),
    pytest.param("gloo", (2, 2), id="gloo 2x2", marks=[needs_linux, pytest.mark.slow]),
]


def pairs(mesh_shape, count):
    rng = np.random.default_rng(mesh_shape)
    for case in range(count):
        dtype = DTYPES[case % len(DTYPES)]
        source, target = random_pair(rng, mesh_shape, ops_of(dtype))
        yield case, dtype, source, target


def moved(mesh_shape, count):
    mesh = init_device_mesh("cpu", mesh_shape)
    rank = mesh.get_coordinate()
    found = []
    for case, dtype, source, target in pairs(mesh_shape, count):
        local = random_blocks(case, source, dtype)[0][rank]
        if case % 3 == 0:  # not contiguous
            local = np.repeat(local[..., None], 2, -1)[..., 0]
        before = local.copy()
        block = move(local, source, target, mesh)
        assert (block is local) == (source is target)
        assert source is target or (block.flags.c_contiguous and not np.may_share_memory(block, local))
        assert block.dtype == local.dtype
        np.testing.assert_array_equal(local, before)
        found.append(block)
    return rank, found


@cases(20, slow=100)
@pytest.mark.parametrize(("backend", "mesh_shape"), WORLDS)
def test_any_layout_becomes_any_other(worlds, backend, mesh_shape, cases):
    results = dict(worlds.world(backend, int(np.prod(mesh_shape))).run(moved, mesh_shape, cases))
    for case, dtype, source, target in pairs(mesh_shape, cases):
        whole = random_blocks(case, source, dtype)[1]
        check_blocks({rank: blocks[case] for rank, blocks in results.items()}, target, whole)


def gathered(mesh_shape, count):
    mesh = init_device_mesh("cpu", mesh_shape)
    rng = np.random.default_rng(0)
    for case in range(count):
        layout = random_layout(rng, random_shape(rng), mesh_shape)
        root = int(rng.integers(mesh.size()))
        blocks, whole = random_blocks(case, layout, "int32")
        found = gather_to(blocks[mesh.get_coordinate()], layout, mesh, root)
        if meshdist.get_rank() == root:
            np.testing.assert_array_equal(found, whole)
        else:
            assert found is None


@cases(20, slow=100)
@pytest.mark.parametrize(("backend", "mesh_shape"), WORLDS)
def test_gathered_to_one_rank(worlds, backend, mesh_shape, cases):
    worlds.world(backend, int(np.prod(mesh_shape))).run(gathered, mesh_shape, cases)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([Shard(0), Shard(1)], [Shard(1), Shard(0)]),
        ([Partial(), Shard(0)], [Shard(0), Partial()]),
        ([Shard(0), Replicate()], [Replicate(), Shard(0)]),
        ([Shard(1), Shard(0)], [Replicate(), Shard(0)]),
    ],
)
@pytest.mark.parametrize("ranks", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_dry_run_of_a_large_mesh(source, target, ranks):
    with meshdist.dry_run(ranks * ranks, rank=1000):
        mesh = init_device_mesh("cpu", (ranks, ranks))
        before, then = (ArrayLayout.of((1024, 512), (ranks, ranks), each) for each in (source, target))
        local = np.zeros(before.local_shape(mesh.get_coordinate()), np.float32)
        assert move(local, before, then, mesh).shape == then.local_shape(mesh.get_coordinate())


OTHER_LAYOUTS = {
    "full": (Shard(0), Shard(1), lambda x: x.full()),
    "redistribute": (Shard(0), Shard(1), lambda x: x.redistribute({"x": Replicate()})),
    "to one rank": (Shard(0), Shard(1), lambda x: x.full(0)),
}


def different_layouts(case):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    one, other, use = OTHER_LAYOUTS[case]

    def made(placement):
        return DTensor.from_callback(
            (4, 4), float, mesh, {"x": placement}, lambda index: np.ones([len(range(4)[part]) for part in index])
        )

    for _ in range(3):  # what is known to be alike is not compared again
        use(made(one))
    with pytest.raises(meshdist.DistBackendError) as info:
        use(made(other if meshdist.get_rank() else one))
    return str(info.value)


@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_ranks_that_move_different_layouts_are_told(case):
    for said in meshdist.run(different_layouts, 2, (case,), timeout=30):
        assert "the ranks disagree" in said
        assert f"[{OTHER_LAYOUTS[case][1]!r}]" in said
