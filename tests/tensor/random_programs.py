"""Random programs of NumPy calls, run on whole arrays and on the same arrays over a mesh: the results must be equal.

`python tests/tensor/random_programs.py --programs 100000 --seed 1` runs many on worlds of 1 to 6 ranks, in turn. It
ends with status 1 if one differs, and prints each that does, with its seed and its world: `--ranks 4 --seed 385
--programs 1` runs that one again. With `--device cuda` the blocks are CuPy's, and what CuPy refuses is left out.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import meshdist
from meshdist.tensor import (
    DTensor,
    Partial,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_redistribution,
)

MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2)], 5: [(5,)], 6: [(6,), (2, 3), (3, 2), (1, 2, 3)]}
# A world runs so many programs, then one with a different number of ranks.
_PROGRAMS_OF_A_WORLD = 500
DTYPES = ("float64", "float32", "int64", "int32", "complex128", "bool", "uint8")

# A step takes arrays, NumPy's or DTensors, and returns one.
Step = Callable[[Sequence[Any]], Any]


class Program:
    """A random program of `seed` for a mesh of `mesh_shape`: arrays, their placements, and steps."""

    def __init__(self, seed: int, mesh_shape: tuple[int, ...]) -> None:
        self.rng = np.random.default_rng(seed)
        self.mesh_shape = mesh_shape
        self.log: list[str] = []

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def integer(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def array(self, shape: tuple[int, ...], dtype: str) -> Any:
        values = self.rng.integers(-4, 5, shape) if dtype not in ("bool", "uint8") else self.rng.integers(0, 2, shape)
        array = values.astype(dtype)
        if dtype == "complex128":
            array = array + 1j * self.rng.integers(-2, 3, shape)
        if dtype.startswith("float"):
            array = (array / 2).astype(dtype)
            if self.integer(0, 9) == 0 and array.size:
                array.reshape(-1)[self.integer(0, array.size - 1)] = np.nan
        return array

    def shape(self) -> tuple[int, ...]:
        return tuple(self.one_of((0, 1, 2, 3, 4, 5, 6, 7)) for _ in range(self.one_of((0, 1, 1, 2, 2, 2, 3))))

    def placements(self, shape: tuple[int, ...], pending: bool = False) -> list[Placement]:
        """Return random placements for an array of this shape, with blocks of unequal sizes at times."""
        chosen: list[Placement] = []
        cut: set[int] = set()
        for ranks in self.mesh_shape:
            kind = self.integer(0, 3)
            if kind <= 1 and shape:
                dim = self.integer(0, len(shape) - 1)
                sizes = None
                if dim not in cut and self.integer(0, 2) == 0:
                    at = np.sort(self.rng.integers(0, shape[dim] + 1, ranks - 1))
                    sizes = tuple(int(n) for n in np.diff([0, *at, shape[dim]]))
                cut.add(dim)
                chosen.append(Shard(dim, sizes))
            elif kind == 2 and pending:
                chosen.append(Partial("sum"))
            else:
                chosen.append(Replicate())
        return chosen

    # ---- Steps

    def step(self, shapes: list[tuple[int, ...]], dtypes: list[np.dtype[Any]]) -> Step:
        """Return a random step over arrays of these shapes and dtypes, which may fail in NumPy as well."""
        at = self.integer(0, len(shapes) - 1)
        shape, ndim = shapes[at], len(shapes[at])
        name = self.one_of(list(STEPS))
        self.log.append(f"{name} of array {at}")
        return STEPS[name](self, at, shape, ndim, shapes)

    def axis(self, ndim: int, tuples: bool = True, none: bool = True) -> Any:
        choices: list[Any] = [*range(-ndim, ndim)]
        if none:
            choices += [None, None]
        if tuples and ndim > 1:
            choices += [(0, ndim - 1), (0, 1), ()]
        return self.one_of(choices or [None])


def _unary(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    ufunc = self.one_of((np.exp, np.sqrt, np.abs, np.negative, np.sign, np.isnan, np.floor, np.conjugate, np.square))
    self.log.append(ufunc.__name__)
    if ufunc in (np.sign, np.floor):
        return lambda arrays: ufunc(_steady(arrays[at]))
    return lambda arrays: ufunc(arrays[at])


def _binary(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    names = ("add", "subtract", "multiply", "maximum", "minimum", "greater", "equal", "true_divide", "add", "multiply")
    ufunc = getattr(np, self.one_of(names))
    fitting = [i for i, other in enumerate(shapes) if _broadcasts(shape, other)]
    other = self.one_of(fitting)
    self.log.append(f"{ufunc.__name__} with {other}")
    if ufunc in (np.greater, np.equal):
        return lambda arrays: ufunc(_steady(arrays[at]), _steady(arrays[other]))
    return lambda arrays: ufunc(arrays[at], arrays[other])


def _number(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    ufunc = getattr(np, self.one_of(("add", "subtract", "multiply", "true_divide", "power", "maximum", "less")))
    number = self.one_of((1, 2, 0.5, True))
    self.log.append(f"{ufunc.__name__} with {number}")
    return lambda arrays: ufunc(arrays[at], number)


def _reduction(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    name = self.one_of(("sum", "prod", "max", "min", "mean", "var", "std", "any", "all", "sum", "count_nonzero"))
    function, axis, keepdims = getattr(np, name), self.axis(ndim), bool(self.integer(0, 1))
    self.log.append(f"{name} over {axis}, keepdims {keepdims}")
    return lambda arrays: function(arrays[at], axis=axis, keepdims=keepdims)


def _scan(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    name = self.one_of(("argmax", "argmin", "cumsum", "cumprod", "sort", "argsort"))
    axis = self.axis(ndim, tuples=False, none=name not in ("sort", "argsort", "cumsum", "cumprod"))
    self.log.append(f"{name} over {axis}")
    function = getattr(np, name)
    if name.startswith("arg"):
        stable = {"kind": "stable"} if name == "argsort" else {}
        return lambda arrays: function(_steady(arrays[at]), axis=axis, **stable)
    return lambda arrays: function(arrays[at], axis=axis)


def _contraction(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    pairs = [(i, j) for i, a in enumerate(shapes) for j, b in enumerate(shapes) if a and b and a[-1] == b[-2:][0]]
    if not pairs:
        return _unary(self, at, shape, ndim, shapes)
    left, right = self.one_of(pairs)
    if self.integer(0, 2) == 0 and len(shapes[left]) == len(shapes[right]) == 2:
        self.log.append(f"einsum {left} {right}")
        subscripts = self.one_of(("ij,jk->ik", "ij,jk->ki", "ij,jk->", "ij,jk->i", "ij,jk->ijk"))
        return lambda arrays: np.einsum(subscripts, arrays[left], arrays[right])
    function = self.one_of((np.matmul, np.dot))
    self.log.append(f"{function.__name__} {left} {right}")
    return lambda arrays: function(arrays[left], arrays[right])


def _shaping(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    axis = self.axis(ndim, tuples=False, none=False) or 0
    name = self.one_of(("transpose", "reshape", "expand_dims", "squeeze", "moveaxis", "flip", "ravel", "broadcast_to"))
    new: Any = None
    if name == "reshape":
        new = self.one_of(_reshapes(shape))
    elif name == "broadcast_to":
        new = (2, *(3 if rows == 1 else rows for rows in shape))
    self.log.append(f"{name} {axis} {new}")
    steps: dict[str, Step] = {
        "transpose": lambda arrays: arrays[at].T,
        "reshape": lambda arrays: np.reshape(arrays[at], new),
        "expand_dims": lambda arrays: np.expand_dims(arrays[at], axis),
        "squeeze": lambda arrays: np.squeeze(arrays[at]),
        "moveaxis": lambda arrays: np.moveaxis(arrays[at], axis, 0),
        "flip": lambda arrays: np.flip(arrays[at], axis),
        "ravel": lambda arrays: np.ravel(arrays[at]),
        "broadcast_to": lambda arrays: np.broadcast_to(arrays[at], new),
    }
    return steps[name]


def _joining(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    axis = self.axis(ndim, tuples=False, none=False) or 0
    alike = [i for i, other in enumerate(shapes) if other == shape]
    second = self.one_of(alike)
    name = self.one_of(("concatenate", "stack", "where", "clip", "pad", "roll", "diff", "split"))
    self.log.append(f"{name} with {second} along {axis}")
    steps: dict[str, Step] = {
        "concatenate": lambda arrays: np.concatenate([arrays[at], arrays[second]], axis),
        "stack": lambda arrays: np.stack([arrays[at], arrays[second]], axis),
        "where": lambda arrays: np.where(_steady(arrays[at]) == _steady(arrays[second]), arrays[at], 2),
        "clip": lambda arrays: np.clip(arrays[at], 0, 1),
        "pad": lambda arrays: np.pad(arrays[at], 1),
        "roll": lambda arrays: np.roll(arrays[at], 1, axis),
        "diff": lambda arrays: np.diff(arrays[at], axis=axis),
        "split": lambda arrays: np.array_split(arrays[at], 2, axis)[1],
    }
    return steps[name]


def _indexing(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    key: list[Any] = []
    for rows in shape[: self.integer(0, ndim)]:
        kind = self.integer(0, 4)
        if kind == 0 and rows:
            key.append(self.integer(-rows, rows - 1))
        elif kind == 1:
            key.append(slice(self.integer(0, 2), self.integer(1, 7), self.one_of((1, 1, 2))))
        elif kind == 2:
            key.append(self.one_of((None, slice(None, None, -1), slice(-2, None))))
        else:
            key.append(slice(None))
    if self.integer(0, 3) == 0:
        key.append(Ellipsis)
    self.log.append(f"[{key}]")
    return lambda arrays: arrays[at][tuple(key)]


def _picking(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    if self.integer(0, 1) and ndim:
        self.log.append("boolean mask")
        return lambda arrays: (
            arrays[at][arrays[at] == arrays[at]] if ndim == 1 else np.where(arrays[at] > 0, arrays[at], 0)
        )
    axis = self.axis(ndim, tuples=False, none=False) or 0
    rows = shape[axis] if ndim and 0 not in shape else 0
    indices = [self.integer(-rows, rows - 1) for _ in range(3)] if rows else []
    self.log.append(f"take {indices} along {axis}")
    return lambda arrays: np.take(arrays[at], np.array(indices, int), axis)


def _assigning(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    key = tuple(slice(self.integer(0, 1), self.integer(2, 5)) for _ in shape)
    masked = bool(self.integer(0, 1)) and ndim > 0
    self.log.append(f"assign to {'a mask' if masked else key}")

    def assign(arrays: Sequence[Any]) -> Any:
        # Another array than those of the program: they are used again.
        made = np.copy(arrays[at])
        if masked:
            made[made == 1] = 3
        else:
            made[key] = 2
        return made

    return assign


def _in_place(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    def add(arrays: Sequence[Any]) -> Any:
        made = np.copy(arrays[at])
        made += 1
        made *= made
        return made

    return add


def _fourier(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    name = self.one_of(("fft", "ifft", "rfft", "fftn"))
    self.log.append(name)
    return lambda arrays: getattr(np.fft, name)(arrays[at])


def _statistic(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    names = ("median", "nanmedian", "quantile", "nanquantile", "percentile", "nanvar", "nanstd", "nanargmax", "cov")
    name = self.one_of((*names, "trapezoid", "corrcoef"))
    function, axis, keepdims = getattr(np, name, None) or np.trapz, self.axis(ndim), bool(self.integer(0, 1))  # type: ignore[attr-defined]
    q = self.one_of((0.5, 0.3, 1, [0, 0.25], [1.0]))
    method = self.one_of(("linear", "linear", "lower", "higher", "midpoint", "hazen", "weibull"))
    self.log.append(f"{name} of {q}, {method}, over {axis}, keepdims {keepdims}")
    if "quantile" in name or name == "percentile":
        return lambda arrays: function(arrays[at], q, axis=axis, keepdims=keepdims, method=method)
    if name in ("cov", "corrcoef"):
        return lambda arrays: function(_steady(np.nan_to_num(arrays[at])))
    if name == "trapezoid":
        return lambda arrays: function(arrays[at] * 1.0, axis=axis if isinstance(axis, int) else -1)
    if name == "nanargmax":
        return lambda arrays: function(_steady(arrays[at]), axis=axis if isinstance(axis, int) else None)
    return lambda arrays: function(arrays[at], axis=axis, keepdims=keepdims)


def _counting(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    name = self.one_of(("bincount", "histogram", "edges", "unique", "inverse", "counts", "isin", "digitize", "interp"))
    bins = self.one_of((3, 1, [-2.0, 0.0, 0.25, 3.0]))
    part = self.integer(0, 1)
    self.log.append(f"{name}, bins {bins}, part {part}")
    steps: dict[str, Step] = {
        "bincount": lambda arrays: np.bincount(np.ravel(arrays[at]) if ndim == 0 else arrays[at]),
        "histogram": lambda arrays: np.histogram(_ordered(arrays[at], bins), bins, (-3.2, 4.1) if part else None)[0],
        "edges": lambda arrays: np.histogram_bin_edges(arrays[at], bins),
        "unique": lambda arrays: np.unique(_steady(arrays[at])),
        "inverse": lambda arrays: np.unique(_steady(arrays[at]), return_inverse=True)[1],
        "counts": lambda arrays: np.unique(_steady(arrays[at]), return_counts=True)[part],
        "isin": lambda arrays: np.isin(_steady(arrays[at]), [0, 1, 0.5], invert=bool(part)),
        "digitize": lambda arrays: np.digitize(_steady(arrays[at]), np.array([-1.1, 0.2, 2.3])),
        "interp": lambda arrays: np.interp(np.real(arrays[at]), [-2.0, 0, 3], [1.0, 5, 2]),
    }
    return steps[name]


def _finding(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    name = self.one_of(("flatnonzero", "nonzero", "argwhere", "extract", "compress", "triu", "nan_to_num", "append"))
    axis = self.axis(ndim, tuples=False, none=False) or 0
    self.log.append(f"{name} along {axis}")
    steps: dict[str, Step] = {
        "flatnonzero": lambda arrays: np.flatnonzero(_steady(arrays[at])),
        "nonzero": lambda arrays: np.nonzero(_steady(arrays[at]))[-1],
        "argwhere": lambda arrays: np.argwhere(_steady(arrays[at])),
        "extract": lambda arrays: np.extract(_steady(arrays[at]) != 1, arrays[at]),
        "compress": lambda arrays: np.compress([True, False], arrays[at], axis=axis),
        "triu": lambda arrays: np.triu(arrays[at], axis),
        # Not the largest numbers, of which a rank's part of a product may overflow where the whole does not.
        "nan_to_num": lambda arrays: np.nan_to_num(arrays[at], posinf=9.0, neginf=-9.0),
        "append": lambda arrays: np.append(arrays[at], arrays[at], axis),
    }
    return steps[name]


def _lines(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    """A function of each line, whose results have other dimensions than the line at times."""
    axis = self.axis(ndim, tuples=False, none=False) or 0
    name = self.one_of(("twice", "sum", "square", "few", "two", "none"))
    self.log.append(f"{name} of lines along {axis}")
    functions: dict[str, Callable[[Any], Any]] = {
        "twice": lambda line: line * 2,
        "sum": lambda line: line.sum(),
        "square": lambda line: line[:, None] * line[:2],
        "few": lambda line: np.concatenate([line, line])[:5],
        "two": lambda line: np.zeros((2, 3)) + len(line),
        "none": lambda line: line[:0],
    }
    return lambda arrays: np.apply_along_axis(functions[name], axis, arrays[at])


def _by_index(self: Program, at: int, shape: Any, ndim: int, shapes: Any) -> Step:
    """Plain indices, of which one is not among the rows at times: every rank must raise, also one without elements."""
    axis = self.axis(ndim, tuples=False, none=False) or 0
    rows = shape[axis] if ndim else 1
    most = rows - 1 + self.one_of((0, 0, 1))
    places = np.array([self.integer(-rows, most) for _ in range(self.integer(1, 3))]) if rows else np.zeros(1, int)
    dim = axis % max(ndim, 1)
    line = places.reshape((1,) * dim + (-1,) + (1,) * (ndim - dim - 1))
    key = (slice(None),) * dim
    names = ("take_along_axis", "take", "clip", "key", "set", "repeat", "split", "compress")
    name = self.one_of((*names, "wrap") if rows else names)  # of no rows, NumPy's mode "wrap" counts for ever
    self.log.append(f"{name} {places.tolist()} along {axis}")

    def assign(arrays: Sequence[Any]) -> Any:
        made = np.copy(arrays[at])
        made[(*key, places)] = 3
        return made

    steps: dict[str, Step] = {
        "take_along_axis": lambda arrays: np.take_along_axis(arrays[at], line, axis),
        "take": lambda arrays: np.take(arrays[at], places, axis),
        "wrap": lambda arrays: np.take(arrays[at], places + 3, axis, mode="wrap"),
        "clip": lambda arrays: np.take(arrays[at], places + 3, axis, mode="clip"),
        "key": lambda arrays: arrays[at][(*key, places)],
        "set": assign,
        "repeat": lambda arrays: np.repeat(arrays[at], places, axis),
        "split": lambda arrays: np.split(arrays[at], len(places) + 1, axis)[0],
        "compress": lambda arrays: np.compress(np.arange(most + 1) == most, arrays[at], axis),
    }
    return steps[name]


STEPS: dict[str, Callable[..., Step]] = {
    "unary": _unary,
    "binary": _binary,
    "number": _number,
    "reduction": _reduction,
    "scan": _scan,
    "contraction": _contraction,
    "shaping": _shaping,
    "joining": _joining,
    "indexing": _indexing,
    "picking": _picking,
    "assigning": _assigning,
    "in place": _in_place,
    "fourier": _fourier,
    "statistic": _statistic,
    "counting": _counting,
    "finding": _finding,
    "lines": _lines,
    "by index": _by_index,
}


def _steady(array: Any) -> Any:
    """Return the values rounded, where a function with jumps would tell rounding apart."""
    return np.round(array, 3) if array.dtype.kind in "fc" else array


def _ordered(array: Any, bins: Any) -> Any:
    """Return the values to count in `bins`: bins of equal width of complex numbers are refused, and mean nothing."""
    return _steady(np.real(array) if array.dtype.kind == "c" and np.ndim(bins) == 0 else array)


def _broadcasts(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(first, second)
    except ValueError:
        return False
    return True


def _reshapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    size = math.prod(shape)
    pairs = [(rows, size // rows) for rows in range(1, size + 1) if size % rows == 0]
    return [(-1,) if size else shape, (*shape, 1), (1, *shape), *pairs]


# ---- Running


def run_program(seed: int, mesh: Any, implicit: bool, refusals: Counter[str] | None = None) -> str | None:
    """Run the program of `seed` on this rank; return what went wrong in words, or None.

    On a mesh of GPUs, a step that CuPy refuses is left out, and counted in `refusals` by its error.
    """
    program = Program(seed, tuple(mesh.shape))
    arrays, tensors = [], []
    base = program.shape()
    for _ in range(3):
        shape = base if program.integer(0, 1) else program.shape()
        whole = program.array(shape, program.one_of(DTYPES))
        pending = whole.dtype.kind in "ifc"
        placements = program.placements(shape, pending)
        tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        program.log.append(f"{whole.dtype}{list(shape)} as {placements}")
        arrays.append(whole)
        tensors.append(tensor)
    for _ in range(4):
        step = program.step([a.shape for a in arrays], [a.dtype for a in arrays])
        redistributed = program.placements(arrays[-1].shape) if program.integer(0, 3) == 0 else None
        wanted = _tried(step, arrays)
        got = _tried(step, tensors, implicit)
        again = _tried(step, tensors, implicit)  # what is remembered of the first call must give the same
        if isinstance(got, PlacementError) and not isinstance(wanted, Exception):
            continue  # refused, which the caller has compared between the ranks; the arrays stay as they are
        if isinstance(got, Exception) != isinstance(wanted, Exception) and mesh.device_type == "cuda":
            if refusals is not None:  # or what NumPy refuses, and CuPy does not
                refusals[f"{program.log[-2:]}: {type(got).__name__}: {got}"[:400]] += 1
            continue
        if isinstance(wanted, Exception) or isinstance(got, Exception):
            if not isinstance(got, (TypeError, ValueError, IndexError)) or not isinstance(wanted, Exception):
                return _failure(program, seed, wanted, got)
            continue
        if program.log[-1].startswith("nanquantile") and np.isnan(wanted).any() and isinstance(got, DTensor):
            wanted = wanted.astype(got.dtype)  # of a line of NaN alone, NumPy's dtype may be another one
        wrong = _difference(wanted, got) or _difference(wanted, again)
        if wrong is not None:
            return _failure(program, seed, wanted, f"{got!r}, {again!r}: {wrong}")
        replaced = program.integer(0, 2)
        # Both go on from the same values: a later comparison would tell rounding apart.
        arrays[replaced], tensors[replaced] = _on_host(got.full()), got
        if redistributed is not None:
            last = tensors[-1]
            if len(redistributed) and all(
                not isinstance(p, Shard) or (p.dim < last.ndim and p.sizes is None) for p in redistributed
            ):
                tensors[-1] = last.redistribute(redistributed)
                wrong = _difference(arrays[-1], tensors[-1])
                if wrong is not None:
                    return _failure(program, seed, arrays[-1], f"redistributed to {redistributed}: {wrong}")
    return None


def _tried(step: Step, arrays: Sequence[Any], implicit: bool = False) -> Any:
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if implicit:
                with implicit_redistribution():
                    return step(arrays)
            return step(arrays)
    except (
        TypeError,
        ValueError,
        IndexError,
        ZeroDivisionError,
        NotImplementedError,
        AttributeError,
        np.linalg.LinAlgError,
    ) as error:
        return error


def _difference(wanted: Any, got: Any) -> str | None:
    if not isinstance(got, DTensor):
        return f"{type(got).__name__} in place of a DTensor"
    wanted = np.asarray(wanted)
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{got.dtype}{got.shape} in place of {wanted.dtype}{wanted.shape}"
    if got.to_local().shape != got.layout.local_shape(got.mesh.get_coordinate()):
        return f"a block of shape {got.to_local().shape} in {got.layout}"
    with np.errstate(all="ignore"):
        whole = _on_host(got.full())
    if wanted.dtype.kind not in "fc":
        return None if np.array_equal(whole, wanted) else f"got {whole.tolist()}"
    # NumPy's standard deviations of float16 are off by two units in the last place themselves.
    single = 4 if wanted.dtype.kind == "f" else 8
    digits = 2e-3 if wanted.dtype.itemsize == 2 else 1e-4 if wanted.dtype.itemsize <= single else 1e-9
    scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)
    close = np.allclose(whole, wanted, rtol=digits, atol=digits * scale, equal_nan=True)
    return None if close else f"got {whole.tolist()}"


def _on_host(array: Any) -> Any:
    return array.get() if hasattr(array, "__cuda_array_interface__") else array


def _failure(program: Program, seed: int, wanted: Any, got: Any) -> str:
    lines = "\n  ".join(program.log)
    return f"seed {seed} on a mesh {program.mesh_shape}:\n  {lines}\nNumPy: {wanted!r}\nhere:  {got!r}"


def run_programs(
    seeds: Sequence[int], device_type: str = "cpu", refusals: Counter[str] | None = None
) -> dict[int, str]:
    """Run the programs of these seeds on this rank, up to the first that fails; return its seed and what went wrong."""
    size = meshdist.get_world_size()
    meshes = [
        # Blocks of GPUs are staged through the CPU: the ranks are threads, and may share a GPU.
        meshdist.init_device_mesh(
            device_type, shape, backend_override=dict.fromkeys(range(len(shape)), f"{device_type}:threads")
        )
        for shape in MESHES[size]
    ]
    for seed in seeds:
        failure = None
        try:
            failure = run_program(seed, meshes[seed % len(meshes)], seed % 3 != 0, refusals)
            outcomes: list[Any] = [None] * size
            meshdist.all_gather_object(outcomes, failure)
        except meshdist.DistError as error:
            # The program failed on some of the ranks alone, and the others waited for them.
            return {seed: failure or f"seed {seed}: {error}"}
        if any(outcomes):
            return {seed: next(filter(None, outcomes))}
    return {}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run random programs of NumPy calls, and compare them with NumPy.")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument(
        "--seed", type=int, default=0, help="the seed of the first program; the next has the next number"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(MESHES), choices=list(MESHES), metavar="N")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the blocks (default: %(default)s)")
    options = parser.parse_args()
    last, failed, refusals = options.seed + options.programs, 0, Counter[str]()
    for turn, first in enumerate(range(options.seed, last, _PROGRAMS_OF_A_WORLD)):
        ranks = options.ranks[turn % len(options.ranks)]
        left, differing = range(first, min(first + _PROGRAMS_OF_A_WORLD, last)), 0
        described = f"seeds {left[0]} to {left[-1]} on {ranks} ranks"
        while left:
            found = meshdist.run(run_programs, ranks, (left, options.device, refusals), timeout=60)
            for text in dict.fromkeys(text for failures in found for text in failures.values()):
                print(text, flush=True)
            seeds = {seed for failures in found for seed in failures}
            differing += len(seeds)
            left = range(max(seeds) + 1, left.stop) if seeds else range(0)
        failed += differing
        print(f"{described}: {differing} differ", flush=True)
    for refusal, times in refusals.most_common():
        print(f"refused {times} times: {refusal}")
    print(f"{options.programs} programs: {failed or 'none'} differ from NumPy")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
