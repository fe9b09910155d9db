"""Where a call has failed: its group and rank; and, if since a peer did, how far the ranks had come."""

from __future__ import annotations

from pathlib import PurePath

from meshdist.debug.flight_recorder import SEQUENCE, Record, facts_in, site_in
from meshdist.errors import DistBackendError, DistError
from meshdist.farewell import in_words
from meshdist.limits import at_limit

_THIS_IS = "this is "
_NOT_MADE = " without making this call"


def located(error: BaseException, where: str, record: Record | None) -> tuple[BaseException, DistError]:
    """Return what the caller of a call gets that has failed, and what its group is broken with.

    A DistError says which call it ended. Where it follows from a peer's, it says as well which one of its group that
    call was, and where that was made; but not if it says such a thing already, since another rank or an earlier call
    has failed with it.

    Args:
        error: What the call failed with.
        where: How messages about the call begin.
        record: The flight recorder's, of the call; None where there is none.
    """
    error = at_limit(error)
    if not isinstance(error, DistError):
        return error, DistBackendError(f"{where}: {in_words(error)}")
    text = str(error)
    if not text.startswith(where):
        text = f"{where}: {text}"
    if record is not None and error.peer_failed and _THIS_IS not in text:
        kind = "message" if facts_in(record).is_message else "call"
        text = numbered(text, kind, record[SEQUENCE], PurePath(site_in(record)[0]).name)
    error.args = (text,)
    error.__traceback__ = None  # how it was noticed is of no interest; which call raises it is
    return error, error


def numbered(text: str, kind: str, number: int, site: str) -> str:
    r"""Return what a call failed with, and the number and the line of that call.

    Ranks make the calls of a group together, so who has gone without this one has made all before it.

    Example:
        >>> numbered("rank 1 has died", "call", 18, "train.py:42")
        'rank 1 has died; this is call 18, at train.py:42'
        >>> numbered("rank 1 has left the world without making this call", "call", 18, "train.py:42")
        'rank 1 has left the world without making this call; its last was call 17, this is call 18, at train.py:42'
        >>> print(numbered("rank 1 has failed: timed out\n  who waits for whom:", "call", 18, "train.py:42"))
        rank 1 has failed: timed out; this is call 18, at train.py:42
          who waits for whom:
    """
    what, newline, story = text.partition("\n")  # behind the first line, who waits for whom
    last = f"its last was call {number - 1}, " if what.endswith(_NOT_MADE) and number > 1 else ""
    return f"{what}; {last}{_THIS_IS}{kind} {number}, at {site}{newline}{story}"
