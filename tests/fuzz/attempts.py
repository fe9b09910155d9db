"""On a rank: make one call of an example, which may be wrong, and say what became of it and of the memory around."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import calls
import numpy as np

import meshdist as dist

# No example may need this long: what reaches it has hung.
GROUP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Example:
    """One call of all members of a group.

    Attributes:
        case: What all of them call, but for the changes.
        members: Global ranks, in group order.
        layouts: How the arrays of each member lie in memory.
        globally: The root is given as a global rank.
        changes: Place in the group -> what is different there; see `change`.
    """

    case: calls.Case
    members: tuple[int, ...]
    layouts: tuple[str, ...]
    globally: bool = False
    changes: tuple[tuple[int, tuple[Any, ...]], ...] = ()


class Completion(NamedTuple):
    """What became of a call on one rank.

    Attributes:
        kind: The class that was raised; None where the call returned.
        message: What it said.
        wrong: What is wrong with the outputs of a call that returned.
        touched: What was changed that must not be.
        changed: Whether any output is not as it was.
        after: The class that one more call on the same group raised; None where it returned.
    """

    kind: type[BaseException] | None
    message: str
    wrong: str
    touched: str
    changed: bool
    after: type[BaseException] | None


class Guarded:
    """An array with bytes around it that nobody may touch."""

    def __init__(self, content: np.ndarray, layout: str) -> None:
        dtype = content.dtype.newbyteorder("S") if layout == "swapped" else content.dtype
        step = 2 if layout == "every second" else 1
        count = content.size * step
        self.memory = np.full(count * dtype.itemsize + 128, 0x55, np.uint8)
        flat = self.memory[64 : 64 + count * dtype.itemsize].view(dtype)[::step]
        self.view = (
            flat.reshape(content.shape)
            if step == 1
            else np.lib.stride_tricks.as_strided(
                flat, content.shape, [step * stride for stride in np.empty(content.shape, dtype).strides]
            )
        )
        self.view[...] = content
        self._before = self.memory.copy()

    def changed(self) -> bool:
        """Return whether any byte, inside or outside, is not as it was."""
        return self.memory.tobytes() != self._before.tobytes()

    def touched_outside(self) -> bool:
        """Return whether any byte outside is not as it was."""
        inside = self.view.copy()
        now = self.memory.copy()
        was = self._before.copy()
        self.view[...] = 0
        blank = self.memory.copy()
        self.memory[...] = was
        self.view[...] = 0
        touched = self.memory.tobytes() != blank.tobytes()
        self.memory[...] = now
        self.view[...] = inside
        return touched

    def holds(self, wanted: np.ndarray) -> bool:
        """Return whether the content is as wanted."""
        return self.view.size == wanted.size and bool((self.view.reshape(-1) == wanted.reshape(-1)).all())


def attempt(example: Example) -> Completion | None:
    """Make the call of this rank; None on a rank that is not in the group."""
    if dist.get_rank() not in example.members:
        return None
    group = dist.new_group(list(example.members), GROUP_TIMEOUT_S, sort_ranks=False, group_desc="fuzz")
    try:
        return _attempt(example, group)
    finally:
        dist.destroy_process_group(group)


def _attempt(example: Example, group: Any) -> Completion:
    rank, size = group.rank(), group.size()
    change = dict(example.changes).get(rank, ("none",))
    case = replace(example.case, **dict(change[1])) if change[0] == "case" else example.case
    made = calls.make(case, rank, size)
    give = [Guarded(array, example.layouts[rank]) for array in made.give]
    take = [Guarded(array, example.layouts[rank]) for array in made.take]
    how = _globally(made.how, group) if example.globally else dict(made.how)
    given, taken = [part.view for part in give], [part.view for part in take]
    _change(change, given, taken, how)
    if case.collective == "message":
        group.barrier()  # so that the group is there to be aborted
    kind, message, result = _try(lambda: _finished(made.call(given, taken, group=group, **how)))
    is_known = all(other[0] == "case" for _, other in example.changes)
    wrong = _wrong(made, take, result) if kind is None and is_known else ""
    touched = "an input" if any(part.changed() for part in give) else ""
    touched = "bytes around an output" if any(part.touched_outside() for part in take) else touched
    if case.collective == "message" and kind is not None:
        group.abort("a message of its program went wrong")  # the other side cannot know, and waits for the message
    # A call that no example makes: a rank whose call was refused is never taken for one that came later.
    after, _, _ = _try(lambda: group.all_reduce(np.zeros(7, np.int16), "bxor"))
    return Completion(kind, message, wrong, touched, any(part.changed() for part in take), after)


def _try(call: Any) -> tuple[type[BaseException] | None, str, Any]:
    try:
        return None, "", call()
    except Exception as error:
        return type(error), str(error), None


def _finished(result: Any) -> Any:
    return result.wait() and result if isinstance(result, dist.Work) else result


def _wrong(made: calls.Made, take: Sequence[Guarded], result: Any) -> str:
    if made.result is not None and result != made.result:
        return f"returned {result!r}, expected {made.result!r}"
    for place, (part, want) in enumerate(zip(take, made.want, strict=True)):
        if not part.holds(want):
            return f"output {place}: got {part.view!r}, expected {want!r}"
    return ""


def _globally(how: dict[str, Any], group: Any) -> dict[str, Any]:
    return {
        name.removeprefix("group_"): group.ranks[value] if name.startswith("group_") else value
        for name, value in how.items()
    }


def _change(change: tuple[Any, ...], given: list[Any], taken: list[Any], how: dict[str, Any]) -> None:
    if change[0] == "how":
        _, name, value = change
        if name in how:
            how[name] = value
        elif name == "root":
            roots = [key for key in how if key.removeprefix("group_") in ("src", "dst")]
            how.update(dict.fromkeys(roots, value))
    elif change[0] in ("give", "take"):
        side, what, place = change
        arrays = given if side == "give" else taken
        if arrays:
            spoil(arrays, what, place % len(arrays))


def spoil(arrays: list[Any], what: str, place: int) -> None:
    """Make one array of a list, or the list, wrong."""
    array = arrays[place]
    if what == "one less":
        if len(arrays) > 1:
            del arrays[place]
    elif what == "one more":
        arrays.append(array.copy())
    elif what == "another shape":
        arrays[place] = np.zeros((*array.shape, 2), array.dtype)
    elif what == "another dtype":
        arrays[place] = np.zeros(array.shape, "uint16" if array.dtype == np.dtype("int32") else "int32")
    elif what == "read-only":
        arrays[place] = array.view()
        arrays[place].flags.writeable = False
    elif what == "repeated":
        arrays[place] = np.lib.stride_tricks.as_strided(array, (*array.shape, 2), (*array.strides, 0))
    else:
        arrays[place] = NO_ARRAYS[what](array)


NO_ARRAYS = {
    "None": lambda array: None,
    "number": lambda array: 3.0,
    "scalar": lambda array: np.float32(3),
    "text": lambda array: "text",
    "list": lambda array: [1, 2],
    "list of arrays": lambda array: [array, array],
    "objects": lambda array: np.zeros(array.shape, object),
    "structured": lambda array: np.zeros(array.shape, [("a", "f4")]),
    "masked": lambda array: np.ma.masked_array(np.zeros(array.shape, array.dtype)),
    "class": lambda array: type(array),
}
SPOILS = ("one less", "one more", "another shape", "another dtype", "read-only", "repeated", *NO_ARRAYS)
