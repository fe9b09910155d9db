"""CallLog: a line for every call, at debug level DETAIL."""

from __future__ import annotations

from typing import Any

from meshdist.call import call_site, num_bytes
from meshdist.debug.log import RankLog


class CallLog:
    """What a group tells of its calls, before it makes them."""

    def __init__(self, log: RankLog) -> None:
        self._log = log

    def __call__(self, where: str, send: Any, recv: Any) -> None:
        """Log one call.

        Args:
            where: Its name, group and rank.
            send: The array that it sends, or a list of arrays, or None.
            recv: What it receives, likewise.
        """
        given, taken = num_bytes(send), num_bytes(recv)
        if send is recv and send is not None:
            volume = f"{given} B in place"
        else:
            volume = " and ".join(
                f"{what} {size} B"
                for what, size, buffers in (("gives", given, send), ("takes", taken, recv))
                if buffers is not None
            )
        self._log.debug("%s: %s, at %s", where, volume or "no data", call_site())
