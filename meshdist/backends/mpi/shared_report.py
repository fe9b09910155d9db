"""SharedReport: one rank of an MPI job reports an error that several ranks have, as `meshrun` does for its ranks.

The ranks agree in the store. The first one shows its error and then says so; a rank whose error is the same, or only
follows from that of another, shows nothing once it knows that. No message gets lost: a rank that does not learn in time
that another has shown the error shows its own, also if the store is gone. A rank whose error only follows from that of
another lets others be first for a moment; if the other was killed, nobody is.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

from meshdist.errors import DistError
from meshdist.runtime.rank_text import ranks_text, same_but_for_rank
from meshdist.store import Store
from meshdist.system.deadline import Deadline
from meshdist.system.platform import start_thread

_FIRST, _SHOWN, _OTHERS = "told/first", "told/shown", "told/others"
# How long a rank lets others be first, or waits until the first has shown its error; and for the store in all.
_PATIENCE_S, _ANSWER_S = 0.3, 1.0
_PAUSE_S = 0.01


class _Part(Enum):
    """What a rank has to do about its error."""

    FIRST = 1  # show it, and name the ranks that have it too
    ALONE = 2  # show it
    FOLLOWS = 3  # nothing: it has been shown


class SharedReport:
    """The reports of one rank.

    Args:
        store: That of its world.
        rank: This rank.
        linger_s: How long it goes on if it shows nothing, so that the first can name it and end the job.
    """

    def __init__(self, store: Store, rank: int, linger_s: float = 1.5) -> None:
        self._store = store
        self._rank = rank
        self._linger_s = linger_s

    def tell(self, show: Callable[[], None], error: BaseException) -> None:
        """Call `show`, which shows an uncaught exception, unless another rank has shown the same."""
        part = _Part.ALONE

        def find() -> None:
            nonlocal part
            part = self._part(error)

        _in_time(find)
        if part is _Part.FOLLOWS:
            threading.Event().wait(self._linger_s)
            return
        show()
        if sys.stderr is not None:
            sys.stderr.flush()
        if part is _Part.FIRST:
            _in_time(self._name_others)

    def _part(self, error: BaseException) -> _Part:
        deadline, pause = Deadline(_PATIENCE_S), threading.Event()
        follows = isinstance(error, DistError) and error.peer_failed
        while follows and not deadline.expired() and not self._store.check([_FIRST]):
            pause.wait(deadline.slice_s(_PAUSE_S))
        mine = json.dumps([self._rank, _what(error)])
        told = self._store.compare_set(_FIRST, "", mine).decode()
        if told == mine:
            return _Part.FIRST
        first_rank, first_told = json.loads(told)
        if not follows and not same_but_for_rank(_what(error), self._rank, first_told, first_rank):
            return _Part.ALONE
        self._store.wait([_SHOWN], _PATIENCE_S)
        self._store.append(_OTHERS, f"{self._rank} ")
        return _Part.FOLLOWS

    def _name_others(self) -> None:
        self._store.set(_SHOWN, "")
        threading.Event().wait(_PATIENCE_S)
        if self._store.check([_OTHERS]):
            others = sorted({int(rank) for rank in self._store.get(_OTHERS).split()} - {self._rank})
            if others:
                print(
                    f"meshdist: {ranks_text(others)}: the same, or an error that follows from it",
                    file=sys.stderr,
                    flush=True,
                )


def has_shown_error(store: Store) -> bool:
    """Return whether a rank of the world has shown an error, or is about to."""
    return store.check([_FIRST])


def _what(error: BaseException) -> str:
    """Return the error in a line that is equal on all ranks that have it, but for their own numbers."""
    message = error.what if isinstance(error, DistError) else str(error)
    return f"{type(error).__name__}: {message.strip().partition(chr(10))[0]}"


def _in_time(call: Callable[[], None]) -> None:
    """Make a call in a thread, and wait for it, but not for long: the process that hosts the store may be stopped."""

    def run() -> None:
        try:
            call()
        except (DistError, ValueError):  # no store, or no answer: the rank shows its own error
            return

    thread = threading.Thread(target=run, name="meshdist-report", daemon=True)
    try:
        start_thread(thread)
    except DistError:
        return
    with suppress(KeyboardInterrupt):  # the rank ends in any case
        thread.join(_ANSWER_S)
