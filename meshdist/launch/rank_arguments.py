"""Check, before ranks start, that their function takes the arguments that it will get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

from meshdist.system.plurals import counted


def check_arguments(
    start: str, fn: Callable[..., Any], args: Sequence[Any], passed: Sequence[Any], other: Sequence[Any], hint: str
) -> None:
    """Raise TypeError if `fn` cannot be called with the arguments `passed`; with `hint`, if it takes the `other` ones.

    `start` is the function that starts the ranks, and `args` are the arguments that its caller gives.
    """
    try:
        parameters = signature(fn, follow_wrapped=False)  # a wrapper may add arguments
    except (TypeError, ValueError):  # some functions of C have none
        return
    try:
        parameters.bind(*passed)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        given = counted(len(args), "argument")
        if len(passed) > len(args):
            given = f"the rank and {given}" if args else "the rank"
        words = f"{start}: {name} cannot be called with {given}: {error}"
        with suppress(TypeError):
            parameters.bind(*other)
            words += hint
        raise TypeError(words) from None
