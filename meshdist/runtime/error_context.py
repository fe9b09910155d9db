"""Add to an error the call that failed, its group and rank, and the number of the call if a peer caused the failure."""

from __future__ import annotations

from pathlib import PurePath

from meshdist.errors import CallMade, DistBackendError, DistError
from meshdist.runtime.departure import LeftOut, failure_of, in_words
from meshdist.runtime.flight_recorder import SEQUENCE, Record, facts_in, site_in
from meshdist.system.platform import at_limit


def located(error: BaseException, error_prefix: str, record: Record | None) -> tuple[BaseException, DistError]:
    """Return the error that a failed call raises, and the error that its group is broken with.

    A DistError gets the call's error prefix. If a peer caused it, it also gets the number and the line of the call,
    unless it has those of another rank's call, or of an earlier one, already.

    Args:
        error: The error of the call.
        error_prefix: Name, group and rank of the call.
        record: The call's record in the flight recorder, if it has one.
    """
    error = at_limit(error)
    if not isinstance(error, DistError):
        return error, DistBackendError(in_words(error), error_prefix=error_prefix)
    needs_no_call = error.is_numbered or not error.peer_failed
    error.locate(error_prefix, None if needs_no_call or record is None else _call_of(error, record))
    error.__traceback__ = None  # the user needs the frames of the call, not those of the check that failed
    return error, error


def _call_of(error: DistError, record: Record) -> CallMade:
    kind, number = "message" if facts_in(record).is_message else "call", record[SEQUENCE]
    failure, peers_last = failure_of(error), None
    # Ranks make the calls of a group in one order, so a peer that left before this call has made all earlier ones.
    if failure is not None and failure.left_out is LeftOut.CALL and failure.departure.exit.is_orderly and number > 1:
        peers_last = number - 1
    return CallMade(kind, number, PurePath(site_in(record)[0]).name, peers_last)
