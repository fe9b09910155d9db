"""What a rank that goes away tells its peers, and how they say it: the same words wherever it is noticed.

Who leaves says so in the shared memory of its groups and in the store. So who has ended without a word was killed, or
ended its process past the interpreter: it has died, as far as anybody can know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from meshdist.errors import DistBackendError

DESTROYED_GROUP = "has destroyed the group"
LEFT_THE_WORLD = "has left the world"
ENDED = "has ended without destroy_process_group()"
FINISHED = "has finished"
DIED = "has died"
ENDED_WITH_STORE = "has ended, and the store is gone as well"
"""All that can be known of a rank that has ended where there is no store to ask for its last words."""

ORDERLY = (DESTROYED_GROUP, LEFT_THE_WORLD, ENDED, FINISHED)
"""Ends after which other ranks may go on."""

_MOST_NAMED = 8
# What a rank says of another one, and what it adds of its own: which call that has ended.
_PASSED_ON = re.compile(r"(?P<who>rank \d+(?: \([^()]*\))?) gave up: ")
_OWN_CALL = re.compile(r"; this is (?:call|message) \d+, at [^;\n]*$", re.MULTILINE)


def gave_up(reason: str) -> str:
    """Return what a rank says that cannot go on.

    Where it does so because another rank did, it passes on what that one said, and not what it made of it itself: the
    first cause is said once, however many pass it on.

    Example:
        >>> gave_up("it raised ValueError: boom")
        'gave up: it raised ValueError: boom'
        >>> gave_up("barrier on group 'a' (rank 2 of 3): rank 1 (pid 7 on n) gave up: it raised ValueError: boom")
        'gave up, as rank 1 (pid 7 on n) gave up: it raised ValueError: boom'
    """
    *_, first = [None, *_PASSED_ON.finditer(reason)]
    if first is None:
        return f"gave up: {reason}"
    return f"gave up, as {first['who']} gave up: {_OWN_CALL.sub('', reason[first.end() :])}"


def in_words(error: BaseException) -> str:
    """Return what was raised, in a line.

    Example:
        >>> in_words(ValueError("boom")), in_words(KeyboardInterrupt())
        ('ValueError: boom', 'KeyboardInterrupt')
    """
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}{': ' if first_line else ''}{first_line}"


def peer_gone(who: str, what: str, left_out: str) -> DistBackendError:
    """Return the error of a call that waits for a rank that is gone.

    Args:
        who: The rank.
        what: What it said, or what is known of its end.
        left_out: What the caller waits for it to do, as in "sending a message".

    Example:
        >>> print(peer_gone("rank 1", LEFT_THE_WORLD, "sending a message"))
        rank 1 has left the world without sending a message
    """
    link = " and without " if what == ENDED else " without "
    return DistBackendError(f"{who} {what}{link + left_out if what in ORDERLY else ''}", peer_failed=True)


def nobody_left(gone: Mapping[str, str]) -> DistBackendError:
    """Return the error of a call that takes a message of any rank, where all others are gone.

    Args:
        gone: What became of each.

    Example:
        >>> print(nobody_left({"rank 1": DIED, "rank 2": LEFT_THE_WORLD}))
        all others are gone: rank 1 has died; rank 2 has left the world
    """
    named = [f"{who} {what}" for who, what in list(gone.items())[:_MOST_NAMED]]
    if len(gone) > _MOST_NAMED:
        named.append(f"and so on, {len(gone)} ranks in all")
    return DistBackendError(f"all others are gone: {'; '.join(named)}", peer_failed=True)


def any_of(others: Sequence[int], describe: Callable[[int], str]) -> str:
    """Return what messages call the source of a message that may come from any of the other ranks.

    Example:
        >>> any_of([1, 2], "rank {}".format), any_of([1], "rank {}".format)
        ('any rank', 'rank 1, the only other,')
    """
    return f"{describe(others[0])}, the only other," if len(others) == 1 else "any rank"
