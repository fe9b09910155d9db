"""Products of vectors, matrices and more, as contractions by labels: the sum over a sharded label is a pending sum.

They are matmul, dot, tensordot, einsum and their like; the cross product of unsharded vectors is beside them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from meshdist.system.plurals import counted
from meshdist.tensor.agreement import Origin, merged, origin_of
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.diagonals import diagonal
from meshdist.tensor.dispatch import implements
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.elementwise import remember
from meshdist.tensor.index_keys import along, normalized
from meshdist.tensor.index_space import Alignment, Labels, Passes, States, align, linear_in_each
from meshdist.tensor.known_calls import localizes, on_blocks
from meshdist.tensor.operands import aligned, as_operand, checked_out, mesh_of, written


def _one_pending_sum(states: States) -> tuple[str, States] | None:
    passed = linear_in_each(states)
    return passed if passed is not None and passed[0] != "product" else None


def contracted(
    name: str,
    operands: Sequence[DTensor],
    labels: Sequence[Labels],
    result: Labels,
    dtype: Any,
    compute: Callable[..., Any],
) -> tuple[DTensor, Alignment]:
    """Return the products of operands, summed over the labels that are not in `result`; and how they were aligned.

    Args:
        name: The operation, for messages.
        operands: The arrays.
        labels: A label for each dimension of each operand, none twice in one; dimensions of one row are broadcast.
        result: The labels of the result's dimensions.
        dtype: The result's.
        compute: Takes the blocks and returns the result's.
    """
    exact = all(x.dtype == dtype or (x.dtype.kind in "fc" and dtype.kind in "fc") for x in operands if x.layout.pending)
    # An infinity times the parts of a sum would give NaN where the whole sum has a sign; integers are finite.
    finite = sum(x.dtype.kind in "fc" for x in operands) <= 1
    passes = _one_pending_sum if exact and finite else None
    blocks, alignment, mesh = aligned(name, operands, labels, passes)
    layouts = tuple([x.layout for x in operands])
    layout, origin = _result_layout(layouts, tuple(labels), result, passes)
    if alignment.pending:
        origin = merged(origin, *[x._origin for x in operands])
    return wrap(compute(*blocks), layout, mesh, origin), alignment


@lru_cache(10_000)
def _result_layout(
    layouts: tuple[ArrayLayout, ...], labels: tuple[Labels, ...], result: Labels, passes: Passes | None
) -> tuple[ArrayLayout, Origin]:
    """Return the layout of the result, and its origin if it is a sum over labels that are cut."""
    alignment = align(layouts, labels, passes)
    extents: dict[Hashable, int] = {}
    for layout, names in zip(layouts, labels, strict=True):
        for rows, label in zip(layout.shape, names, strict=True):
            if extents.get(label, 1) == 1:
                extents[label] = rows
    pending = dict(alignment.pending)
    origin = None
    for label, cut in alignment.cuts.items():
        if label not in result:
            pending.update(dict.fromkeys(cut.axes, "sum"))
            origin = origin_of(*layouts)
    shape = tuple(extents[label] for label in result)
    return ArrayLayout.of_cuts(shape, layouts[0].mesh_shape, alignment.cuts_of(result), pending), origin


# ---- Ufuncs with a signature: the labels of the operands' last dimensions, and of the result's

_CORE: dict[str, tuple[str, str, str]] = {
    "matmul": ("mk", "kn", "mn"),
    "vecdot": ("k", "k", ""),
    "matvec": ("mk", "k", "m"),
    "vecmat": ("k", "kn", "n"),
}


def _generalized(ufunc: np.ufunc, a: Any, b: Any, out: Any = None, **kwargs: Any) -> Any:
    name = f"np.{ufunc.__name__}"
    out = checked_out(name, out)
    given = (a, b)
    mesh = mesh_of(name, (a, b, out))
    operands = (as_operand(name, a, mesh), as_operand(name, b, mesh))
    unknown = set(kwargs) - {"dtype", "casting", "order", "subok"}
    if unknown:
        raise TypeError(f"{name}: {unknown.pop()}= is not available for DTensors; transpose the operands")
    shapes, dtypes = tuple([x.shape for x in operands]), tuple([x.dtype for x in operands])
    labels, of_result = _labelled(ufunc, shapes)
    dtype = _dtype_of(ufunc, dtypes) if not kwargs else _dtype_of.__wrapped__(ufunc, dtypes, **kwargs)
    result, alignment = contracted(name, operands, labels, of_result, dtype, partial(ufunc, **kwargs))
    if out is not None:
        checked_out(name, out, result.shape)
        return written(name, result, out, kwargs.get("casting", "same_kind"))
    if not kwargs:
        remember(ufunc, given, result.layout, alignment.targets)
    return result


@lru_cache(10_000)
def _labelled(ufunc: np.ufunc, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[Labels, ...], Labels]:
    """Return the labels of the operands and of the result; batch dimensions are numbered from the last."""
    first, second, result = _CORE[ufunc.__name__]
    if ufunc is np.matmul:  # which takes vectors
        if len(shapes[0]) == 1:
            first, result = "k", result.replace("m", "")
        if len(shapes[1]) == 1:
            second, result = "k", result.replace("n", "")
    labels: list[Labels] = []
    for number, (shape, names) in enumerate(zip(shapes, (first, second), strict=True)):
        if len(shape) < len(names) or not shape:
            raise ValueError(
                f"np.{ufunc.__name__}: operand {number} must have at least"
                f" {counted(len(names), 'dimension')}, got {len(shape)}"
            )
        labels.append((*range(len(names) - len(shape), 0), *names))
    _check_rows(f"np.{ufunc.__name__}", shapes, tuple(labels))
    batch = range(min(len(names) - len(shape) for shape, names in zip(shapes, (first, second), strict=True)), 0)
    return tuple(labels), (*batch, *result)


@lru_cache(1000)
def _dtype_of(ufunc: np.ufunc, dtypes: tuple[np.dtype[Any], ...], **kwargs: Any) -> np.dtype[Any]:
    probes = [np.zeros((1,) * len(names), dtype) for names, dtype in zip(_CORE[ufunc.__name__], dtypes, strict=False)]
    made: Any = ufunc(*probes, **kwargs)
    dtype: np.dtype[Any] = made.dtype
    return dtype


@lru_cache(10_000)
def _check_rows(
    name: str, shapes: tuple[tuple[int, ...], ...], labels: tuple[Labels, ...], broadcast: bool = False
) -> None:
    """Raise ValueError where dimensions of one label differ; those of one row may if their label is a number."""
    rows: dict[Hashable, tuple[int, int]] = {}  # the extent of each label, and the dimension that has it
    for shape, names in zip(shapes, labels, strict=True):
        for dim, (extent, label) in enumerate(zip(shape, names, strict=True)):
            known, known_dim = rows.setdefault(label, (extent, dim))
            if known == extent:
                continue
            if 1 not in (known, extent) or not (broadcast or isinstance(label, int)):
                given = " and ".join(map(str, shapes))  # in NumPy's words
                raise ValueError(
                    f"{name}: shapes {given} not aligned: {known} (dim {known_dim}) != {extent} (dim {dim})"
                )
            if known == 1:
                rows[label] = extent, dim


for _name in _CORE:
    if hasattr(np, _name):
        implements((getattr(np, _name), "__call__"))(_generalized)


# ---- Functions of two arrays


def _of_two(
    name: str,
    a: Any,
    b: Any,
    labels: tuple[Labels, Labels],
    result: Labels,
    compute: Callable[..., Any],
    out: Any = None,
) -> Any:
    out = checked_out(name, out)
    mesh = mesh_of(name, (a, b, out))
    operands = (as_operand(name, a, mesh), as_operand(name, b, mesh))
    _check_rows(name, tuple([x.shape for x in operands]), labels)
    dtype = np.result_type(operands[0].dtype, operands[1].dtype)
    made, _ = contracted(name, operands, labels, result, dtype, compute)
    if out is not None:
        checked_out(name, out, made.shape)
        if out.dtype != made.dtype:  # as NumPy, which does not cast here
            raise ValueError(f"{name}: out= must have the dtype {made.dtype} of the result, got {out.dtype}")
    return written(name, made, out)


def _like_whole(function: Any, a: Any, b: Any) -> Any:
    """Return `function`, a product of two arrays by BLAS, for their blocks.

    NumPy multiplies an array by one of a single element as BLAS's axpy does, which skips a factor of zero: the product
    with NaN is 0. A block may have one element where the array has more, and then the product is NaN.
    """
    if 1 in (np.size(a), np.size(b)):
        return function

    def of_blocks(x: Any, y: Any) -> Any:
        made = function(x, y)
        return (x.reshape(-1) * y.reshape(-1)).reshape(np.shape(made)) if 1 in (x.size, y.size) else made

    return of_blocks


def _again(function: Any) -> None:
    """Repeat calls of a product on the blocks, except on a block of one element: see `_like_whole`."""

    @localizes(function)
    def localizer(result: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = (x.to_local() if isinstance(x, DTensor) else x for x in (a, b))
        return None if 1 in map(np.size, blocks) else function


@lru_cache(100)
def _letters(prefix: str, count: int) -> Labels:
    return tuple(f"{prefix}{dim}" for dim in range(count))


@implements(np.dot)
def dot(a: Any, b: Any, out: Any = None) -> Any:
    """Return the product over the last dimension of `a` and the last but one of `b`; see `numpy.dot`."""
    if out is None and np.ndim(a) == np.ndim(b) == 2 and 1 not in (np.size(a), np.size(b)):
        return operator.matmul(a, b)
    first, second = _letters("a", np.ndim(a)), _letters("b", np.ndim(b))
    if not first or not second:
        return _of_two("np.dot", a, b, (first, second), (*first, *second), np.dot, out)
    at = max(len(second) - 2, 0)
    second = (*second[:at], first[-1], *second[at + 1 :])
    result = (*first[:-1], *(label for label in second if label != first[-1]))
    return _of_two("np.dot", a, b, (first, second), result, _like_whole(np.dot, a, b), out)


@implements(np.inner)
def inner(a: Any, b: Any) -> Any:
    """Return the product over the last dimensions; see `numpy.inner`."""
    first, second = _letters("a", np.ndim(a)), _letters("b", np.ndim(b))
    if not first or not second:
        return _of_two("np.inner", a, b, (first, second), (*first, *second), np.inner)
    result = (*first[:-1], *second[:-1])
    return _of_two("np.inner", a, b, (first, (*second[:-1], first[-1])), result, _like_whole(np.inner, a, b))


@implements(np.vdot)
def vdot(a: Any, b: Any) -> Any:
    """Return the sum of the products of all elements, those of `a` conjugated; see `numpy.vdot`."""
    if np.shape(a) != np.shape(b):
        a, b = (x if np.ndim(x) == 1 else np.ravel(x) for x in (a, b))
    if np.shape(a) != np.shape(b):
        raise ValueError(f"np.vdot: vectors have different lengths: {np.size(a)} and {np.size(b)}")
    labels = _letters("a", np.ndim(a))
    return _of_two("np.vdot", a, b, (labels, labels), (), np.vdot)


@implements(np.outer)
def outer(a: Any, b: Any, out: Any = None) -> Any:
    """Return the products of all pairs of elements; see `numpy.outer`."""
    a, b = (x if np.ndim(x) == 1 else np.ravel(x) for x in (a, b))
    return _of_two("np.outer", a, b, (("a",), ("b",)), ("a", "b"), np.outer, out)


@implements(np.tensordot)
def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """Return the product over dimensions of both arrays; see `numpy.tensordot`."""
    dims = (np.ndim(a), np.ndim(b))
    if hasattr(axes, "__index__"):
        number = operator.index(axes)
        pairs: tuple[Any, Any] = (range(-number, 0), range(number))
    else:
        pairs = tuple((at,) if hasattr(at, "__index__") else tuple(at) for at in axes)  # type: ignore[assignment]
    for n, side in zip(dims, pairs, strict=True):
        if any(not -n <= at < n for at in side):
            raise IndexError(f"np.tensordot: axes={axes!r} of arrays of shapes {np.shape(a)} and {np.shape(b)}")
    if len(pairs[0]) != len(pairs[1]):
        raise ValueError(f"np.tensordot: axes={axes!r} must name as many dimensions of one array as of the other")
    left, right = (tuple(operator.index(at) % n for at in side) for n, side in zip(dims, pairs, strict=True))
    first, second = list(_letters("a", dims[0])), list(_letters("b", dims[1]))
    for at, other in zip(left, right, strict=True):
        second[other] = first[at]
    result = (
        *(label for dim, label in enumerate(first) if dim not in left),
        *(label for dim, label in enumerate(second) if dim not in right),
    )
    labels = (tuple(first), tuple(second))
    of_blocks = _like_whole(lambda x, y: np.tensordot(x, y, (left, right)), a, b)
    return _of_two("np.tensordot", a, b, labels, result, of_blocks)


for _product in (np.dot, np.inner, np.tensordot):
    _again(_product)
on_blocks(np.vdot, np.outer)


@implements(np.cross)
def cross(a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> DTensor:
    """Return the cross products of vectors with three components, which are not sharded; see `numpy.cross`."""
    if axis is not None:
        axisa = axisb = axisc = axis
    mesh = mesh_of("np.cross", (a, b))
    a, b = as_operand("np.cross", a, mesh), as_operand("np.cross", b, mesh)
    first, second = normalized(axisa, a.ndim), normalized(axisb, b.ndim)
    if a.shape[first] != 3 or b.shape[second] != 3:
        raise ValueError(
            f"np.cross: vectors of DTensors must have 3 components, got {a.shape[first]} and {b.shape[second]}"
        )
    x, y = ([array[along(dim, at)] for at in range(3)] for array, dim in ((a, first), (b, second)))
    parts = [x[i] * y[j] - x[j] * y[i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return np.stack(parts, axisc)  # type: ignore[return-value]


# ---- einsum

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class _Einsum(NamedTuple):
    """How to compute an einsum.

    Attributes:
        diagonals: For each operand the pairs of dimensions of which the diagonal is taken first, one after the other.
        labels: The labels of each operand's dimensions after that.
        result: The labels of the result's.
        text: The subscripts for the blocks.
        dtype: The result's.
    """

    diagonals: tuple[tuple[tuple[int, int], ...], ...]
    labels: tuple[Labels, ...]
    result: Labels
    text: str
    dtype: np.dtype[Any]


@implements(np.einsum)
def einsum(*operands: Any, out: Any = None, optimize: Any = False, **kwargs: Any) -> Any:
    """Return the sum that the labels of the dimensions say; see `numpy.einsum`."""
    out = checked_out("np.einsum", out)
    subscripts, given = _arguments(operands)
    mesh = mesh_of("np.einsum", (*given, out))
    arrays = [as_operand("np.einsum", x, mesh) for x in given]
    shapes, dtypes = tuple([x.shape for x in arrays]), tuple([x.dtype for x in arrays])
    plan = _einsum_plan(subscripts, shapes, dtypes, bool(optimize), tuple(kwargs.items()))
    for number, pairs in enumerate(plan.diagonals):
        for pair in pairs:
            arrays[number] = diagonal(arrays[number], 0, *pair)

    def compute(*blocks: Any) -> Any:
        made = np.einsum(plan.text, *blocks, optimize=optimize, **kwargs)
        return made.copy() if len(blocks) == 1 else made  # of one operand, it may be a view

    made, _ = contracted("np.einsum", arrays, plan.labels, plan.result, plan.dtype, compute)
    if out is not None:
        checked_out("np.einsum", out, made.shape)
    return written("np.einsum", made, out, kwargs.get("casting", "safe"))


@localizes(np.einsum)
def _einsum_alike(result: Any, subscripts: Any, *operands: Any, **kwargs: Any) -> Any:
    # Of one operand the result may be a view; and of a diagonal the ranks have different parts.
    if type(subscripts) is not str or len(operands) < 2:
        return None
    terms = subscripts.replace(" ", "").partition("->")[0].replace("...", "").split(",")
    return np.einsum if all(len(set(term)) == len(term) for term in terms) else None


def _arguments(operands: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """Return the subscripts, as text or as lists of labels and those of the result or None; and the arrays."""
    if not operands:
        raise ValueError("np.einsum: expected subscripts and operands")
    if isinstance(operands[0], str):
        return operands[0], list(operands[1:])
    lists = [tuple(label if label is Ellipsis else f"{label:06d}" for label in labels) for labels in operands[1::2]]
    result = None
    if len(operands) % 2:
        result = tuple(label if label is Ellipsis else f"{label:06d}" for label in operands[-1])
    return (tuple(lists), result), list(operands[: len(operands) // 2 * 2 : 2])


@lru_cache(10_000)
def _einsum_plan(
    subscripts: Any,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[np.dtype[Any], ...],
    sums_ellipsis: bool,
    options: tuple[tuple[str, Any], ...],
) -> _Einsum:
    named, result = _parsed(subscripts, shapes, sums_ellipsis)
    reduced = [_without_repetition(shape, labels) for shape, labels in zip(shapes, named, strict=True)]
    labels = tuple(labels for _, labels, _ in reduced)
    _check_rows("np.einsum", tuple(shape for _, _, shape in reduced), labels, broadcast=True)
    known = list(dict.fromkeys(label for names in labels for label in names))
    if len(known) > len(_LETTERS):
        raise ValueError(f"np.einsum: at most {len(_LETTERS)} labels, got {len(known)}")
    letter = dict(zip(known, _LETTERS, strict=False))
    text = ",".join("".join(letter[label] for label in names) for names in labels)
    text += "->" + "".join(letter[label] for label in result)
    probes = [np.zeros((1,) * len(names), dtype) for names, dtype in zip(labels, dtypes, strict=True)]
    dtype = np.dtype(np.einsum(text, *probes, **dict(options)).dtype)
    return _Einsum(tuple(pairs for pairs, _, _ in reduced), labels, result, text, dtype)


def _parsed(subscripts: Any, shapes: tuple[tuple[int, ...], ...], sums_ellipsis: bool) -> tuple[list[Labels], Labels]:
    """Return the labels of the operands' dimensions, and those of the result."""
    if isinstance(subscripts, str):
        terms, arrow, after = subscripts.replace(" ", "").partition("->")
        lists = [_subscripts(term) for term in terms.split(",")]
        explicit = _subscripts(after) if arrow else None
    else:
        lists, explicit = subscripts
    if len(lists) != len(shapes):
        raise ValueError(
            f"np.einsum: {counted(len(lists), 'list')} of subscripts for {counted(len(shapes), 'operand')}"
        )
    named: list[Labels] = []
    widest = 0
    for shape, labels in zip(shapes, lists, strict=True):
        spare = len(shape) - len(labels) + labels.count(Ellipsis)
        if spare < 0 or (spare and Ellipsis not in labels) or labels.count(Ellipsis) > 1:
            raise ValueError(f"np.einsum: subscripts {labels} do not fit an operand of shape {shape}")
        widest = max(widest, spare)
        named.append(_expanded(labels, spare))
    if explicit is None:
        every = [label for labels in lists for label in labels if label is not Ellipsis]
        once = sorted(label for label in set(every) if every.count(label) == 1)
        explicit = (*((Ellipsis,) if widest else ()), *once)
    result = _expanded(explicit, widest)
    if len(set(result)) != len(result) or not set(result) <= {label for labels in named for label in labels}:
        raise ValueError(
            f"np.einsum: each subscript of the result {explicit} must be one of the operands', and occur once"
        )
    if widest and Ellipsis not in explicit and not sums_ellipsis:
        raise ValueError("np.einsum: the result must have an ellipsis where operands broadcast dimensions by one")
    return named, result


