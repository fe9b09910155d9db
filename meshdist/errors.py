"""The exceptions of meshdist: what happens at run time, as opposed to a wrong argument."""


class DistError(RuntimeError):
    """Report a failure of the distributed run; the base of all others.

    Attributes:
        peer_failed: True where this rank fails only because another one did: the cause is to be found there.
    """

    peer_failed = False

    def __init__(self, message: str, *, peer_failed: bool = False) -> None:
        super().__init__(message)
        self.peer_failed = peer_failed


class DistBackendError(DistError):
    """Report a failed collective or message: a dead peer, calls that disagree, a broken group."""


class DistNetworkError(DistError):
    """Report a connection that could not be made, was refused, or broke."""


class DistStoreError(DistError):
    """Report a store operation that failed, such as a key that never came."""


class DistTimeoutError(DistError):
    """Report a wait that reached its deadline, naming who was missing."""
