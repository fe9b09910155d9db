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
    """Report a failure of the distributed run; the base of all others.

    The message is made of `error_prefix`, `what`, `call`, `advice` and `hang_report`, in this order. Code decides by
    these attributes, and never by the message.

    Attributes:
        peer_failed: True if this rank fails only because another one did, which has the cause.
        error_prefix: The call that failed, with its group and rank; empty if unknown.
        what: What went wrong.
        call: The call that failed, with its number and line; None if unknown, or if `what` has it.
        made: The same, for the errors of later calls on the group, also where this message needs none.
        advice: What to change in the program; empty if unknown.
        is_numbered: The message has the number of the failed call: of this one, a peer's, or an earlier one.
        is_earlier: The group was broken before the call; `what` has the error that broke it.
        is_misfit: A message does not fit the array that is to receive it.
        needs_probe: That message is an array of a different size or dtype, which `probe` would have told.
        sent_label: The label of that message, where it alone does not fit; else empty.
        hang_report: Lines on the ranks: which one waits for which, or which call each makes; empty if unknown.
        reporter: The lowest of the global ranks whose errors have the same `hang_report`; None if unknown.
        peer: The end of the peer that caused the failure, a `departure.PeerFailure`; None if no peer did.
    """

    peer_failed = False

    def __init__(
        self, message: str, *, peer_failed: bool = False, error_prefix: str = "", hang_report: str = ""
    ) -> None:
        self.peer_failed = peer_failed
        self.error_prefix = error_prefix
        self.what = message
        self.call: CallMade | None = None
        self.made: CallMade | None = None
        self.advice = ""
        self.is_numbered = False
        self.is_earlier = False
        self.is_misfit = False
        self.needs_probe = False
        self.sent_label = ""
        self.hang_report = hang_report
        self.reporter: int | None = None
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
    """Report an axis that a mesh does not have, and list those that it has."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError alone would show the sentence in quotes


class NotMemberError(ValueError, RuntimeError):
    """Report a rank that a group does not have; versions of torch differ in which of the two types they raise."""
