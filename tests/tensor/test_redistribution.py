"""Redistributions: every step, carried out for all ranks at once in NumPy, and what it sends."""

import itertools
import math

import numpy as np
import pytest
from array_layouts import check_blocks, random_blocks, random_layout, random_pair, reduced
from placed_arrays import cases

import meshdist as dist
from meshdist.tensor import zeros
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.placements import Partial, PlacementError, Replicate, Shard
from meshdist.tensor.redistribution_search import plan
from meshdist.tensor.redistribution_steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Pairwise,
    ReduceScatter,
    Slice,
    Zero,
    overlap,
)

MESHES = [(1,), (2,), (3,), (2, 2), (2, 3), (1, 2, 2), (2, 2, 2)]
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def by_rank(step, count):
    """What every rank sends or receives in a step, by coordinate."""
    return np.broadcast_to(count(step.elements()), step.source.mesh_shape)


def total(found, name):
    """What every rank sends or receives in all steps of a plan, by coordinate."""
    return sum((by_rank(step, getattr(step, name)) for step in found.steps), np.zeros(found.source.mesh_shape, int))


def relative(part, block):
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, block, strict=True))


def plane(step, coordinate):
    """The coordinates of the ranks that take part with this one, in row-major order."""
    for places in np.ndindex(*(step.source.mesh_shape[axis] for axis in step.axes)):
        peer = list(coordinate)
        for axis, place in zip(step.axes, places, strict=True):
            peer[axis] = place
        yield tuple(peer)


def exchanged(step, blocks, coordinate):
    """The block after an exchange, with a check that every element arrives once."""
    source, target = step.source, step.target
    index = target.index(coordinate)
    block = np.zeros(target.local_shape(coordinate), blocks[coordinate].dtype)
    arrivals = np.zeros(block.shape, int)
    parts = [(coordinate, overlap(index, source.index(coordinate)))]
    peers = list(plane(step, coordinate))
    own = peers.index(coordinate)
    for number, part in step.parts_from(coordinate):
        assert (own, part) in step.parts_to(peers[number])
        parts.append((peers[number], part))
    for peer, part in parts:
        if part is not None:
            block[relative(part, index)] = blocks[peer][relative(part, source.index(peer))]
            arrivals[relative(part, index)] += 1
    assert (arrivals == 1).all()
    received = sum(math.prod(s.stop - s.start for s in part) for _, part in parts[1:])
    assert by_rank(step, step.received)[coordinate] == received
    return block


def after(step, blocks, coordinate):
    """The block of the rank at `coordinate` after a step."""
    block = blocks[coordinate]
    own = relative(step.target.index(coordinate), step.source.index(coordinate))
    if isinstance(step, Slice):
        return block[own]
    if isinstance(step, Zero):
        ops = {step.target.pending[axis] for axis in step.axes if coordinate[axis]}
        return np.zeros_like(block) if "sum" in ops else np.ones_like(block) if "product" in ops else block
    if isinstance(step, AllGather):
        whole = np.zeros(step.target.local_shape(coordinate), block.dtype)
        for peer in plane(step, coordinate):
            whole[relative(step.source.index(peer), step.target.index(coordinate))] = blocks[peer]
        return whole
    if isinstance(step, Pairwise):
        return exchanged(step, blocks, coordinate)
    assert isinstance(step, (AllReduce, ReduceScatter))
    total = reduced(np.stack([blocks[peer] for peer in plane(step, coordinate)]), [step.op])
    return total if isinstance(step, AllReduce) else total[own]


def simulated(redistribution, blocks):
    for step in redistribution.steps:
        blocks = {coordinate: after(step, blocks, coordinate) for coordinate in blocks}
        for coordinate, block in blocks.items():
            assert block.shape == step.target.local_shape(coordinate)
        if not isinstance(step, (AllReduce, Zero)):
            assert by_rank(step, step.sent).sum() == by_rank(step, step.received).sum()
    return blocks


@cases(30, slow=200)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_any_layout_becomes_any_other(mesh_shape, cases):
    rng = np.random.default_rng(mesh_shape)
    for case in range(cases):
        source, target = random_pair(rng, mesh_shape)
        blocks, whole = random_blocks(case, source)
        check_blocks(simulated(plan(source, target), blocks), target, whole)


