"""SUMMA: the product of matrices that a 2-d mesh shards along both dimensions, by broadcasts of panels.

R. van de Geijn and J. Watts, SUMMA: scalable universal matrix multiplication algorithm, 1997.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NoReturn

import numpy as np

from meshdist.tensor.agreement import words_of
from meshdist.tensor.array_layout import ArrayLayout, Cut
from meshdist.tensor.dispatch import begin
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.operands import is_tiled, mesh_of, redistribution_text
from meshdist.tensor.placements import PlacementError, Shard, placements_text


def summa(a: DTensor, b: DTensor, panel: int | None = None) -> DTensor:
    """Return `a @ b` of matrices sharded by rows along the first axis of a 2-d mesh, and by columns along the second.

    For each panel, the ranks that hold columns of `a` broadcast them along the second axis, the ranks that hold rows of
    `b` broadcast them along the first, and every rank adds the product to its block. It needs memory for one panel of
    each matrix.

    Args:
        a: Shape `(m, k)`, placed as `[Shard(0), Shard(1)]` in blocks of any sizes.
        b: Shape `(k, n)`, placed the same way.
        panel: The largest number of columns of `a` in one panel. None: as many as one rank of both matrices has.

    Returns:
        Shape `(m, n)`: its rows are sharded as those of `a`, its columns as those of `b`.

    Raises:
        TypeError: `a` or `b` is not a DTensor.
        PlacementError: `a` or `b` has other placements.
        ValueError: The shapes do not fit, or `panel` is not positive.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.tensor import Shard, distribute_tensor, summa
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2, 2))
        ...     x = distribute_tensor(np.arange(9.0).reshape(3, 3), mesh, [Shard(0), Shard(1)])
        ...     return summa(x, x).full().tolist()
        >>> meshdist.run(program, 4)[0]
        [[15.0, 18.0, 21.0], [42.0, 54.0, 66.0], [69.0, 90.0, 111.0]]
    """
    begin("summa", a, b, panel)
    if not isinstance(a, DTensor) or not isinstance(b, DTensor):
        raise TypeError(f"summa: expected two DTensors, got {type(a).__name__} and {type(b).__name__}")
    mesh = mesh_of("summa", (a, b))
    for name, matrix in (("a", a), ("b", b)):
        if not is_tiled(matrix.layout):
            _refuse(name, matrix)
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"summa: a must have as many columns as b has rows, got {a.shape} and {b.shape}; to pass the transpose of"
            " a matrix x, write x.T.redistribute(x.placements)"
        )
    if panel is not None and panel < 1:
        raise ValueError(f"summa: panel must be positive, got {panel}")
    columns, rows = a.layout.cuts[1], b.layout.cuts[0]
    assert columns is not None
    assert rows is not None
    module = array_module(mesh)
    row, column = coordinate_in(mesh)
    left, right = a.to_local(), b.to_local()
    dtype = np.dtype(np.result_type(left.dtype, right.dtype))
    along_columns, along_rows = mesh.get_group(1), mesh.get_group(0)
    words = words_of("summa", a.layout, b.layout)
    result = module.zeros((left.shape[0], right.shape[1]), dtype)
    for first, last, owner_column, column_start, owner_row, row_start in _panels(columns, rows, panel):
        width = last - first
        # Ranks without rows of `a`, or columns of `b`, need no panels, and neither do their neighbours along the axis.
        if left.shape[0]:
            if owner_column == column:
                factor = module.ascontiguousarray(left[:, first - column_start : last - column_start])
            else:
                factor = module.empty((left.shape[0], width), left.dtype)
            with along_columns.hooks.comparing(words):
                along_columns.broadcast(factor, owner_column)
        if right.shape[1]:
            if owner_row == row:
                other = module.ascontiguousarray(right[first - row_start : last - row_start])
            else:
                other = module.empty((width, right.shape[1]), right.dtype)
            with along_rows.hooks.comparing(words):
                along_rows.broadcast(other, owner_row)
        if result.size:
            result += module.matmul(factor, other)
    layout = ArrayLayout.of_cuts((a.shape[0], b.shape[1]), mesh.shape, (a.layout.cuts[0], b.layout.cuts[1]), {})
    return wrap(result, layout, mesh)


def _refuse(name: str, matrix: DTensor) -> NoReturn:
    """Raise for a matrix that is placed otherwise, with what to write."""
    mesh, given = matrix.mesh, matrix.layout
    described = given.describe(mesh.mesh_dim_names)
    if mesh.ndim != 2 or matrix.ndim != 2:
        raise PlacementError(
            f"summa: {name} must be a matrix on a mesh of two axes, got {described}; write a @ b, which takes arrays on"
            " any mesh"
        )
    wanted = ArrayLayout.of(given.shape, given.mesh_shape, (Shard(0), Shard(1)))
    raise PlacementError(
        f"summa: {name} must be placed as {placements_text(wanted.placements, mesh.mesh_dim_names)}, got {described}."
        f" Call {redistribution_text(name, matrix, wanted)}"
    )


def _panels(columns: Cut, rows: Cut, most: int | None) -> Any:
    """Yield the panels, each within one block of both cuts: its ends, and the number and start of its two blocks."""
    blocks = list(zip(accumulate(columns.sizes), columns.sizes, strict=True))
    others = list(zip(accumulate(rows.sizes), rows.sizes, strict=True))
    first = at = other = 0
    while at < len(blocks) and other < len(others):
        (end, size), (other_end, other_size) = blocks[at], others[other]
        last = min(end, other_end, first + most if most else end)
        if last > first:
            yield first, last, at, end - size, other, other_end - other_size
        first = last
        at, other = at + (last == end), other + (last == other_end)
