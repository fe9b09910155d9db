"""numpy.linalg on DTensors: of matrices that are whole on each rank, and of tall ones sharded along their rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.all_reduce import all_reduce
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.mesh.layout.axes_and_chunks import chunk_sizes
from meshdist.tensor.agreement import words_of
from meshdist.tensor.array_layout import ArrayLayout, Cut, is_cut
from meshdist.tensor.dispatch import implements
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.moves import group_of
from meshdist.tensor.operands import aligned, local_of, require

# ---- Matrices that are whole

_TALL_TOO = {
    "np.linalg.qr": " (a tall one may be sharded along dimension 0, with mode='reduced' or 'r')",
    "np.linalg.svd": " (a tall one may be sharded along dimension 0, with full_matrices=False or compute_uv=False)",
}


def whole(name: str, operand: Any, core: int, what: str = "x") -> Any:
    """Return an operand, in messages `what`, with its last `core` dimensions whole on every rank, and not pending."""
    if not isinstance(operand, DTensor):
        return np.asarray(operand)
    batch = max(operand.ndim - core, 0)
    resolved = operand.layout.resolved()
    target = resolved.with_cuts([*resolved.cuts[:batch], *[None] * (operand.ndim - batch)])
    if target is operand.layout:
        return operand
    why = f"{'matrices' if core == 2 else 'vectors'} must be whole on every rank" + _TALL_TOO.get(name, "")
    return wrap(require(name, operand, target, why, what), target, operand.mesh)


def _on_matrices(function: Any, name: str, operands: tuple[Any, ...], cores: tuple[int, ...], options: Any) -> Any:
    """Compute on the blocks of stacks of matrices, which are sharded along batch dimensions only."""
    for operand, core in zip(operands, cores, strict=True):
        if core == 2 and np.ndim(operand) < 2:
            raise np.linalg.LinAlgError(
                f"{np.ndim(operand)}-dimensional array given. Array must be at least two-dimensional"
            )
    batches = [np.shape(operand)[: np.ndim(operand) - core] for operand, core in zip(operands, cores, strict=True)]
    batch = np.broadcast_shapes(*batches)
    names = ("x",) if len(operands) == 1 else ("a", "b")
    operands = tuple(whole(name, *each) for each in zip(operands, cores, names, strict=True))
    if len(operands) == 1:
        (matrix,) = operands
        return _placed(function(matrix.to_local(), **options), batch, matrix.layout.cuts[: len(batch)], matrix.mesh)
    labels = [
        (*range(-len(stack), 0), *((number, place) for place in range(core)))
        for number, (stack, core) in enumerate(zip(batches, cores, strict=True))
    ]
    blocks, alignment, mesh = aligned(name, operands, labels)
    return _placed(function(*blocks, **options), batch, alignment.cuts_of(range(-len(batch), 0)), mesh)


def _placed(found: Any, batch: tuple[int, ...], cuts: tuple[Cut | None, ...], mesh: DeviceMesh) -> Any:
    """Return one or several results, each with these batch dimensions, as DTensors."""
    if isinstance(found, tuple):
        results = [_placed(each, batch, cuts, mesh) for each in found]
        return _together(type(found), results)
    rows = np.shape(found)[len(batch) :]
    return wrap(found, ArrayLayout.of_cuts(batch + rows, mesh.shape, cuts + (None,) * len(rows), {}), mesh)


def _together(kind: Any, results: list[DTensor]) -> Any:
    """Return several results in NumPy's named tuple, or in a tuple, as its older versions do."""
    return kind(*results) if hasattr(kind, "_fields") else tuple(results)


def _register(function: Any) -> None:
    name = f"np.linalg.{function.__name__}"

    def on_matrices(a: Any, **options: Any) -> Any:
        return _on_matrices(function, name, (a,), (2,), options)

    implements(function)(on_matrices)


for _function in (np.linalg.inv, np.linalg.det, np.linalg.slogdet):
    _register(_function)


def _eigen(function: Any) -> None:
    """Register a function whose results are complex if an eigenvalue of any matrix of the stack is."""
    name = f"np.linalg.{function.__name__}"

    @implements(function)
    def of_stack(a: Any) -> Any:
        def of_block(block: Any) -> Any:
            found = function(block)
            return found if block.dtype.kind == "c" else _complex_if_any(found, name, a)

        return _on_matrices(of_block, name, (a,), (2,), {})