CASES = [
    ((4, 4), (2, 2), [S0, S1], [S1, S0], [Exchange]),
    ((400, 400), (2, 2), [S0, S1], [S1, S0], [Exchange]),
    ((400, 400), (2, 2), [P, S0], [S1, R], [ReduceScatter, AllGather]),
    ((5, 3), (3,), [S0], [S1], [AllToAll]),
    ((5, 3), (2, 2), [S0, S0], [R, R], [AllGather]),
    ((4, 4), (2, 2), [S1, S0], [R, R], [AllGather]),
    ((4, 4), (2, 2), [P, P], [R, R], [AllReduce]),
    ((400, 400), (2, 2), [P, P], [S0, S0], [ReduceScatter]),
    ((4, 4), (2,), [R], [S0], [Slice]),
    ((4, 4), (2, 2), [R, R], [S0, S1], [Slice]),
    ((4, 4), (2, 2), [S0, R], [S0, S0], [Slice]),
    ((4, 4), (2,), [R], [P], [Zero]),
    ((4, 4), (2,), [S0], [P], [AllGather, Zero]),
    ((5,), (2,), [S0], [Shard(0, sizes=(1, 4))], [Exchange]),
    ((5,), (2,), [P], [Shard(0, sizes=(1, 4))], [ReduceScatter]),
    ((), (2,), [P], [R], [AllReduce]),
    ((4, 4), (1, 2), [S0, S1], [P, S1], []),
    ((400, 400), (2, 2), [Partial(), Partial("avg")], [R, R], [AllReduce, AllReduce]),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "source", "target", "steps"), CASES)
def test_plans(shape, mesh_shape, source, target, steps):
    found = plan(ArrayLayout.of(shape, mesh_shape, source), ArrayLayout.of(shape, mesh_shape, target))
    assert [type(step) for step in found.steps] == steps


def test_plans_are_made_once():
    source, target = (ArrayLayout.of((4, 4), (2,), [placement]) for placement in (S0, S1))
    assert plan(source, target) is plan(source, target)
    assert plan(source, source).steps == ()


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (2, 3)], ids=str)
def test_cuts_to_other_cuts_receive_only_what_is_missing(mesh_shape):
    rng = np.random.default_rng(0)
    placements = (S0, S1, Shard(2))
    for source, target in itertools.product(itertools.product(placements, repeat=len(mesh_shape)), repeat=2):
        shape = tuple(rng.integers(40, 91, 3).tolist())
        before, then = (ArrayLayout.of(shape, mesh_shape, each) for each in (source, target))
        found = plan(before, then)
        received = total(found, "received")
        for rank in before.coordinates():
            own = overlap(before.index(rank), then.index(rank))
            kept = 0 if own is None else math.prod(part.stop - part.start for part in own)
            assert received[rank] == math.prod(then.local_shape(rank)) - kept
            assert all(isinstance(step, (AllToAll, Exchange)) for step in found.steps)


def test_the_load_of_equal_blocks_is_spread():
    # The ranks along the second axis hold the same blocks: each sends one of them, and receives one.
    source, target = (ArrayLayout.of((40_000,), (4, 4), each) for each in ([S0, R], [R, S0]))
    found = plan(source, target)
    assert set(total(found, "sent").flat) == {0, 10_000}


def test_a_pending_reduction_becomes_no_other():
    source, target = (ArrayLayout.of((4,), (2,), [Partial(op)]) for op in ("sum", "max"))
    with pytest.raises(PlacementError, match=r"Partial\('sum'\) along axis 0 cannot become Partial\('max'\)"):
        plan(source, target)


def test_layouts_of_different_arrays():
    with pytest.raises(ValueError, match="different arrays or meshes"):
        plan(ArrayLayout.of((4,), (2,), [R]), ArrayLayout.of((5,), (2,), [R]))


def test_described():
    source, target = (ArrayLayout.of((400, 400), (2, 2), each) for each in ([P, S0], [S1, R]))
    assert plan(source, target).describe(("dp", "tp"), 8) == (
        "reduce_scatter (sum) of dim 1 over 'dp': a rank sends at most 320,000 bytes\n"
        "all_gather of dim 0 over 'tp': a rank sends at most 320,000 bytes"
    )
    assert plan(source, source).describe(None, 8) == "nothing to do"


