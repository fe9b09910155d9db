"""Handover: whether the errors of failed calls have reached the user.

A sync call raises its error. That of an async call is kept in its Work until it is asked for, which may never happen.
"""

from __future__ import annotations

from sys import exc_info

from meshdist.errors import DistError


class Handover:
    """Counts the errors of one group's calls: those that were kept, and those that the user got.

    With `is_aborted`, the user has given the group up: calls fail for that, and nobody need ask for their errors.
    """

    def __init__(self, *, is_aborted: bool = False) -> None:
        self._is_aborted = is_aborted
        self._num_kept = self._num_given = 0

    @property
    def has_given(self) -> bool:
        """Whether the user got an error."""
        return self._num_given > 0

    def lost(self, first: DistError, rank: int) -> str:
        """Return in words that errors were kept, and the user got none; `first` is that of the first call that failed.

        It is shown whole, unless this rank, of global number `rank`, has the same lines on what each rank does as a
        lower one. Empty otherwise, and while an exception is handled: with that, the rank ends anyway.
        """
        if self._is_aborted or not self._num_kept or self._num_given or exc_info()[1] is not None:
            return ""
        text = str(first)
        if first.reporter not in (None, rank):
            same = f"the same error on rank {first.reporter} lists their calls"
            text = f"{text.removesuffix(first.hang_report).rstrip()}; {same}"
        return f"the error of a failed call was never retrieved: {text}"

    def add(self, error: BaseException, *, is_raised: bool) -> None:
        """Count an error, which is raised to the user unless `keep` takes it; without `is_raised`, that is certain."""
        if _handover_of(error) is None:
            error._handover, error._is_raised = self, is_raised  # type: ignore[attr-defined]
            self._num_given += is_raised

    def _keep(self, is_raised: bool) -> None:
        self._num_given -= is_raised
        self._num_kept += 1

    def _hand_over(self) -> None:
        self._num_given += 1


def keep(error: BaseException) -> None:
    """Record that a handle has `error`, which is not raised now."""
    handover = _handover_of(error)
    if handover is not None and not getattr(error, "_is_kept", False):
        error._is_kept = True  # type: ignore[attr-defined]
        handover._keep(error._is_raised)  # type: ignore[attr-defined]


def hand_over(error: BaseException) -> None:
    """Record that the user gets `error`."""
    handover = _handover_of(error)
    if handover is not None:
        handover._hand_over()


def _handover_of(error: BaseException) -> Handover | None:
    return getattr(error, "_handover", None)
