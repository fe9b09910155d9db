"""CallHooks: observe, record or redirect the calls of one group, or have its ranks compare more of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from meshdist.runtime.interfaces import Group, Messages, MessageTaker
from meshdist.runtime.plan_cache import remember

if TYPE_CHECKING:
    from meshdist.core import Calls
    from meshdist.runtime.call import CollectiveSpec, Splits
    from meshdist.runtime.work import Work

MESSAGE_CALLS = ("send", "recv", "isend", "irecv")
EXCHANGE_CALLS = ("sendrecv", "exchange")
"""Functions of a group's messages whose call consists of several messages; observers and recorders see it as one."""


class Part(NamedTuple):
    """A message of an exchange."""

    is_send: bool
    array: Any
    peer: int | None  # as a rank of the group; None for any
    tag: int


def parts_of(exchange: str, args: Sequence[Any]) -> tuple[str, list[Part]]:
    """Return the function that the user called, and the messages of a call of one of `EXCHANGE_CALLS`; sends first."""
    if exchange == "sendrecv":
        send, recv, dst, src, tags = args
        return "sendrecv", [Part(True, send, dst, tags[0]), Part(False, recv, src, tags[1])]
    of, receives, sends, tag, _ = args
    sent = [Part(True, array, peer, tag) for array, peer in sends]
    return of, [*sent, *(Part(False, array, peer, tag) for array, peer in receives)]


class CallInfo(NamedTuple):
    """A call that a group is about to make, as the user made it, unchecked.

    Attributes:
        name: The function that is called.
        collective: Its definition; None for a message, or an exchange of messages.
        send: The input: an array, a list of arrays, or None; of a message of objects, an ObjectMessage.
        recv: The output, in the same forms.
        root: The source or destination, as a rank of the group; of a message the peer, None for any.
        splits: Rows to and rows from each rank, for an all_to_all_single with split sizes.
        is_size_exchange: It exchanges the sizes of objects; a second call of the same name follows.
        messages: Those that an exchange, such as a sendrecv or a shift, consists of.
    """

    group: Group
    name: str
    collective: CollectiveSpec | None
    send: Any
    recv: Any
    root: int | None = None
    splits: Splits | None = None
    is_size_exchange: bool = False
    messages: tuple[CallInfo, ...] = ()

    @property
    def error_prefix(self) -> str:
        return self.group.error_prefix(self.name)


# Called before a call is made. The function that it returns, if any, is called after the call has returned, unless the
# call raised; an async call returns when it has started. That of an `irecv_object_list` is called once it is complete,
# which tells its size.
CallObserver: TypeAlias = "Callable[[CallInfo], Callable[[], None] | None]"


