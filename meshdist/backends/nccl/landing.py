"""Landing: the flight recorder's record of an operation that is on its way on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshdist.backends.nccl.lane import Flight, Lane
    from meshdist.debug.flight_recorder import FlightRecorder, Record


class Landing:
    """Ends a record when the device has come to the end of the operation; it stands among the works of a flight.

    Args:
        recorder: The rank's.
        record: Of the call.
    """

    __slots__ = ("_record", "_recorder")

    def __init__(self, recorder: FlightRecorder, record: Record) -> None:
        self._recorder = recorder
        self._record = record

    def depart(self, lane: Lane, flight: Flight) -> None:
        """Do nothing: the record began with the call."""

    def settle(self, error: BaseException | None) -> None:
        """Say that it is done, and with what error."""
        self._recorder.end(self._record, error)
