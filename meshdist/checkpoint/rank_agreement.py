"""Peers: the ranks that save or load together. What fails on one of them is raised on all, in the same words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from meshdist.debug.debug_level import shows_all_frames
from meshdist.debug.user_traceback import is_deliberate
from meshdist.errors import DistError
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import resolve
from meshdist.runtime.context import GroupLike, current_slot, is_initialized

T = TypeVar("T")


class CheckpointError(DistError):
    """Report a checkpoint that is damaged, or does not match the tree to load.

    Example:
        >>> from meshdist import DistError
        >>> from meshdist.checkpoint import CheckpointError
        >>> issubclass(CheckpointError, DistError)
        True
    """


class Failure(NamedTuple):
    """An exception that travels: its class, where it is one of Python's or ours, the number of OSError, its text."""

    kind: type[Exception]
    number: int | None
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, OSError) and error.errno is not None:
            file = f": {error.filename}" if error.filename else ""
            return cls(type(error), error.errno, f"{error.strerror}{file}")
        kind = type(error)
        if kind in (ValueError, TypeError, MemoryError, CheckpointError, FileNotFoundError, FileExistsError):
            return cls(kind, None, str(error) or kind.__name__)
        return cls(CheckpointError, None, f"{kind.__name__}: {error}")

    def as_error(self, place: str) -> Exception:
        text = f"{place}: {self.text}"
        return self.kind(self.number, text) if self.number is not None else self.kind(text)


class Peers:
    """The ranks of a group; this process alone where there is no group.

    Args:
        group: The group; None for a process alone.
        what: What is being done, for messages; the same on all ranks.
        options: Arguments that have to be the same on all ranks, by name.
    """

    def __init__(self, group: ProcessGroup | None, what: str, options: Mapping[str, Any] | None = None) -> None:
        if group is not None and current_slot().dry is not None:
            raise ValueError(
                f"{what}: this is a dry run of rank {group.rank()} of {group.size()}, and the other ranks do not exist;"
                " leave checkpoints out of dry runs, as by `if not dry`"
            )
        self.group = group
        self.what = what
        self._options = dict(options or {})
        self._num_gathered = 0
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @classmethod
    def of(cls, group: GroupLike, what: str, options: Mapping[str, Any] | None = None) -> Peers:
        """Return the ranks of `group`; of the world if it is None, or this process alone if there is none."""
        return cls(None if group is None and not is_initialized() else resolve(group), what, options)

    def gather(self, item: Any) -> list[Any]:
        """Return what all ranks pass, by rank.

        Raises:
            CheckpointError: Ranks are in different calls.
            ValueError: Ranks passed different options.
        """
        if self.group is None:
            return [item]
        self._num_gathered += 1
        items: list[Any] = [None] * self.size
        self.group.all_gather_object(items, ((self.what, self._num_gathered), self._options, item))
        call, options, _ = items[0]
        for rank, (other, passed, _) in enumerate(items):
            if other != call:
                raise CheckpointError(
                    f"the ranks are in different calls: rank 0 in {call[0]}, rank {rank} in {other[0]}"
                )
            for name in options:
                if passed[name] != options[name]:
                    raise ValueError(
                        f"{self.what}: rank 0 passed {name}={options[name]!r}, and rank {rank} {name}={passed[name]!r}"
                    )
        return [item for _, _, item in items]

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do `work`, which has no collectives, on each rank; return what it returned on all.

        Raises:
            Exception: On all ranks alike, what `work` raised on the first of them where it raised.
        """
        result, error, found = None, None, None
        try:
            result = work()
        except Exception as raised:  # told to all ranks below, and raised there
            found = Failure.of(raised)
            if shows_all_frames() or not is_deliberate(raised, raised.__traceback__):
                error = raised  # with its traceback, as it may be a mistake of this package
        results = self.gather((found, result))
        for rank, (failure, _) in enumerate(results):
            if failure is not None:
                place = self.what if self.size == 1 else f"{self.what} (rank {rank} of {self.size})"
                raise failure.as_error(place) from (error if rank == self.rank else None)
        return [result for _, result in results]

    def by_first(self, work: Callable[[], T]) -> T:
        """Return on all ranks what `work` returns on the first; raise on all what it raises."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]
