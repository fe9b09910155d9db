"""The exceptions of meshdist, for failures at run time; wrong arguments raise ValueError and TypeError."""

from __future__ import annotations

from typing import NamedTuple


class CallMade(NamedTuple):
    """The call that failed, and the line of the user's code that made it.

    Attributes:
        kind: "call" for a collective, "message" for a message.
        number: Its number among those of the group.
        site: `file:line`.
        peers_last: The number of the last call of a peer that left before this one; None in other cases.
        words: The operation that it is part of, such as one on arrays over a mesh; empty if there is none.
    """

    kind: str
    number: int
    site: str
    peers_last: int | None = None
    words: str = ""

    def __str__(self) -> str:
        last = "" if self.peers_last is None else f"its last was call {self.peers_last}, "
        words = f" {self.words}" if self.words else ""
        return f"{last}this is {self.kind} {self.number}{words}, at {self.site}"


class DistError(RuntimeError):
    """Report a failure of the distributed run; the base class of the exceptions of meshdist.

    The message consists of `error_prefix`, `what`, `call`, `advice` and `hang_report`, in this order. Programs should
    read these attributes instead of the message, whose words may change.

    Attributes:
        peer_failed: True if another rank caused the failure; the error of that rank has the cause.
        error_prefix: The function that was called, with the group and the rank; empty if unknown.
        what: What went wrong.
        call: The call that failed: its `number` on the group, and its `site`, the file and line of your code. None if
            the message does not name the call.
        advice: What to change in the program; empty if unknown.
        hang_report: What each rank was doing: the call that it is in, and the ranks that it waits for. Empty if
            unknown.
    """

    peer_failed = False

    def __init__(
        self, message: str, *, peer_failed: bool = False, error_prefix: str = "", hang_report: str = ""
    ) -> None:
        self.peer_failed = peer_failed
        self.error_prefix = error_prefix
        self.what = message
        self.call: CallMade | None = None
        self.advice = ""
        self.hang_report = hang_report
        # For this package:
        # The failed call, for the errors of later calls on the group, also if this message does not name it.
        self.made: CallMade | None = None
        # The message has the number of a failed call: of this one, a peer's, or an earlier one.
        self.is_numbered = False
        # The group was broken before the call; `what` has the error that broke it.
        self.is_earlier = False
        # A message does not fit the array that is to receive it.
        self.is_misfit = False
        # That message is an array of a different size or dtype, which `probe` would have told.
        self.needs_probe = False
        # The label of that message, if only the label does not fit.
        self.sent_label = ""
        # The lowest of the global ranks whose errors have the same `hang_report`.
        self.reporter: int | None = None
        # The end of the peer that caused the failure, a `departure.PeerFailure`; None if no peer did.
        self.peer: object = None
        super().__init__(self._message())

    @property
    def headline(self) -> str:
        """The message without `call`, `advice` and `hang_report`."""
        return f"{self.error_prefix}: {self.what}" if self.error_prefix else self.what

    def locate(self, error_prefix: str, call: CallMade | None = None) -> None:
        """Add the failed call to the message; an earlier `error_prefix` becomes part of `what`."""
        if self.error_prefix != error_prefix:
            self.what, self.error_prefix = self.headline, error_prefix
        if call is not None:
            self.call, self.is_numbered = call, True
        self.args = (self._message(),)

    def add(self, what: str = "", hang_report: str = "") -> None:
        """Append to `what`, or set the hang report if there is none."""
        self.what += what
        self.hang_report = self.hang_report or hang_report
        self.args = (self._message(),)

    def _message(self) -> str:
        call = "" if self.call is None else f"; {self.call}"
        hang_report = f"\n{self.hang_report}" if self.hang_report else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.headline}{call}{advice}{hang_report}"


class DistBackendError(DistError):
    """Report a failed collective or message: a dead peer, calls that disagree, a broken group."""


class DistNetworkError(DistError):
    """Report a connection that could not be established, was refused, or broke."""


class PeerConnectionError(DistBackendError, DistNetworkError):
    """Report a call that failed because a peer cannot, or can no longer, be reached, while it may still be running."""


class DistStoreError(DistError):
    """Report a store operation that failed, such as a wait for a key that was never set."""


class DistTimeoutError(DistError):
    """Report a wait that reached its deadline, naming the missing ranks."""


class UnknownAxisError(KeyError, ValueError):
    """Report an axis that a mesh does not have; the message lists its axes. It is a KeyError and a ValueError."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError alone would show the sentence in quotes


class NotMemberError(ValueError, RuntimeError):
    """Report a rank that a group does not have; versions of torch differ in which of the two types they raise."""
