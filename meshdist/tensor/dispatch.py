"""Which function of this package computes which function of NumPy; and whether operations may move what is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import numpy as np

# Python's numbers, which keep their weak dtype beside arrays.
NUMBERS = (bool, int, float, complex)
# The kinds of dtypes whose elements NumPy's power does not raise to negative integers.
INTEGERS = "biu"

Function = TypeVar("Function", bound=Callable[..., Any])

# By NumPy's function, or by (ufunc or None for any, the name of the method).
_implementations: dict[Any, Callable[..., Any]] = {}

# Types that wrap arrays and compute with them themselves, also beside DTensors.
deferring: set[type] = set()

# At debug level DETAIL, what compares a call between the ranks: its name, then its arguments.
comparer: Callable[[str, tuple[Any, ...]], None] | None = None

may_redistribute: ContextVar[bool] = ContextVar("meshdist_implicit_redistribution", default=False)


@contextmanager
def implicit_redistribution() -> Iterator[None]:
    """Let operations move sharded arrays whose placements do not match, until the block ends.

    Outside of the block, such an operation raises a PlacementError with the call to write and the bytes that it sends.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.tensor import Shard, distribute_tensor, implicit_redistribution
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     rows = distribute_tensor(np.ones((4, 4)), mesh, {"tp": Shard(0)})
        ...     columns = distribute_tensor(np.ones((4, 4)), mesh, {"tp": Shard(1)})
        ...     with implicit_redistribution():
        ...         return (rows + columns).placements
        >>> meshdist.run(program, 2)[0]
        (Shard(0),)
    """
    token = may_redistribute.set(True)
    try:
        yield
    finally:
        may_redistribute.reset(token)


def implements(*functions: Any) -> Callable[[Function], Function]:
    """Register the decorated function as what computes these functions of NumPy for DTensors.

    A method of ufuncs is a pair of the ufunc, or None for any, and the method's name.
    """

    def register(implementation: Function) -> Function:
        for function in functions:
            _implementations[function] = implementation
        return implementation

    return register


def implementation_of(function: Any) -> Callable[..., Any] | None:
    """Return what computes this function of NumPy for DTensors, or None."""
    return _implementations.get(function)


def method(name: str) -> Callable[..., Any]:
    """Return what computes this method of DTensors."""
    implementation = _implementations.get(name)
    if implementation is None:
        refuse(name)
    return implementation


def implementation_of_ufunc(ufunc: Any, method: str) -> Callable[..., Any] | None:
    """Return what computes this method of this ufunc, called as `f(ufunc, *inputs, **kwargs)`; or None."""
    return _implementations.get((ufunc, method)) or _implementations.get((None, method))


def implemented_functions() -> list[str]:
    """Return the names of NumPy's functions that work on DTensors, without ufuncs."""
    return sorted(f"{f.__module__}.{f.__name__}" for f in _implementations if callable(f))


def refuse_deferring(name: str, *operands: Any) -> None:
    """Raise where an operand is of a type that computes itself, which this function would not ask.

    Raises:
        TypeError: One is.
    """
    if deferring and any(type(operand) in deferring for operand in operands):
        raise TypeError(
            f"{name} has no gradient, and an argument is differentiated; use the function of meshdist.autograd, if it"
            " has one, or local_map with vjp="
        )


def begin(name: str, *args: Any) -> None:
    """Begin a call of a function that is none of NumPy's; `args` are its arguments.

    Raises:
        TypeError: An argument is of a type that computes itself, which this function would not ask.
        DistBackendError: At debug level DETAIL: the ranks make different calls.
    """
    if deferring:
        refuse_deferring(f"meshdist.tensor.{name}", *args)
    if comparer is not None:
        comparer(name, args)


def name_of(function: Any) -> str:
    """Return the name of a function of NumPy, as users write it."""
    return f"{function.__module__.replace('numpy', 'np', 1)}.{function.__name__}"


def name_of_ufunc(ufunc: np.ufunc, method: str) -> str:
    """Return the name of a ufunc or of its method, as users write it."""
    return f"np.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}")


def refuse(name: str) -> NoReturn:
    raise TypeError(
        f"{name} is not available for DTensors; use x.full() for the whole array, x.redistribute({{}}) where the"
        " function takes arrays that every rank has, or meshdist.tensor.local_map to call it on each block by itself"
    )
