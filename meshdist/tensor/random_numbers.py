"""Random arrays that are the same on every mesh: each tile of the whole array has a random stream of its own."""

from __future__ import annotations

import math
import operator
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.distribution import array_module, checked_shape, layout_on
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.placements import PlacementError, Placements

_MOST_IN_A_TILE = 1 << 14


def random(seed: int) -> Generator:
    """Return a generator of random arrays, whose numbers do not depend on the mesh, its size or the placements.

    Args:
        seed: An integer, not negative; the same on every rank.

    Raises:
        TypeError: `seed` is not an integer.
        ValueError: `seed` is negative.

    Example:
        >>> import meshdist
        >>> from meshdist.tensor import Shard, random
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     cut = random(0).standard_normal((4, 3), mesh=mesh, placements={"dp": Shard(0)})
        ...     return bool((cut == random(0).standard_normal((4, 3), mesh=mesh)).full().all())
        >>> meshdist.run(program, 2)
        [True, True]
    """
    return Generator(seed)


class Generator:
    """A generator of random arrays, created by `meshdist.tensor.random`.

    The whole array is cut into tiles by its shape alone, and a tile is filled by NumPy's Philox, a generator with a
    counter (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by the seed, and started at the
    numbers of the call and of the tile. A rank generates the tiles that overlap its block; nothing is sent. The methods
    are a subset of those of `numpy.random.Generator`, with `shape` in place of `size`; the numbers are different.

    All ranks make the same calls in the same order, since calls are counted.

    Example:
        >>> import meshdist
        >>> from meshdist.tensor import random
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (1,))
        ...     generator = random(7)
        ...     return generator.integers(0, 10, (3,), mesh=mesh).dtype, generator
        >>> meshdist.run(program, 1)
        [(dtype('int64'), random(7), after 1 call)]
    """

    def __init__(self, seed: int) -> None:
        if isinstance(seed, bool) or not hasattr(seed, "__index__"):
            raise TypeError(f"random: seed must be an integer, got {seed!r} ({type(seed).__name__})")
        self._seed = operator.index(seed)
        if self._seed < 0:
            raise ValueError(f"random: seed must not be negative, got {seed}")
        self._key = np.random.SeedSequence(self._seed).generate_state(2, np.uint64)
        self._calls = 0

    def __repr__(self) -> str:
        return f"random({self._seed}), after {self._calls} call{'s' if self._calls != 1 else ''}"

    if not TYPE_CHECKING:  # for a type checker, there would be every method

        def __getattr__(self, name: str) -> Any:
            if not hasattr(np.random.Generator, name) or name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            known = ", ".join(method for method in vars(Generator) if method[0] != "_")
            raise AttributeError(f"random: there is no method {name!r} for DTensors; there are {known}")

    def standard_normal(
        self, shape: Any, dtype: Any = np.float64, *, mesh: DeviceMesh, placements: Placements | None = None
    ) -> DTensor:
        """Return numbers of mean 0 and standard deviation 1, float64 or float32."""
        return self._made("standard_normal", shape, mesh, placements, dtype=np.dtype(dtype))

    def normal(
        self, loc: float, scale: float, shape: Any, *, mesh: DeviceMesh, placements: Placements | None = None
    ) -> DTensor:
        """Return numbers of mean `loc` and standard deviation `scale`, as float64."""
        return self._made("normal", shape, mesh, placements, loc=loc, scale=scale)

    def random(
        self, shape: Any, dtype: Any = np.float64, *, mesh: DeviceMesh, placements: Placements | None = None
    ) -> DTensor:
        """Return numbers from 0 up to but not 1, float64 or float32."""
        return self._made("random", shape, mesh, placements, dtype=np.dtype(dtype))

    def uniform(
        self, low: float, high: float, shape: Any, *, mesh: DeviceMesh, placements: Placements | None = None
    ) -> DTensor:
        """Return numbers from `low` up to `high`, as float64."""
        return self._made("uniform", shape, mesh, placements, low=low, high=high)

    def standard_exponential(
        self, shape: Any, dtype: Any = np.float64, *, mesh: DeviceMesh, placements: Placements | None = None
    ) -> DTensor:
        """Return numbers exponentially distributed with mean 1, float64 or float32."""
        return self._made("standard_exponential", shape, mesh, placements, dtype=np.dtype(dtype))

    def integers(
        self,
        low: int,
        high: int | None,
        shape: Any,
        dtype: Any = np.int64,
        *,
        endpoint: bool = False,
        mesh: DeviceMesh,
        placements: Placements | None = None,
    ) -> DTensor:
        """Return integers from `low` up to `high`, excluded unless `endpoint`; from 0 to `low` if `high` is None."""
        return self._made(
            "integers", shape, mesh, placements, low=low, high=high, dtype=np.dtype(dtype), endpoint=endpoint
        )

    def permutation(self, n: int, *, mesh: DeviceMesh, placements: Placements | None = None) -> DTensor:
        """Return the integers below `n` in random order; uses a sample sort if the result is sharded."""
        keys = self._made("integers", (n,), mesh, placements, low=0, high=2**63 - 1, dtype=np.dtype(np.int64))
        return cast(DTensor, np.argsort(cast(Any, keys)))

    def _made(
        self, method: str, shape: Any, mesh: DeviceMesh, placements: Placements | None, **options: Any
    ) -> DTensor:
        for name, value in options.items():
            if np.ndim(value):
                raise TypeError(f"random.{method}: {name} must be one number, got an array of shape {np.shape(value)}")
        layout = layout_on(f"random.{method}", mesh, checked_shape(shape), placements)
        if min(layout.shape, default=0) < 0:
            raise ValueError(f"random.{method}: negative dimensions are not allowed, got {layout.shape}")
        if layout.pending:
            raise PlacementError(f"random.{method}: placements must not be Partial, got {list(layout.placements)}")
        # Bad options raise here, on every rank, whatever its block. NumPy checks bounds only where there are elements.
        probe = min(1, math.prod(layout.shape))
        dtype = np.asarray(getattr(np.random.Generator(np.random.Philox(0)), method)(size=probe, **options)).dtype
        block = np.empty(layout.local_shape(coordinate_in(mesh)), dtype)
        bits = np.random.Philox(key=self._key)
        state: Any = bits.state
        generator = np.random.Generator(bits)
        fill = getattr(generator, method)
        for number, size, taken, put in _tiles(layout, coordinate_in(mesh)):
            state["state"]["counter"] = np.array([0, 0, number, self._calls], np.uint64)
            bits.state = state
            block[put] = fill(size=size, **options)[taken]
        self._calls += 1
        return wrap(array_module(mesh).asarray(block), layout, mesh)


