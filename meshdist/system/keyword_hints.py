"""Hints in the errors of calls with an argument that a function does not have."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

C = TypeVar("C", bound=type)
P = ParamSpec("P")
R = TypeVar("R")


def explain(function: Callable[..., Any], error: TypeError) -> None:
    """Add to an error which argument was meant, if `function` was called with one that it does not have."""
    from meshdist._torch_names import explain_call  # loaded only when a call fails

    explain_call(function, error)


def explaining(function: Callable[P, R]) -> Callable[P, R]:
    """Have a TypeError say which argument was meant, where a call has a misspelt one or another library's; a decorator.

    For functions that are called now and then: it costs a call of Python.
    """

    @wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            explain(function, error)
            raise

    return explained


def naming_methods(cls: C) -> C:
    """Have errors call the methods of a class by its name, not by that of the base class that has them; a decorator."""
    package = __name__.partition(".")[0]
    for base in cls.__mro__[1:]:
        if base.__module__.partition(".")[0] != package:
            continue
        for name, method in vars(base).items():
            while isinstance(method, FunctionType) and not name.startswith("_"):
                method.__qualname__ = f"{cls.__name__}.{name}"
                method = getattr(method, "__wrapped__", None)
    return cls