class CallRecorder(Protocol):
    """Wraps the calls of groups to time them; this costs less than a CallObserver, since no CallInfo is made."""

    def around_submit(self, group: Group, submit: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that replaces `submit` for every collective of a group."""

    def around_message(self, group: Group, name: str, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that replaces `begin`, the function `name` of a group's messages."""

    def around_exchange(self, group: Group, name: str, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that replaces `exchange`, one of `EXCHANGE_CALLS` of a group's messages."""


class HookedMessages(Messages, Protocol):
    def watch(self, *observers: CallObserver) -> None: ...


class HookedGroup(Group, Protocol):
    calls: Calls
    plans: dict[Any, Any]

    @property
    def hooks(self) -> CallHooks: ...
    @property
    def messages(self) -> HookedMessages: ...
    def compare_shapes(self, wanted: bool) -> None: ...
    def check_usable(self, error_prefix: str) -> None: ...  # Raise if the group is no longer valid


class CallHooks:
    """Observes, records or redirects the calls of a group.

    It sets a `submit` on the instance, which hides the method of the class: calls without hooks pay nothing.

    Attributes:
        compared: The plans of the calls in which the ranks compare words, by these.
    """

    def __init__(self, group: HookedGroup) -> None:
        self._group = group
        self._taker: Callable[..., Any] | None = None
        self._observers: tuple[CallObserver, ...] = ()
        self._recorders: tuple[CallRecorder, ...] = ()
        self._message_taker: MessageTaker | None = None
        self.compared: dict[str, dict[Any, Any]] = {}

    def comparing(self, words: str) -> Comparing:
        """Let the ranks compare `words` in the calls of the block, which have plans of their own for that."""
        plans = self.compared.get(words)
        if plans is None:
            plans = {}
            remember(self.compared, words, plans)
        return Comparing(self._group, words, plans)

    @contextmanager
    def redirect(self, taker: Callable[..., Any], message_taker: MessageTaker) -> Iterator[None]:
        """Pass calls to `taker`, with the arguments of `submit`, until the block ends.

        `message_taker` gets the name and the implementation of each message function, and returns its replacement.

        Raises:
            ValueError: They are redirected already.
        """
        if self._taker is not None:
            raise ValueError(
                f"{self._group!r}: a coalescing_manager of this group is open already; managers do not nest"
            )
        self._taker = taker
        self._message_taker = message_taker
        self._install()
        try:
            yield
        finally:
            self._taker = self._message_taker = None
            self._install()

    def watch(self, *observers: CallObserver) -> None:
        self._observers = observers
        self._install()

    def record(self, *recorders: CallRecorder) -> None:
        self._recorders = recorders
        self._install()

    def _install(self) -> None:
        group = self._group
        group.__dict__.pop("submit", None)
        if self._taker is not None:
            group.__dict__["submit"] = self._taker
        else:
            if self._observers:
                group.__dict__["submit"] = self._observed(self._observers)
            for recorder in self._recorders:
                group.__dict__["submit"] = recorder.around_submit(group, group.submit)
        group.calls.is_open = "submit" not in group.__dict__
        messages = group.messages
        messages.watch(*self._observers)  # this also removes what was installed before
        for recorder in self._recorders:
            for name in MESSAGE_CALLS:
                setattr(messages, name, recorder.around_message(group, name, getattr(messages, name)))
            for name in EXCHANGE_CALLS:
                setattr(messages, name, recorder.around_exchange(group, name, getattr(messages, name)))
        if self._message_taker is not None:
            for name in MESSAGE_CALLS:
                setattr(messages, name, self._message_taker(name, getattr(messages, name)))

    def _observed(self, observers: tuple[CallObserver, ...]) -> Callable[..., Any]:
        group, submit = self._group, self._group.submit

        def observed(
            collective: CollectiveSpec,
            send: Any,
            recv: Any,
            op: Any = None,
            root: int | None = None,
            async_op: bool = False,
            splits: Splits | None = None,
            timeout_s: float | None = None,
        ) -> Any:
            info = CallInfo(group, collective.name, collective, send, recv, root, splits, collective.is_size_exchange)
            return notify_around(
                observers, info, lambda: submit(collective, send, recv, op, root, async_op, splits, timeout_s)
            )

        return observed


class Comparing:
    """The calls in its block have plans of their own, whose fingerprint has the words that the ranks compare."""

    __slots__ = ("_group", "_kept", "_plans", "_words")

    def __init__(self, group: HookedGroup, words: str, plans: dict[Any, Any]) -> None:
        self._group, self._words, self._plans = group, words, plans

    def __enter__(self) -> None:
        group = self._group
        self._kept = group.plans, group.calls.words
        group.plans, group.calls.words = self._plans, self._words

    def __exit__(self, *failed: object) -> None:
        group = self._group
        plans, group.calls.words = self._kept
        if group.plans is self._plans:  # the group has not dropped its plans meanwhile, as one that breaks does
            group.plans = plans


def notify_around(observers: tuple[CallObserver, ...], info: CallInfo, make: Callable[[], Any]) -> Any:
    """Make a call with `make` and return its result; notify the observers before and after it."""
    afters = [observer(info) for observer in observers]
    result = make()
    for after in afters:
        if after is not None:
            after()
    return result


def notify_at_the_end(observers: tuple[CallObserver, ...], info: CallInfo, make: Callable[[], Work]) -> Work:
    """Make an async call whose size is known once it is complete; notify the observers before it, and then."""
    afters = [after for observer in observers if (after := observer(info)) is not None]
    work = make()

    def notify() -> None:
        if work.is_success():
            for after in afters:
                after()

    if afters:
        work.add_callback(notify)
    return work
