"""CallLog: a line for every call, at debug level DETAIL."""

from __future__ import annotations

from meshdist.call import call_site, num_bytes
from meshdist.debug.log import RankLog
from meshdist.detour import Announcement


class CallLog:
    """What a group tells of its calls, before it makes them."""

    def __init__(self, log: RankLog) -> None:
        self._log = log

    def __call__(self, call: Announcement) -> None:
        """Log one call."""
        given, taken = num_bytes(call.send), num_bytes(call.recv)
        if call.send is call.recv and call.send is not None:
            volume = f"{given} B in place"
        else:
            volume = " and ".join(
                f"{what} {size} B"
                for what, size, buffers in (("gives", given, call.send), ("takes", taken, call.recv))
                if buffers is not None
            )
        group = call.group
        number = group.messages.num_messages if call.collective is None else group.num_calls
        extra = {"group": group.label, "sequence": number + 1}
        self._log.debug("%s: %s, at %s", call.where, volume or "no data", call_site(), extra=extra)