def _subscripts(term: str) -> tuple[Any, ...]:
    before, dots, after = term.partition("...")
    listed = (*before, *((Ellipsis,) if dots else ()), *after)
    if any(label is not Ellipsis and label not in _LETTERS for label in listed):
        raise ValueError(f"np.einsum: subscripts must be letters, an ellipsis and one arrow, got {term!r}")
    return listed


def _expanded(labels: Sequence[Any], spare: int) -> Labels:
    """Return labels with numbers, counted from the last, for the dimensions that an ellipsis stands for."""
    made: list[Hashable] = []
    for label in labels:
        made.extend(range(-spare, 0) if label is Ellipsis else (label,))
    return tuple(made)


def _without_repetition(
    shape: tuple[int, ...], labels: Labels
) -> tuple[tuple[tuple[int, int], ...], Labels, tuple[int, ...]]:
    """Return the pairs of dimensions of one label, of which diagonals are taken; labels and shape after that."""
    names, extents, pairs = list(labels), list(shape), []
    for label in dict.fromkeys(labels):
        while names.count(label) > 1:
            first = names.index(label)
            second = names.index(label, first + 1)
            rows = extents[first]
            if rows != extents[second]:
                raise ValueError(f"np.einsum: dimensions of {rows} and {extents[second]} rows have one label")
            pairs.append((first, second))
            for at in (second, first):
                del names[at], extents[at]
            names.append(label)
            extents.append(rows)
    return tuple(pairs), tuple(names), tuple(extents)
