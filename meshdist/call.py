"""Call: one collective call, described and checked, on its way to a backend; Signature: what its peers compare."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import PurePath
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from meshdist.arrays import Array
from meshdist.outcome import CarrierThread
from meshdist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective

Buffers: TypeAlias = "Array | list[Array] | None"
Splits: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"

# This package, and what calls it at the end of a `with` block.
_NOT_THE_USERS = (str(PurePath(__file__).parent), contextlib.__file__)


@dataclass(frozen=True)
class Signature:
    """What the calls of all ranks must have in common.

    Attributes:
        text: The call in words, as the message of a mismatch shows it.
        compared: Those of the words that must be equal; all of them where it is not given.
        fingerprint: 32 bits of these in the upper half of a 64-bit word; the lower half takes a sequence number.

    Example:
        >>> one, other = Signature("barrier()"), Signature("all_reduce(float32[4], op=sum)")
        >>> one.fingerprint != other.fingerprint and one.fingerprint & 0xFFFFFFFF == 0
        True
    """

    text: str
    compared: str = ""

    def __post_init__(self) -> None:
        if not self.compared:
            object.__setattr__(self, "compared", self.text)

    @property
    def fingerprint(self) -> int:
        """What is compared as 32 bits, in the upper half of a word."""
        return zlib.crc32(self.compared.encode()) << 32


class Elements(str):
    """A word of a call that says how many elements its arrays have; it knows the words with the shapes as well.

    Example:
        >>> import numpy as np
        >>> word = Elements("float64[", [np.zeros((2, 3))])
        >>> word, word.with_shapes
        ('float64[6]', 'float64[6, shape (2, 3)]')
    """

    with_shapes: str

    def __new__(cls, begin: str, arrays: list[Array]) -> Elements:
        """Put the words together."""
        counts = ", ".join(str(array.size) for array in arrays)
        word = super().__new__(cls, f"{begin}{counts}]")
        shapes = ", ".join(str(array.shape) for array in arrays)
        is_flat = all(array.ndim == 1 for array in arrays)
        kind = "shape" if len(arrays) == 1 else "shapes"
        word.with_shapes = str(word) if is_flat else f"{begin}{counts}, {kind} {shapes}]"
        return word


@dataclass(frozen=True)
class Call:
    """One call of one rank. Backends get it checked, with plain contiguous buffers and ranks of the group.

    Attributes:
        collective: The definition: its name, and the default algorithm.
        where: Collective, group and rank as every message begins.
        rank: This rank in the group.
        size: The group's size.
        send: What this rank gives: an array, a list of `size` arrays, or None.
        recv: What this rank gets, in the same forms. The same object as `send` for in-place collectives.
        op: The reduction, where there is one.
        root: The rank in the group that the collective has as its source or destination.
        splits: Rows to and rows from each rank, for an all_to_all_single with split sizes.
        compares_shapes: All ranks must have arrays of one shape, and not only of as many elements: so it is at debug
            level DETAIL.
    """

    collective: Collective[..., Any]
    where: str
    rank: int
    size: int
    send: Buffers
    recv: Buffers
    op: ReduceOp | None = None
    root: int | None = None
    splits: Splits | None = None
    compares_shapes: bool = False

    def signature(self) -> Signature:
        """Return what all ranks must have in common: collective, dtype, element counts, op and root.

        Where the call compares shapes, what they are as well.
        """
        agreed = [part if isinstance(part, str) else str(part) for part in self.collective.agreed(self)]
        shaped = [part.with_shapes if isinstance(part, Elements) else part for part in agreed]
        common = []
        if self.op is not None:
            common.append(f"op={self.op.value}")
        if self.root is not None:
            common.append(f"root={self.root}")
        if self.compares_shapes and shaped != agreed:
            return Signature(self._words(shaped, [*common, "shapes compared at debug level DETAIL"]))
        return Signature(self._words(shaped, common), self._words(agreed, common))

    def _words(self, agreed: list[str], common: list[str]) -> str:
        return f"{self.collective.name}({', '.join([*agreed, *common])})"

    def without_buffers(self) -> Call:
        """Return the call as a plan may keep it: without the arrays of the first time."""
        return replace(self, send=None, recv=None)


def user_frame() -> tuple[FrameType | None, int]:
    """Return the innermost frame outside this package (None in a thread of its own), and how far above the caller's."""
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
        depth += 1
    if frame is None or frame.f_code.co_filename == threading.__file__:
        return None, depth
    return frame, depth


def call_site() -> str:
    """Return `file:line` of the user's call, also in the thread that carries out an async call."""
    frame, _ = user_frame()
    if frame is not None:
        return _file_and_line(frame.f_code, frame.f_lineno)
    thread = threading.current_thread()
    code, instruction = thread.site() if isinstance(thread, CarrierThread) else (None, 0)
    if code is None or code.co_filename == threading.__file__:  # where a thread of this package makes a call
        return "an async call"
    return _file_and_line(code, line_of(code, instruction))


def line_of(code: CodeType, instruction: int) -> int:
    """Return the line of an instruction of a function, which a frame has as `f_lasti`."""
    lines = (line for begin, end, line in code.co_lines() if begin <= instruction < end and line is not None)
    return next(lines, code.co_firstlineno)


@cache
def is_ours(file: str) -> bool:
    """Return whether a source file is this package's, and so not where the user's call is."""
    return file.startswith(_NOT_THE_USERS)


def _file_and_line(code: CodeType, line: int) -> str:
    return f"{PurePath(code.co_filename).name}:{line}"


def num_bytes(buffers: Any) -> int:
    """Return the bytes of an array, or of all arrays of a list; 0 for None.

    Example:
        >>> import numpy as np
        >>> num_bytes([np.zeros(2), np.zeros(1)])
        24
    """
    if isinstance(buffers, (list, tuple)):
        return sum(map(num_bytes, buffers))
    return int(getattr(buffers, "nbytes", 0))


def warn_not_member(name: str) -> None:
    """Warn, at the user's line, that a call of `name` on a group that this rank is not in does nothing."""
    _, depth = user_frame()
    warnings.warn(f"{name} on a group that this rank is not in does nothing", stacklevel=depth + 1)
