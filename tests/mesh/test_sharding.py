"""mesh.shard and mesh.unshard: plain blocks of whole arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshdist


def blocks_and_back(shape: tuple[int, ...], dims: dict[Any, int]) -> tuple[Any, Any]:
    mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = np.arange(np.prod(shape)).reshape(shape)
    block = mesh.shard(whole, dims)
    return block, mesh.unshard(block, dims)


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((4, 6), {"dp": 0, "tp": 1}),
        ((5, 3), {"dp": 1, "tp": 0}),
        ((5, 3), {"dp": 0, "tp": 0}),
        ((1,), {1: 0}),
        ((3, 2), {}),
    ],
)
def test_blocks_make_the_whole_array(shape: tuple[int, ...], dims: dict[Any, int]) -> None:
    whole = np.arange(np.prod(shape)).reshape(shape)
    results = meshdist.run(blocks_and_back, 4, (shape, dims))
    assert all(np.array_equal(back, whole) for _, back in results)


def test_first_axis_cuts_outermost() -> None:
    blocks = [block.tolist() for block, _ in meshdist.run(blocks_and_back, 4, ((5,), {"tp": 0, "dp": 0}))]
    assert blocks == [[0, 1], [2], [3], [4]]


@pytest.mark.parametrize(
    ("dims", "error", "message"),
    [
        ({"dp": 2}, ValueError, "axis 'dp' shards dimension 2"),
        ({"pp": 0}, KeyError, "unknown axis 'pp'"),
        ({"dp": "0"}, TypeError, "a dimension is an integer"),
        (0, TypeError, "expected a dict"),
        ({"dp": 0, 0: 1}, ValueError, "axis 0 is given twice"),
    ],
)
def test_bad_dims(dims: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        meshdist.run(blocks_and_back, 4, ((4, 4), dims))


def test_a_list_is_no_array() -> None:
    with pytest.raises(TypeError, match="expected an array, got \\[1, 2\\]"):
        meshdist.run(lambda: meshdist.init_device_mesh("cpu", (1,)).shard([1, 2], {0: 0}), 1)
