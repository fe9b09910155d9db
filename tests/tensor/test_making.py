"""Making arrays over a mesh, and what an array says of itself."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from placed_arrays import mesh_2x2

import meshdist
from meshdist.tensor import (
    DTensor,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    arange,
    distribute_tensor,
    empty,
    eye,
    full,
    ones,
    zeros,
)

WHOLE = np.arange(15.0).reshape(5, 3)
PLACEMENTS: list[Any] = [
    {"dp": Shard(0)},
    {"dp": Shard(0), "tp": Shard(0)},
    {"dp": Shard(1), "tp": Shard(0)},
    [Replicate(), Shard(-1)],
    {1: Shard(0, sizes=(5, 0))},
    {"tp": Partial()},
    {"dp": Partial("max"), "tp": Shard(0)},
    {"dp": Partial("avg")},
    {"dp": Partial("product")},
    None,
]


def distributed(src: int | None) -> list[bool]:
    mesh = mesh_2x2()
    whole = WHOLE if src in (None, mesh.get_rank()) else None
    tensors = [distribute_tensor(whole, mesh, placements, src_data_rank=src) for placements in PLACEMENTS]
    for tensor in tensors:
        if tensor.layout.is_replicated and src in (None, mesh.get_rank()):
            assert not np.shares_memory(tensor.to_local(), WHOLE)
    return [np.array_equal(tensor.full(), WHOLE) for tensor in tensors]


@pytest.mark.parametrize("src", [None, 0, 3])
def test_an_array_comes_back_whole(src: int | None) -> None:
    assert all(all(same) for same in meshdist.run(distributed, 4, (src,)))


def test_blocks_are_those_of_torch_chunk() -> None:
    def program() -> list[list[float]]:
        mesh = mesh_2x2()
        x = distribute_tensor(np.arange(5.0), mesh, {"dp": Shard(0), "tp": Shard(0)})
        return [x.to_local().tolist(), [x.index[0].start, x.index[0].stop]]

    assert meshdist.run(program, 4) == [[[0, 1], [0, 2]], [[2], [2, 3]], [[3], [3, 4]], [[4], [4, 5]]]


def test_whole_array_on_one_rank() -> None:
    def program() -> Any:
        x = distribute_tensor(WHOLE, mesh_2x2(), {"dp": Partial(), "tp": Shard(0)})
        return x.full(root=2)

    results = meshdist.run(program, 4)
    assert [result is None for result in results] == [True, True, False, True]
    assert np.array_equal(results[2], WHOLE)


def test_blocks_of_any_sizes() -> None:
    def program() -> Any:
        mesh = mesh_2x2()
        rank = mesh.get_rank()
        x = DTensor.from_local(np.full((rank, 2), rank), mesh, {"dp": Shard(0), "tp": Shard(0)}, run_check=True)
        y = DTensor.from_local(np.full((3, 2), rank // 2), mesh, {"dp": Shard(1)}, run_check=True)
        return x.placements, x.full().tolist(), y.full().tolist()

    placements, x, y = meshdist.run(program, 4)[1]
    assert placements == (Shard(0, sizes=(1, 5)), Shard(0, sizes=((0, 1), (2, 3))))
    assert x == [[1, 1], [2, 2], [2, 2], [3, 3], [3, 3], [3, 3]]
    assert y == [[0, 0, 1, 1]] * 3


def test_a_block_is_not_copied() -> None:
    def program() -> bool:
        block = np.zeros((2, 2))
        return DTensor.from_local(block, mesh_2x2(), {"dp": Shard(0)}, shape=(4, 2)).to_local() is block

    assert all(meshdist.run(program, 4))


@pytest.mark.parametrize("arguments", [(5,), (5, 3), (3, 7, 2), (4, 4, -3), (2, 3, 9), (0,), (3, 0)])
def test_ones_on_a_diagonal(arguments: tuple[int, ...]) -> None:
    def program() -> None:
        mesh = mesh_2x2()
        cuts: list[Any] = [{}, {"tp": Shard(0)}, {"dp": Shard(1), "tp": Shard(0)}, {"dp": Shard(0), "tp": Shard(0)}]
        with mesh.account() as account:
            made = [eye(*arguments, dtype=dtype, mesh=mesh, placements=cut) for cut in cuts for dtype in (float, bool)]
        assert account.total().calls == 0
        for x in made:
            wanted = np.eye(*arguments, dtype=x.dtype)
            assert (x.dtype, x.shape) == (wanted.dtype, wanted.shape)
            assert np.array_equal(x.full(), wanted)

    meshdist.run(program, 4)


def test_bad_diagonals() -> None:
    def program() -> None:
        mesh = mesh_2x2()
        with pytest.raises(PlacementError, match="eye: placements must not be Partial"):
            eye(3, mesh=mesh, placements={"dp": Partial()})
        with pytest.raises(ValueError, match="negative dimensions"):
            eye(-1, mesh=mesh)
        with pytest.raises(TypeError):
            eye(3, k=0.5, mesh=mesh)  # type: ignore[arg-type]

    meshdist.run(program, 4)


def test_made_in_place() -> None:
    def program() -> None:
        mesh = mesh_2x2()
        cut: dict[Any, Any] = {"tp": Shard(0)}
        x = DTensor.from_callback((5, 3), np.float32, mesh, cut, lambda index: WHOLE[index])
        assert x.dtype == np.float32
        assert np.array_equal(x.full(), WHOLE)
        assert np.array_equal(zeros((5, 3), mesh=mesh, placements=cut).full(), np.zeros((5, 3)))
        assert np.array_equal(ones(5, np.int8, mesh=mesh, placements=cut).full(), np.ones(5, np.int8))
        assert np.array_equal(full((2, 2), 7, mesh=mesh).full(), np.full((2, 2), 7))
        assert empty((3, 0), mesh=mesh, placements=cut).nbytes == 0
        for arguments in ((5,), (2, 9, 3), (1, 7, 0.5), (5, 0, -2), (4, 4), (0.1, 1.0, 0.1)):
            assert np.array_equal(arange(*arguments, mesh=mesh, placements=cut).full(), np.arange(*arguments))
        like = np.zeros_like(x, dtype=int)
        assert (like.placements, like.dtype, like.full().sum()) == (x.placements, np.dtype(int), 0)
        assert np.full_like(x, 2.0).full().sum() == 30

    meshdist.run(program, 4)


def test_what_an_array_says() -> None:
    def program() -> Any:
        x = distribute_tensor(WHOLE, mesh_2x2(), {"dp": Shard(0)})
        return repr(x), x.shape, x.size, x.nbytes, len(x), np.shape(x), np.ndim(x), x.device_mesh is x.mesh

    assert meshdist.run(program, 4)[3] == (
        "DTensor((5, 3) float64 as {'dp': Shard(0), 'tp': Replicate()}, rank 3 holds [3:5, 0:3])",
        *((5, 3), 15, 120, 5, (5, 3), 2, True),
    )


def test_what_is_printed_of_an_array() -> None:
    def program() -> Any:
        mesh = mesh_2x2()
        cut = distribute_tensor(WHOLE, mesh, {"dp": Shard(0)})
        pending = distribute_tensor(np.array([2.0, 3.0]), mesh, {"tp": Partial("max")})
        large = zeros((4000, 2), mesh=mesh)
        if mesh.get_rank() == 3:  # no other rank takes part
            return str(cut), f"{pending}", str(large.T[0, 0]), str(large)
        return None

    cut, pending, number, large = meshdist.run(program, 4)[3]
    assert cut == (f"float64 (5, 3) as {{'dp': Shard(0), 'tp': Replicate()}}, rank 3 holds [3:5, 0:3]:\n{WHOLE[3:]}")
    assert pending.startswith(
        "float64 (2,) as {'dp': Replicate(), 'tp': Partial('max')}, rank 3 holds a part of [0:2]:\n"
    )
    assert number == "float64 () as {'dp': Replicate(), 'tp': Replicate()}, rank 3 holds [...]:\n0.0"
    assert len(large.splitlines()) == 8  # shortened by NumPy


def test_a_cut_array_does_not_become_a_whole_one_unasked() -> None:
    def program() -> None:
        mesh = mesh_2x2()
        cut = distribute_tensor(WHOLE, mesh, {"dp": Shard(0)})
        for convert in (np.asarray, lambda x: x.tolist(), pickle.dumps):
            with pytest.raises(PlacementError, match=r"write x.full\(\) for the whole array"):
                convert(cut)
        assert np.array_equal(np.asarray(cut.redistribute()), WHOLE)
        pending = distribute_tensor(np.array(2.5), mesh, {"dp": Partial()})
        assert (float(pending), int(pending), bool(pending), pending.item()) == (2.5, 2, True, 2.5)
        assert np.array_equal(pickle.loads(pickle.dumps(cut.redistribute())), WHOLE)

    meshdist.run(program, 4)


def test_arguments_in_the_wrong_place() -> None:
    def program() -> None:
        mesh: Any = mesh_2x2()
        with pytest.raises(TypeError, match="expected a DeviceMesh, got ndarray; the array comes first"):
            distribute_tensor(mesh, WHOLE)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="array has the unsupported dtype object; supported are bool"):
            distribute_tensor(np.array([None]), mesh)
        with pytest.raises(ValueError, match="root must be a rank of the mesh, 0 to 3, got 9"):
            distribute_tensor(WHOLE, mesh, {"dp": Shard(0)}).full(root=9)

    meshdist.run(program, 4)


def _refused_conversions() -> list[tuple[int, str, str]]:
    """Return how many calls a conversion of several elements made, and what it and NumPy say."""
    mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    whole = np.arange(6.0).reshape(3, 2)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    said = []
    for convert in (float, int, bool, complex, range, math.sqrt, lambda array: array.item()):
        with mesh.account() as account:
            texts = []
            for array in (x, whole):
                with pytest.raises((TypeError, ValueError)) as info:
                    convert(array)
                texts.append(str(info.value))
        said.append((account.total().calls, *texts))
    return said


def test_several_elements_are_no_number_and_nothing_is_sent() -> None:
    for calls, ours, of_numpy in meshdist.run(_refused_conversions, 2)[0]:
        assert (calls, ours) == (0, of_numpy)


def test_numbers_are_formatted_where_nothing_is_sent() -> None:
    def program() -> None:
        total = distribute_tensor(WHOLE, mesh_2x2(), {"dp": Shard(0)}).sum()
        with pytest.raises(TypeError, match=r"format: the array is \(\) as .*; write value = float\(x\) on all ranks"):
            f"{total:.1f}"
        with pytest.raises(TypeError, match="round: the array is"):
            round(total, 1)
        computed = total.redistribute()
        assert (f"{computed:.1f}", round(computed, 1), f"{computed}") == ("105.0", 105.0, str(computed))

    meshdist.run(program, 4)


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        ({"dp": Shard(2)}, PlacementError, r"shards dimension 2, but the array, of shape \(5, 3\), has only 2"),
        (
            {"pp": Shard(0)},
            KeyError,
            r"^.?distribute_tensor: placements: unknown axis 'pp': this mesh is \(dp=2, tp=2\)",
        ),
        ([Shard(0)], PlacementError, "expected one for each of the axes 'dp', 'tp', got 1"),
        ({"dp": Shard(0, sizes=(1, 3))}, PlacementError, "1 [+] 3 = 4 rows, for 5"),
        ({"dp": Shard(0, sizes=(1, 3, 1))}, PlacementError, "2 sizes, one for each rank"),
        (
            {"dp": "Shard(0)"},
            TypeError,
            "^distribute_tensor: placements: expected a Shard, Replicate or Partial, got 'Sh",
        ),
        ({"dp": 0}, TypeError, r"expected a Shard, Replicate or Partial, got 0; did you mean Shard\(0\)\?"),
        ({"dp": Partial("max"), "tp": Partial()}, PlacementError, "the order of the two would matter"),
    ],
)
def test_placements_that_do_not_fit(placements: Any, error: type[Exception], message: str) -> None:
    def program() -> None:
        distribute_tensor(WHOLE, mesh_2x2(), placements)

    with pytest.raises(error, match=message):
        meshdist.run(program, 4)


def test_errors_about_placements_and_arguments_name_the_call() -> None:
    def program() -> None:
        mesh = meshdist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        x = zeros((2, 2), mesh=mesh)
        new: Any = zeros  # its arguments are wrong
        move: Any = x.redistribute
        for call, error, message in (
            (
                lambda: zeros((2,), mesh=mesh, placements=[Shard(1)]),
                PlacementError,
                r"^zeros: placements: Shard\(1\) shards",
            ),
            (
                lambda: x.redistribute([Shard(2)]),
                PlacementError,
                r"^redistribute: placements: Shard\(2\) shards dimension 2",
            ),
            (
                lambda: DTensor.from_local(WHOLE, mesh, {"tp": Shard(0)}),
                KeyError,
                "DTensor.from_local: placements: unknown",
            ),
            (lambda: new((2, 2), mesh, [Shard(0)]), TypeError, "these are keywords: mesh=, placements="),
            (lambda: new((2, 2), device_mesh=mesh), TypeError, r"did you mean mesh=\?"),
            (
                lambda: move(mesh, [Shard(0)]),
                TypeError,
                r"an array stays on its mesh: write x.redistribute\(placements\)",
            ),
        ):
            with pytest.raises(error, match=message):
                call()

    meshdist.run(program, 1)


@pytest.mark.parametrize(
    ("on_rank_1", "message"),
    [
        ((WHOLE[:2], {"dp": Shard(0)}), r"rank 1 of the mesh passed an array of shape \(2, 3\)"),
        ((WHOLE.astype("f4"), {"dp": Shard(0)}), "rank 1 of the mesh passed .* dtype float32"),
        ((WHOLE, {"dp": Shard(1)}), "rank 1 of the mesh passed the placements"),
    ],
)
def test_ranks_that_pass_different_things(on_rank_1: Any, message: str) -> None:
    def program() -> None:
        mesh = mesh_2x2()
        whole, placements = on_rank_1 if mesh.get_rank() == 1 else (WHOLE, {"dp": Shard(0)})
        with pytest.raises(ValueError, match=message):
            distribute_tensor(whole, mesh, placements)
        meshdist.barrier()

    meshdist.run(program, 4)


def test_blocks_that_make_no_array() -> None:
    def program() -> None:
        mesh = mesh_2x2()
        rank = mesh.get_rank()
        with pytest.raises(PlacementError, match="the same number of rows in it"):
            DTensor.from_local(np.zeros((rank, 2)), mesh, {"dp": Shard(0)})
        with pytest.raises(PlacementError, match="rank 1 of the mesh passed a block"):
            DTensor.from_local(np.zeros(2, "f4" if rank == 1 else "f8"), mesh)
        with pytest.raises(PlacementError, match=r"must have shape \(2, 2\), got \(3, 2\)"):
            DTensor.from_local(np.zeros((3, 2)), mesh, {"dp": Shard(0)}, shape=(4, 2))
        with pytest.raises(ValueError, match="rank 3 of the mesh holds other values"):
            DTensor.from_local(np.array([1.0 if rank == 3 else 0.0]), mesh, {"dp": Shard(0)}, run_check=True)
        with pytest.raises(ValueError, match=r"must return an array of shape \(1,\), got \(3,\)"):
            DTensor.from_callback((2,), float, mesh, {"dp": Shard(0)}, lambda index: np.zeros(3))

    meshdist.run(program, 4)


def test_pending_reductions_that_the_dtype_does_not_have() -> None:
    def program() -> None:
        mesh = mesh_2x2()
        with pytest.raises(TypeError, match=r"distribute_tensor: Partial\('avg'\): op AVG is not defined for int64"):
            distribute_tensor(np.arange(3), mesh, {"dp": Partial("avg")})
        with pytest.raises(TypeError, match=r"DTensor.from_local: Partial\('max'\): op MAX is not defined for complex"):
            DTensor.from_local(np.zeros(3, complex), mesh, {"dp": Partial("max")}, shape=(3,))
        with pytest.raises(ValueError, match="Partial: op must be one of 'sum', 'product'"):
            Partial("band")

    meshdist.run(program, 4)


def test_a_rank_outside_the_mesh() -> None:
    def program() -> None:
        mesh = meshdist.DeviceMesh("cpu", [0, 1])
        if mesh.get_coordinate() is None:
            with pytest.raises(ValueError, match="rank 2 is outside the mesh"):
                zeros((4,), mesh=mesh)
        else:
            assert zeros((4,), mesh=mesh, placements=[Shard(0)]).full().sum() == 0

    meshdist.run(program, 3)


def test_shapes_placements_and_bytes_without_peers() -> None:
    with meshdist.dry_run(65536, ranks_per_host=8):
        mesh = meshdist.init_device_mesh("cpu", (64, 1024), mesh_dim_names=("dp", "tp"))
        x = zeros((1 << 20, 4096), np.float32, mesh=mesh, placements={"dp": Shard(0), "tp": Shard(0)})
        assert (x.to_local().shape, x.nbytes) == ((16, 4096), 1 << 34)
        assert (x + 1).placements == (Shard(0), Shard(0))


MADE: dict[str, Callable[[Any, Any], DTensor]] = {
    "zeros": lambda mesh, placements: zeros((4, 2), mesh=mesh, placements=placements),
    "arange": lambda mesh, placements: arange(4 + mesh.get_rank() // 3, mesh=mesh, placements={"dp": Shard(0)}),
    "distribute_tensor": lambda mesh, placements: distribute_tensor(np.ones((4, 2)), mesh, placements, None),
    "DTensor.from_local": lambda mesh, placements: DTensor.from_local(np.ones((2, 2)), mesh, placements, shape=(4, 2)),
    "DTensor.from_callback": lambda mesh, placements: DTensor.from_callback(
        (4, 2), float, mesh, placements, lambda index: np.ones((2, 2))
    ),
    "random.random": lambda mesh, placements: meshdist.tensor.random(0).random(
        (4, 2), mesh=mesh, placements=placements
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_detail_compares_the_layouts_of_arrays_that_are_made_without_messages(name: str) -> None:
    def program() -> str:
        mesh = mesh_2x2()
        with mesh.account() as account:
            assert zeros((4, 2), mesh=mesh, placements={"dp": Shard(0)}).shape == (4, 2)
        assert account.total().calls == 0
        with pytest.raises(meshdist.DistBackendError) as info:
            MADE[name](mesh, {"dp": Shard(1 if mesh.get_rank() == 3 else 0)})
        return str(info.value)

    logger = logging.getLogger("meshdist")
    level = logger.level
    meshdist.set_debug_level(meshdist.DebugLevel.DETAIL)
    logger.propagate, logger.disabled = False, True
    try:
        told = meshdist.run(program, 4, timeout=30)
        with meshdist.dry_run(world_size=4, rank=1):
            zeros((4, 2), mesh=mesh_2x2(), placements={"dp": Shard(0)})
    finally:
        logger.propagate, logger.disabled = True, False
        logger.setLevel(level)
    for said in told:
        assert f"ranks 0, 1, 2 call {name}((4" in said
        assert f"rank 3 calls {name}((" in said