def _complex_if_any(found: Any, name: str, a: DTensor) -> Any:
    """Return the eigenvalues, and vectors, of this rank's matrices; complex if those of any rank are, as NumPy does."""
    results = found if isinstance(found, tuple) else (found,)
    mesh, cuts = a.mesh, a.layout.cuts[:-2]
    axes = tuple(sorted(axis for cut in cuts if cut is not None for axis in cut.axes if mesh.shape[axis] > 1))
    if not axes:
        return found
    is_complex = array_module(mesh).asarray([results[0].dtype.kind == "c"], dtype=np.uint8)
    group = group_of(mesh, axes)
    with group.hooks.comparing(words_of(name, a.layout)):
        all_reduce(is_complex, "max", group)
    if not is_complex[0]:
        return found
    results = tuple(x.astype(np.result_type(x.dtype, np.complex64), copy=False) for x in results)
    return _together(type(found), list(results)) if isinstance(found, tuple) else results[0]


_eigen(np.linalg.eig)
_eigen(np.linalg.eigvals)


@implements(np.linalg.cholesky)
def cholesky(a: Any, /, *, upper: bool = False) -> Any:
    """Compute Cholesky factors of whole matrices."""
    return _on_matrices(np.linalg.cholesky, "np.linalg.cholesky", (a,), (2,), {"upper": True} if upper else {})


@implements(np.linalg.eigh)
def eigh(a: Any, UPLO: str = "L") -> Any:
    """Compute eigenvalues and eigenvectors of whole Hermitian matrices."""
    return _on_matrices(np.linalg.eigh, "np.linalg.eigh", (a,), (2,), {"UPLO": UPLO})


@implements(np.linalg.eigvalsh)
def eigvalsh(a: Any, UPLO: str = "L") -> Any:
    """Compute eigenvalues of whole Hermitian matrices."""
    return _on_matrices(np.linalg.eigvalsh, "np.linalg.eigvalsh", (a,), (2,), {"UPLO": UPLO})


@implements(np.linalg.solve)
def solve(a: Any, b: Any) -> Any:
    """Solve systems of whole matrices; `b` is a vector where it has one dimension, as in NumPy."""
    if np.ndim(b) == (1 if _IS_NUMPY_2 else np.ndim(a) - 1):
        if np.ndim(a) >= 2 and np.shape(b)[-1] != np.shape(a)[-1]:
            raise ValueError(f"np.linalg.solve: a of shape {np.shape(a)} and b of shape {np.shape(b)} do not fit")
        return _on_matrices(np.linalg.solve, "np.linalg.solve", (a, b), (2, 1), {})
    return _on_matrices(np.linalg.solve, "np.linalg.solve", (a, b), (2, 2), {})


# ---- Tall matrices


def _is_tall(a: Any) -> bool:
    """Return whether `a` is one matrix that is sharded, and has as many rows as columns."""
    return (
        isinstance(a, DTensor)
        and a.ndim == 2
        and a.shape[0] >= a.shape[1]
        and (is_cut(a.layout, 0) or is_cut(a.layout, 1))
    )


def _cut_by_rows(name: str, a: DTensor) -> DTensor:
    """Return a tall matrix sharded along its rows alone: as it is, or else along the axes that shard its columns.

    Raises:
        PlacementError: Its columns are sharded, outside of `implicit_redistribution`.
    """
    layout = a.layout.resolved()
    by_rows, by_columns = layout.cuts
    if not is_cut(layout, 1):
        return a
    assert by_columns is not None
    if not is_cut(layout, 0):
        axes = by_columns.axes
        parts = math.prod(layout.mesh_shape[axis] for axis in axes)
        by_rows = Cut(axes, chunk_sizes(a.shape[0], parts))
    target = layout.with_cuts((by_rows, None))
    return wrap(require(name, a, target, "the columns of a tall matrix must not be sharded", "a"), target, a.mesh)


def _tall_qr(name: str, a: DTensor) -> tuple[Any, Any, ArrayLayout]:
    """Return this rank's rows of Q, the whole of R, and the layout of Q.

    TSQR (Demmel, Grigori, Hoemmen and Langou 2012, "Communication-optimal parallel and sequential QR and LU"): every
    rank factors its rows, and the stacked factors R of the ranks along an axis are factored again, axis after axis.
    """
    mesh, layout = a.mesh, a.layout.resolved()
    module = array_module(mesh)
    cut = layout.cuts[0]
    assert cut is not None
    columns = a.shape[1]
    q, r = np.linalg.qr(local_of(a, layout, mesh))
    for axis in reversed(cut.axes):
        short = columns - r.shape[0]
        if short:  # fewer rows than columns
            r = module.concatenate((r, module.zeros((short, columns), r.dtype)))
            q = module.concatenate((q, module.zeros((q.shape[0], short), q.dtype)), axis=1)
        stacked = module.empty((mesh.shape[axis] * columns, columns), r.dtype)
        group = mesh.get_group(axis)
        with group.hooks.comparing(words_of(name, layout)):
            all_gather_into_tensor(stacked, module.ascontiguousarray(r), group)
        of_all, r = np.linalg.qr(stacked)
        place = mesh.get_local_rank(axis)
        q = q @ of_all[place * columns : (place + 1) * columns]
    signs = _lapack_signs(_first_rows(q, layout, mesh), a.shape[0] == columns)
    return q * signs, signs[:, None] * r, layout


