"""Probes: waits for a message that has arrived or is announced, which stays where it is."""

from __future__ import annotations

import numpy as np

from meshdist.backends.p2p.requests import RecvRequest, UnexpectedMessage
from meshdist.runtime.waiting import Found, Probe

# The array, its dtype, and the tag in errors where any will do, of a request that receives nothing.
NO_ARRAY = np.empty(0, np.uint8), b""
NO_TAG = -1


class Probing(RecvRequest, Probe):
    """Makes a probe of a backend's receive request, which comes after it among the base classes.

    It is never posted: it makes the progress of a receive and looks among the unexpected messages.

    Attributes:
        wanted_tag: The tag of the message; None for any.
    """

    wanted_tag: int | None

    @property
    def done(self) -> bool:
        """Whether there is such a message."""
        return self._look() is not None

    @done.setter
    def done(self, value: bool) -> None:
        """Do nothing: only a message ends a probe."""

    def found(self) -> Found:
        message = self._look()
        assert message is not None, "asked once the probe is ready"
        return Found(message.source, message.tag, message.num_bytes)

    def _look(self) -> UnexpectedMessage | None:
        if self.message is None:
            with self.queue.lock:
                self.message = self.queue.first(self.wanted, self.wanted_tag)
            if self.message is not None:
                self.source = self.message.source
        return self.message