def size(block):
    return math.prod(part.stop - part.start for part in block)


def most(step, count):
    """The largest of what `count` returns, from the coordinate and the sizes of the blocks of a rank."""
    ranks = step.source.coordinates()
    return max(count(rank, size(step.source.index(rank)), size(step.target.index(rank))) for rank in ranks)


def most_sent(step):
    if isinstance(step, Pairwise):
        return most(step, lambda rank, old, new: sum(size(part) for _, part in step.parts_to(rank)))
    if isinstance(step, AllReduce):
        return most(step, lambda rank, old, new: math.ceil(2 * old * (step.num_ranks - 1) / step.num_ranks))
    if isinstance(step, AllGather):
        return most(step, lambda rank, old, new: old * (step.num_ranks - 1))
    return most(step, lambda rank, old, new: old - new) if isinstance(step, ReduceScatter) else 0


def cost(found):
    """What the search minimizes: the elements received by the rank that receives most, and 16,384 for a collective."""
    total = 0
    for step in found.steps:
        if isinstance(step, Pairwise):
            total += most(step, lambda rank, old, new: sum(size(part) for _, part in step.parts_from(rank)))  # noqa: B023
        elif isinstance(step, ReduceScatter):
            total += most(step, lambda rank, old, new: new * (step.num_ranks - 1))  # noqa: B023
        elif isinstance(step, AllGather):
            total += most(step, lambda rank, old, new: new - old)
        else:
            total += most_sent(step)
        total += 16_384 if step.collective else 0
    return total


LARGER_MESHES = [(12,), (3, 8), (8, 3), (4, 3, 2), (2, 2, 5)]


@cases(20, slow=200)
@pytest.mark.parametrize("mesh_shape", LARGER_MESHES, ids=str)
def test_the_most_that_a_rank_sends_is_that_of_all_ranks(mesh_shape, cases):
    rng = np.random.default_rng(mesh_shape)
    for _ in range(cases):
        found = plan(*random_pair(rng, mesh_shape))
        assert found.most_sent == tuple(map(most_sent, found.steps)), found


@cases(20, slow=200)
@pytest.mark.parametrize("mesh_shape", LARGER_MESHES, ids=str)
def test_no_plan_costs_more_than_a_gather_before_all_else(mesh_shape, cases):
    rng = np.random.default_rng(mesh_shape)
    for _ in range(cases):
        shape = rng.integers(1, 120, 3).tolist()
        source, target = (random_layout(rng, shape, mesh_shape) for _ in range(2))
        dims = [dim for dim in range(3) if source.cuts[dim] != target.cuts[dim]]
        gathered = source.uncut(dims)
        assert cost(plan(source, target)) <= cost(plan(source, gathered)) + cost(plan(gathered, target))


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "source", "target"),
    [((8, 8), (128, 64), [S0, S1], [S1, R]), ((3, 8), (9, 8), [R, S1], [S1, S0]), ((4, 4), (9, 5), [S0, R], [R, S0])],
)
def test_the_described_bytes_are_those_of_the_account_of_the_rank_that_sends_most(mesh_shape, shape, source, target):
    sent = []
    for rank in range(math.prod(mesh_shape)):
        with dist.dry_run(math.prod(mesh_shape), rank):
            mesh = dist.init_device_mesh("cpu", mesh_shape)
            x = zeros(shape, mesh=mesh, placements=source, dtype="float32")
            described = x.redistribution(target)
            with mesh.account() as account:
                x.redistribute(target)
            sent.append(account.total().inside + account.total().between)
    assert f"at most {max(sent):,} bytes" in described


def test_a_rank_on_the_diagonal_of_a_large_mesh_sends_less_than_others():
    source, target = (ArrayLayout.of((1 << 20, 1 << 16), (256, 256), each) for each in ([S0, S1], [S1, S0]))
    assert plan(source, target).most_sent == (1 << 20,)


def test_a_large_mesh_is_planned_without_a_look_at_all_ranks():
    shape, mesh_shape = (1024, 1024), (256, 256)
    source, target = (ArrayLayout.of(shape, mesh_shape, each) for each in ([S0, S1], [S1, S0]))
    found = plan(source, target)
    assert [type(step) for step in found.steps] == [Exchange]
    assert total(found, "received")[3, 7] == 16