def _first_rows(q: Any, layout: ArrayLayout, mesh: DeviceMesh) -> Any:
    """Return the square matrix of the first rows of the whole Q."""
    columns = layout.shape[1]
    held = layout.index(coordinate_in(mesh))[0]
    rows = array_module(mesh).zeros((columns, columns), q.dtype)
    count = max(0, min(held.stop, columns) - held.start)
    rows[held.start : held.start + count] = q[:count]
    for axis in layout.axes_of(0):
        all_reduce(rows, group=mesh.get_group(axis))
    return rows


def _lapack_signs(rows: Any, is_square: bool) -> Any:
    """Return the signs that Householder's reflections, as LAPACK makes them, give the columns of Q.

    They are those of the modified LU factorization that rebuilds the reflections from Q (Ballard et al. 2014,
    "Reconstructing Householder vectors from tall-skinny QR"). A reflection of a column that is zero below the
    diagonal, which here is up to half of the digits, changes no sign.
    """
    columns = rows.shape[0]
    signs = np.ones(columns, rows.real.dtype)
    rows = np.array(rows.get() if hasattr(rows, "get") else rows)
    tiny = 8 * columns * np.finfo(signs.dtype).eps
    for at in range(columns):
        pivot = rows[at, at]
        positive = 1.0 if pivot.real >= 0 else -1.0
        is_reflected = abs(abs(pivot.real) - 1) > tiny and not (
            is_square and at == columns - 1 and rows.dtype.kind == "f"
        )
        signs[at] = -positive if is_reflected else positive
        rest = rows[at + 1 :, at] / (pivot - signs[at]) if pivot != signs[at] else np.zeros_like(rows[at + 1 :, at])
        rows[at + 1 :, at + 1 :] -= rest[:, None] * rows[at, at + 1 :]
    return signs


@implements(np.linalg.qr)
def qr(a: Any, mode: str = "reduced") -> Any:
    """Factor whole matrices, and a tall one sharded along its rows: Q is sharded the same way, and R replicates.

    Of a tall one the signs are LAPACK's; they may differ for columns that are nearly, but not quite, zero below the
    diagonal.
    """
    if not _is_tall(a) or mode not in ("reduced", "r"):
        return _on_matrices(np.linalg.qr, "np.linalg.qr", (a,), (2,), {"mode": mode})
    q, r, layout = _tall_qr("np.linalg.qr", _cut_by_rows("np.linalg.qr", a))
    if mode == "r":
        return _placed(r, (), (), a.mesh)
    return _together(_QR_RESULT, [wrap(q, layout, a.mesh), _placed(r, (), (), a.mesh)])


@implements(np.linalg.svd)
def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    """Decompose whole matrices; with `full_matrices=False` or `compute_uv=False` also one sharded along its rows.

    The latter must be tall: U is sharded the same way, and the others replicate. The signs of singular vectors may
    differ from NumPy's.
    """
    name = "np.linalg.svd"
    if (full_matrices and compute_uv) or hermitian:
        options = {"full_matrices": full_matrices, "compute_uv": compute_uv, "hermitian": hermitian}
        return _on_matrices(np.linalg.svd, name, (a,), (2,), options)
    return reduced_svd(name, a) if compute_uv else singular_values(name, a)


def reduced_svd(name: str, a: Any) -> Any:
    """Return U, the singular values and V^H, without what `full_matrices` adds, for the function `name`."""
    if not _is_tall(a):
        return _on_matrices(np.linalg.svd, name, (a,), (2,), {"full_matrices": False})
    q, r, layout = _tall_qr(name, _cut_by_rows(name, a))
    u, s, vh = np.linalg.svd(r, full_matrices=False)
    placed = [wrap(q @ u, layout, a.mesh), _placed(s, (), (), a.mesh), _placed(vh, (), (), a.mesh)]
    return _together(_SVD_RESULT, placed)


def singular_values(name: str, a: Any) -> Any:
    """Return the singular values alone, for the function `name`."""
    if not _is_tall(a):
        return _on_matrices(np.linalg.svd, name, (a,), (2,), {"compute_uv": False})
    _, r, _ = _tall_qr(name, _cut_by_rows(name, a))
    return _placed(np.linalg.svd(r, compute_uv=False), (), (), a.mesh)


_IS_NUMPY_2 = int(np.__version__.split(".")[0]) >= 2
_QR_RESULT: Any = type(np.linalg.qr(np.ones((1, 1))))
_SVD_RESULT: Any = type(np.linalg.svd(np.ones((1, 1))))
