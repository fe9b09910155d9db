"""Protocols of groups, worlds and dry runs, which are defined in higher layers, as far as lower layers use them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from meshdist.runtime.call import CollectiveSpec, Splits

if TYPE_CHECKING:
    from meshdist.arrays.host import Array
    from meshdist.arrays.reduce_op import Op
    from meshdist.core import Record
    from meshdist.runtime.flight_recorder import FlightRecorder
    from meshdist.runtime.waiting import Found, Incoming, Probe, Waitable
    from meshdist.runtime.work import Work


_T = TypeVar("_T")


class OwnMessages(Protocol):
    """The messages of a rank to itself."""

    def send(self, array: Array, tag: int) -> Waitable: ...
    def recv(self, array: Array, tag: int) -> Incoming: ...
    def probe(self, tag: int | None) -> Probe: ...
    def awaits(self, tag: int) -> bool:
        """Return whether a receive is posted that the next message with this tag matches."""


class Messages(Protocol):
    @property
    def num_messages(self) -> int: ...
    @property
    def outstanding(self) -> int: ...

    def peer(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        """Return the peer of a message, as a rank of the group."""

    def send(self, tensor: object, dst: int, tag: int, of: str = "send", *, is_size_exchange: bool = False) -> None: ...

    def recv(
        self, tensor: object, src: int | None, tag: int, of: str = "recv", *, is_size_exchange: bool = False
    ) -> int:
        """Receive a message; return the sender, as a rank of the group."""

    def isend(self, tensor: object, dst: int, tag: int, of: str = "isend", label: str = "") -> Work: ...
    def irecv(self, tensor: object, src: int | None, tag: int, of: str = "irecv", label: str = "") -> Work: ...

    def sendrecv(self, send: object, recv: object, dst: int, src: int | None, tags: tuple[int, int]) -> int:
        """Send a message and receive one; return the sender, as a rank of the group."""

    def exchange(
        self,
        of: str,
        receives: Sequence[tuple[object, int]],
        sends: Sequence[tuple[object, int]],
        tag: int,
        terms: Any,
    ) -> None:
        """Receive and send arrays, each from or to a rank of the group, and wait for all of them."""

    def exchange_of(self, terms: Any, tag: int) -> Callable[[Any, Any], Any] | None:
        """Return what `known_exchange` has returned for these terms."""

    def known_exchange(
        self, of: str, receives: Sequence[tuple[Any, int]], sends: Sequence[tuple[Any, int]], tag: int, terms: Any
    ) -> Callable[[Any, Any], Any] | None:
        """Return what carries such an exchange out in the core, called with the arrays to send and to receive into."""

    def note_exchange(self, run: Callable[[Any, Any], Any], error_prefix: str, send: Any, recv: Any) -> None:
        """Let the core call `run(send, recv)` when the user calls again what is in progress, with such arrays."""

    def probe(self, src: int | None, tag: int | None) -> Found:
        """Wait for a message, and return what it is."""

    def iprobe(self, src: int | None, tag: int | None) -> Found | None:
        """Return what message has arrived; None if there is none yet."""

    def unobserved(self, name: str) -> Callable[..., Any]:
        """Return the function `name` without hooks, for a part of a call that the hooks have seen already."""

    def batched(self, of: str) -> AbstractContextManager[None]:
        """Post the messages on GPUs that are begun in the block together at its end."""

    def begin_record(self, of: str, array: Array, peer: int | None, tag: int, *, sends: bool) -> Record: ...


class OnDevice(Protocol):
    """Carries out calls on arrays in GPU memory."""

    @property
    def device(self) -> int | None: ...
    @property
    def has_tags(self) -> bool: ...


MessageTaker: TypeAlias = "Callable[[str, Callable[..., Any]], Callable[..., Any]]"


class Redirects(Protocol):
    def redirect(self, taker: Callable[..., Any], message_taker: MessageTaker) -> AbstractContextManager[None]: ...


class Group(Protocol):
    """A process group, as collectives, hooks and backends see it."""

    ranks: tuple[int, ...]
    name: str
    label: str
    timeout_s: float
    recorder: FlightRecorder

    @property
    def num_calls(self) -> int: ...  # How many collectives this rank has called
    @num_calls.setter
    def num_calls(self, count: int) -> None: ...
    @property
    def has_backend(self) -> bool: ...  # Whether it is set up, which its first call does
    @property
    def hooks(self) -> Redirects: ...
    @property
    def messages(self) -> Messages: ...
    @property
    def collective_group(self) -> Group: ...
    @property
    def outstanding(self) -> int: ...
    def reduces_apart(self, array: Any) -> bool: ...  # Whether an all_reduce may write to another array
    def submit(
        self,
        collective: CollectiveSpec,
        send: object,
        recv: object,
        op: Op | None = None,
        root: int | None = None,
        async_op: bool = False,
        splits: Splits | None = None,
        timeout_s: float | None = None,
    ) -> object: ...
    def submit_unobserved(self, *args: Any) -> object:
        """`submit` without hooks, for a part of a call that the hooks have seen already."""

    def remember_call(self, key: Hashable, device_array: type, planned: Callable[[Any, Any, bool], Any]) -> None:
        """Keep a call on GPU arrays that needs no checks."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def global_rank(self, place: int) -> int: ...

    def root(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        """Return the root of a call as a rank of the group."""

    def root_or_first(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        """Return the root of a call; the first rank of the group if none is given."""

    def error_prefix(self, name: str) -> str: ...  # Return the beginning of messages about a call of `name`

    def named(self, error_prefix: str, function: Callable[..., _T], *args: object) -> _T:
        """Return `function(*args)`; put `error_prefix` before the message of what it raises."""

    def carries(self, device: str) -> bool:
        """Return whether a backend of the group carries arrays on a device type, "cpu" or "cuda"."""

    def device_calls(self, of: str) -> OnDevice | None:
        """Return the DeviceCalls of the group; None if it takes no arrays on a GPU."""

    def fail(self, error: BaseException, error_prefix: str, record: Record | None = None) -> BaseException:
        """Break the group; return the error to raise."""


class HasGroup(Protocol):
    """A `group` argument: a ProcessGroup, a DeviceMesh, or the result of `new_group`."""

    @property
    def collective_group(self) -> Group: ...


class WorldView(Protocol):
    rank: int

    @property
    def default_group(self) -> Group: ...


class MachineView(Protocol):
    @property
    def parts(self) -> Sequence[object]: ...


class DryRunView(Protocol):
    is_joined: bool

    @property
    def topology(self) -> MachineView | None: ...  # The simulated machine, if one was given
    def local_rank(self) -> int: ...

    def join(self, backend: str | None, timeout_s: float, world_size: int, rank: int) -> object:
        """Put the world of `init_process_group` with these arguments into the slot."""
