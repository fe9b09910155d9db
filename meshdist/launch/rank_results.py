"""What a rank returns, on its way to the program that started it; the rank itself pickles it, and says if it cannot."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

_STARTERS = ("meshdist.dask.", "meshdist.launch.", "meshdist.ray.")


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
                f"the result of rank {rank} cannot be unpickled here: {in_words(error)}; install what the ranks import"
                " here as well, or return arrays, numbers and other plain values"
            ) from None


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def frames_of_user(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames that started the rank; None if the error is from one of those."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_STARTERS):
        frames = frames.tb_next
    return frames