@lru_cache(maxsize=1_000)
def _extents(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the extents of the tiles: nearly cubes, so that a tile meets few of the blocks, however they are cut."""
    tile = [max(rows, 1) for rows in shape]
    while math.prod(tile) > _MOST_IN_A_TILE:
        longest = tile.index(max(tile))
        tile[longest] = -(-tile[longest] // 2)
    return tuple(tile)


def _tiles(layout: ArrayLayout, coordinate: tuple[int, ...]) -> Any:
    """Return for each tile that meets a block its number, shape, what is taken of it, and where that is put."""
    tile, held = _extents(layout.shape), layout.index(coordinate)
    if any(part.start == part.stop for part in held):
        return
    counts = [max(1, -(-rows // extent)) for rows, extent in zip(layout.shape, tile, strict=True)]
    along = [range(part.start // extent, -(-part.stop // extent)) for part, extent in zip(held, tile, strict=True)]
    for at in product(*along):
        number = 0
        size, taken, put = [], [], []
        for place, count, extent, rows, part in zip(at, counts, tile, layout.shape, held, strict=True):
            number = number * count + place
            first, last = place * extent, min(place * extent + extent, rows)
            low, high = max(first, part.start), min(last, part.stop)
            size.append(last - first)
            taken.append(slice(low - first, high - first))
            put.append(slice(low - part.start, high - part.start))
        yield number, tuple(size), tuple(taken), tuple(put)
