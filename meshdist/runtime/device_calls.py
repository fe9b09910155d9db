"""DeviceCalls: the path of calls on arrays in GPU memory.

`ProcessGroup` and `PointToPoint` have the path of calls on the CPU. They pass a call on unchecked to the backend's
`device_calls` when an array is on a GPU, or when the group's backend takes only such arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from meshdist.arrays.device import as_device_buffers
from meshdist.arrays.reduce_op import Op, as_reduce_op
from meshdist.errors import DistBackendError
from meshdist.runtime.call import Call, ShapeRule, Splits
from meshdist.runtime.plan_cache import remember
from meshdist.runtime.work import Work

if TYPE_CHECKING:
    from meshdist.runtime.call import CollectiveSpec
    from meshdist.runtime.interfaces import Group

_UNKNOWN = object()


class Request(NamedTuple):
    """One call of a collective as the user made it, unchecked; the fields are those of `Call` and of `Group.submit`."""

    group: Group
    error_prefix: str
    collective: CollectiveSpec
    send: Any
    recv: Any
    op: Op | None
    root: int | None
    async_op: bool
    splits: Splits | None
    timeout_s: float | None  # the group's timeout if None
    shape_rule: ShapeRule = ShapeRule.BY_COLLECTIVE
    words: str = ""

    @property
    def compares(self) -> bool:
        """Whether the ranks' calls are compared at any cost, as at debug level DETAIL."""
        return self.shape_rule is ShapeRule.EQUAL_SHAPE or bool(self.words)


class Parcel(NamedTuple):
    """One message as the user passed it."""

    group: Group
    error_prefix: str
    of: str
    tensor: Any
    peer: int | None
    tag: int


class DeviceCalls(ABC):
    sends_to_itself = False  # whether it carries a rank's messages to itself
    has_tags = True  # whether messages have tags; if not, those between two ranks arrive in their order
    device: int | None = None  # the number of the GPU that the arrays of this rank must be on; None if any will do

    def __init__(self) -> None:
        self._plans: dict[Any, Any] = {}

    def arrays(self, request: Request) -> tuple[Any, Any]:
        """Return the input and the output as CuPy arrays; one object if the call is in place."""
        collective, in_place = request.collective, request.collective.in_place and request.recv is request.send
        (sent, received), lists = collective.names, collective.lists
        given = named(request, as_device_buffers, request.send, sent, "send" in lists, written=in_place)
        if in_place:
            return given, given
        return given, named(request, as_device_buffers, request.recv, received, "recv" in lists, written=True)

    def plan(self, request: Request, given: Any, taken: Any, make: Callable[[Call], Any]) -> Any:
        """Return the plan of a call; `make` makes it, and it is kept for later calls that differ only in the arrays."""
        group, collective, error_prefix = request.group, request.collective, request.error_prefix
        op = None if request.op is None else group.named(error_prefix, as_reduce_op, request.op)
        key = (collective, _shapes(taken), None if given is taken else _shapes(given), op, request.root, request.splits)
        plan = self._plans.get(key, _UNKNOWN)
        if plan is _UNKNOWN or request.compares:
            rank, size, root = group.rank(), group.size(), request.root
            rest = (request.splits, request.shape_rule, request.words)
            call = Call(collective, error_prefix, rank, size, given, taken, op, root, *rest)
            collective.check(call)
            plan = make(call)
            remember(self._plans, key, plan)
        return plan

    @abstractmethod
    def submit(self, request: Request) -> Any: ...

    @abstractmethod
    def send(self, parcel: Parcel) -> None: ...

    @abstractmethod
    def recv(self, parcel: Parcel) -> int:
        """Receive a message; return the sender, as a rank of the group."""

    @abstractmethod
    def isend(self, parcel: Parcel) -> Work: ...

    @abstractmethod
    def irecv(self, parcel: Parcel) -> Work: ...

    def connect(self, error_prefix: str) -> None:
        """Connect to the other ranks now instead of at the first call, if the backend needs to."""

    def begin_batch(self) -> None:
        """Hold back the following messages until `end_batch`, if they must be posted together."""

    def end_batch(self, group: Group, error_prefix: str | None) -> None:
        """Post the messages held back; drop them if `error_prefix` is None, since one of them was refused."""


def named(call: Request | Parcel, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """Return `function(*args, **how)`; put the call's error prefix before the message of what it raises."""
    try:
        return call.group.named(call.error_prefix, lambda: function(*args, **how))
    except DistBackendError as error:  # there is no CuPy
        raise DistBackendError(f"{call.error_prefix}: {error}") from None


def _shapes(buffers: Any) -> Any:
    if type(buffers) is list:
        return tuple([(array.dtype, array.shape) for array in buffers])
    return None if buffers is None else (buffers.dtype, buffers.shape)
