"""The end of communicators that are of no more use."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from meshdist.backends.nccl.lane import Lane
from meshdist.deadline import Deadline


class Aborting:
    """Aborts the communicators of lanes, all at the same time.

    NCCL waits there for what runs on the GPU, which can be the operation of another communicator, that ends once it is
    aborted too.

    Args:
        lanes: The lanes.
        label: What messages call the group.
    """

    def __init__(self, lanes: Sequence[Lane], label: str) -> None:
        self._label = label
        self._threads = [
            threading.Thread(target=self._abort, args=(lane,), name="meshdist-nccl-abort", daemon=True)
            for lane in lanes
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of them, at most so long; what takes longer is left behind, and logged."""
        deadline = Deadline(timeout_s)
        for thread in self._threads:
            thread.join(max(deadline.remaining_s(), 0.0))
        late = sum(thread.is_alive() for thread in self._threads)
        if late:
            logging.getLogger("meshdist").warning(
                "group %r: %d communicators are not aborted after %g s; they are left behind",
                self._label,
                late,
                timeout_s,
            )

    def _abort(self, lane: Lane) -> None:
        try:
            lane.abort()
        except Exception as error:  # it is the end anyway
            words = lane.library.failure(error)
            logging.getLogger("meshdist").warning("group %r: a communicator was not aborted: %s", self._label, words)
