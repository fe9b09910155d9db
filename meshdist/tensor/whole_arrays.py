"""Functions of NumPy that have no rule for DTensors, on arrays that every axis replicates: each rank computes all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dispatch import implements, name_of, name_of_ufunc, refuse
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.operands import mesh_of

# All ranks would write one file at the same time.
_WRITE_FILES = frozenset((np.save, np.savetxt, np.savez, np.savez_compressed))


@implements("on_whole_arrays")
def on_whole_arrays(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of NumPy on the blocks of DTensors, each of which must be a whole array.

    Results that are arrays, or numbers of NumPy, become DTensors that every axis replicates; an argument that is
    returned, such as `out=`, is returned itself. Nothing is sent.

    Raises:
        TypeError: An array is sharded or pending, or the function writes a file.
    """
    if function in _WRITE_FILES:
        raise TypeError(
            f"{name_of(function)} does not take DTensors, since all ranks would write one file; call x.full(root=0) on"
            " all ranks, and write the result on rank 0, or write each rank's x.to_local() to its own file"
        )
    return _on_whole_arrays(name_of(function), function, args, kwargs)


@implements("ufunc_on_whole_arrays")
def ufunc_on_whole_arrays(ufunc: np.ufunc, method: str, args: Any, kwargs: Any) -> Any:
    """Call a method of a ufunc that has no rule, `outer`, `reduceat` or `at`, on the blocks of whole arrays.

    `at` changes the array, which every rank has: all change theirs. Nothing is sent.

    Raises:
        TypeError: An array is sharded or pending.
    """
    return _on_whole_arrays(name_of_ufunc(ufunc, method), getattr(ufunc, method), args, kwargs)


def _on_whole_arrays(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    arrays: list[DTensor] = []

    def block_of(value: Any) -> Any:
        if isinstance(value, DTensor):
            if not value.layout.is_replicated:
                _refuse_cut(name)
            arrays.append(value)
            return value.to_local()
        return _mapped(block_of, value)

    def placed(value: Any) -> Any:
        for array in arrays:
            if value is array.to_local():
                return array
        if isinstance(value, np.generic) or type(value) is type(arrays[0].to_local()):
            layout = ArrayLayout.of_cuts(value.shape, mesh.shape, (None,) * value.ndim, {})
            return wrap(value, layout, mesh)
        return _mapped(placed, value)

    blocks, named = block_of(tuple(args)), block_of(kwargs)
    if not arrays:  # but for `like=`, which is not among the arguments
        refuse(name)
    mesh = mesh_of(name, arrays)
    return placed(function(*blocks, **named))


# Functions that change their argument, which a redistributed copy of it would take.
_CHANGING = ("np.put", "np.place", "np.fill_diagonal", "np.put_along_axis")


def _refuse_cut(name: str) -> NoReturn:
    if name in _CHANGING or name.endswith(".at"):
        raise TypeError(
            f"{name} does not take sharded or pending DTensors; assign to the elements instead, as in x[key] = value,"
            " or call meshdist.tensor.local_map to change each block by itself"
        )
    raise TypeError(
        f"{name} does not take sharded or pending DTensors; pass x.redistribute({{}}), which every rank has whole, use"
        " x.full() for a plain array, or call meshdist.tensor.local_map to compute on each block by itself"
    )


def _mapped(convert: Callable[[Any], Any], value: Any) -> Any:
    """Return a tuple, a list or a dict after its elements are converted, and anything else as it is."""
    if isinstance(value, dict):
        return {key: convert(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        made = map(convert, value)
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value
