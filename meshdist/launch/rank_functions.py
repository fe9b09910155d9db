"""The function that ranks run: whether it takes its arguments, and its result or error on the way back.

The rank itself pickles the result, and says if it cannot.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from types import TracebackType
from typing import Any

import numpy as np

from meshdist.system.plurals import counted

_STARTERS = ("meshdist.dask.", "meshdist.launch.", "meshdist.ray.")


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


@dataclass(frozen=True)
class RankResult:
    """A pickled result.

    Attributes:
        pickled: It, without its large buffers.
        buffers: The memory of its arrays, which need not be copied to be sent.
    """

    pickled: bytes
    buffers: list[np.ndarray[Any, Any]]

    @staticmethod
    def of(result: Any, rank: int, dumps: Callable[..., bytes]) -> RankResult:
        """Pickle the result of a rank; `dumps` is `pickle.dumps` or that of a cloudpickle.

        Raises:
            TypeError: It cannot be pickled.

        Example:
            >>> sent = RankResult.of({"x": np.ones(2)}, 0, pickle.dumps)
            >>> sent.unpickled(0)
            {'x': array([1., 1.])}
        """
        buffers: list[pickle.PickleBuffer] = []
        try:
            pickled = dumps(result, protocol=5, buffer_callback=buffers.append)
        except Exception as error:  # whatever an object's own code raises
            raise TypeError(
                f"the result of rank {rank}, of type {type(result).__name__}, cannot be pickled: {in_words(error)};"
                " return arrays, numbers and other plain values"
            ) from None
        return RankResult(pickled, [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers])

    def unpickled(self, rank: int) -> Any:
        """Return the result of this rank.

        Raises:
            TypeError: It cannot be unpickled here.
        """
        try:
            return pickle.loads(self.pickled, buffers=self.buffers)
        except Exception as error:  # whatever an object's own code raises
            raise TypeError(
                f"the result of rank {rank} cannot be unpickled here: {in_words(error)}; install in this"
                " environment what the ranks import, or return arrays, numbers and other plain values"
            ) from None


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def frames_of_user(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames that started the rank; None if the error is from one of those."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_STARTERS):
        frames = frames.tb_next
    return frames
