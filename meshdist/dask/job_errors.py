"""How a job ends that failed: the errors of the client, and what a rank reports."""

from __future__ import annotations

import pickle
import time
import traceback
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from typing import Any

from meshdist.errors import DistError
from meshdist.launch.failures import follows_from_peer
from meshdist.launch.rank_functions import frames_of_user


class RankError(DistError):
    """Report a rank of a Dask job that failed; the cause is its own exception, where that can be pickled.

    Attributes:
        rank: The rank.
        worker: The address of its worker.
    """

    def __init__(self, message: str, rank: int = -1, worker: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.worker = worker

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.rank, self.worker)


class WorkerLostError(RankError):
    """Report that the worker of a rank ended, restarted, or lost its connection to the scheduler."""


class JobEndedError(DistError):
    """Raised in a rank whose job was ended by the client, or because of another rank."""

    def __init__(self, message: str = "the job was ended") -> None:
        super().__init__(message, peer_failed=True)


@dataclass(frozen=True)
class Failed:
    """What a rank returns that raised.

    Attributes:
        summary: What happened to the rank: that it raised, with the exception in one line.
        text: The traceback, from the function of the user on; empty if the error is not from there.
        pickled: The exception; None if it cannot be pickled.
        is_consequence: It follows from the failure of another rank.
        worker_is_new: The worker that the job reserved was restarted.
        time_s: When, by the clock of the worker's host.
    """

    summary: str
    text: str
    pickled: bytes | None
    is_consequence: bool
    worker_is_new: bool = False
    time_s: float = field(default_factory=time.time)

    @staticmethod
    def of(error: BaseException, is_consequence: bool = False) -> Failed:
        summary = traceback.format_exception_only(type(error), error)[-1].strip()
        frames = frames_of_user(error)
        text = "" if frames is None else "".join(traceback.format_exception(type(error), error, frames))
        try:
            pickled: bytes | None = pickle.dumps(error)
            pickle.loads(pickle.dumps(error))
        except Exception:  # whatever the exception's own code raises
            pickled = None
        return Failed(f"raised {summary}", text, pickled, is_consequence or follows_from_peer(error))

    @staticmethod
    def of_task(error: BaseException) -> Failed:
        """Return why Dask has no result of the rank's task."""
        if not isinstance(error, CancelledError):
            return Failed.of(error)
        reason = getattr(error, "reason", "unknown")  # older versions of Dask give none
        what = "had its task cancelled" + ("" if reason == "unknown" else f": {reason}")
        return replace(Failed.of(error), summary=what, text="", worker_is_new=reason == "scheduler-restart")

    @property
    def cause(self) -> BaseException | None:
        """The exception, if this process can load it."""
        if self.pickled is None:
            return None
        try:
            found = pickle.loads(self.pickled)
        except Exception:  # its module may exist on the workers alone
            return None
        return found if isinstance(found, BaseException) else None
