"""Call: one collective call, checked, as a backend gets it. Ranks compare its Signature.

PassedArrays makes its buffers of the arrays that the user passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from meshdist.arrays.host import Array, as_buffers, check_apart, check_writable, is_plain, native, pack
from meshdist.arrays.overlap import must_copy
from meshdist.arrays.reduce_op import PremulSum, ReduceOp, quietly
from meshdist.arrays.scratch import Scratch
from meshdist.runtime.waiting import Incoming, Waitable

Buffers: TypeAlias = "Array | list[Array] | None"
Splits: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"


class Transport(Protocol):
    """Messages between the ranks of a group, over which algorithms run.

    Attributes:
        rank: This rank in the group.
        size: The number of ranks.
    """

    rank: int
    size: int

    @property
    def ranks(self) -> tuple[int, ...]: ...

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        """Post a send without blocking; the result is ready when `array` may be changed."""

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        """Post a receive into `array` without blocking; from any rank if `src` is None."""


# The algorithm of a collective: (transport, call, send, recv) -> the waitables to wait for, one after another.
Algorithm: TypeAlias = "Callable[[Transport, Call, Buffers, Buffers], Iterator[Waitable]]"


class CompositionSpec(Protocol):
    """How one collective is carried out by another."""

    @property
    def inner(self) -> CollectiveSpec: ...
    @property
    def by_device(self) -> bool: ...  # The lists hold one array, or list, for each device of this process
    @property
    def by_element(self) -> bool: ...  # Each element of the lists could be a call of `inner` of its own
    @property
    def put(self) -> Callable[[Call, Buffers], Array]: ...  # Make the array that `inner` sends
    @property
    def room(self) -> Callable[[Call, Array], Array]: ...  # Make the array that `inner` receives into
    @property
    def take(self) -> Callable[[Call, Array, Buffers], None]: ...  # Copy the received data to the user's arrays
    def inner_call(self, call: Call) -> Call: ...


class CollectiveSpec(Protocol):
    """The definition of a collective, as the layers below `collectives` see it; see `Collective`."""

    def __hash__(self) -> int: ...
    @property
    def name(self) -> str: ...  # The function that the user calls
    @property
    def names(self) -> tuple[str, str]: ...  # The parameters for the input and the output
    @property
    def in_place(self) -> bool: ...  # The output overwrites the input
    @property
    def is_size_exchange(
        self,
    ) -> bool: ...  # It is the first part of a call; another call of the same name completes it
    @property
    def meets(self) -> bool: ...  # The ranks meet before they begin it
    @property
    def lists(self) -> tuple[str, ...]: ...  # Which of `send` and `recv` are lists of arrays
    @property
    def native(self) -> str: ...  # The method of a backend that carries it out

    @property
    def composition(self) -> CompositionSpec | None:
        """How another collective carries it out; None if it has an algorithm of its own."""

    @property
    def check(self) -> Callable[[Call], None]: ...  # Raise for arguments that are wrong on this rank alone

    @property
    def agreed(self) -> Callable[[Call], tuple[Any, ...]]:
        """Return the arguments that must be equal on all ranks, besides the op and the root."""

    @property
    def writes(self) -> Callable[[Call], bool]: ...  # Return whether this rank's output is written
    @property
    def default(self) -> Algorithm: ...
    def under(
        self, name: str, agreed: Callable[[Call], tuple[Any, ...]], *, is_size_exchange: bool = False
    ) -> CollectiveSpec: ...


class Signature:
    """The part of a call that must be equal on all ranks.

    Attributes:
        text: The call in words, for error messages.
        compared: The part of the words that must be equal; all of `text` by default.
        fingerprint: A hash of `compared`, 64 bits.
    """

    __slots__ = ("compared", "text")

    def __init__(self, text: str, compared: str = "") -> None:
        self.text, self.compared = text, compared or text

    @property
    def fingerprint(self) -> int:
        return _hash_of(self.compared)


@lru_cache(maxsize=1024)  # of plans that are made anew, and of the calls of backends that have no plans of their own
def _hash_of(text: str) -> int:
    return int.from_bytes(hasher()(text.encode()).digest(), "little")


@cache
def hasher() -> Callable[[bytes], Any]:
    """Return what makes an object whose `digest()` is the fingerprint, eight bytes, of the words of a signature.

    It is compiled: the core calls it where nothing of Python may run.
    """
    from hashlib import blake2b  # loaded since this rank has joined

    return partial(blake2b, digest_size=8)


class SignatureForm(NamedTuple):
    """How the signature of a call follows from the shape of its arrays, for calls that differ in nothing else.

    Attributes:
        text: What comes before and after the shape, a list of numbers, in the words.
        compared: What comes before and after the shape, or the sizes, in what is compared.
        by_received: Whether the shape is that of the arrays that are received, and not of those that are sent.
        num_sizes: `compared` has the number of elements so many times, and no shape; 0 if it has the shape.
    """

    text: tuple[str, str]
    compared: tuple[str, str]
    by_received: bool
    num_sizes: int


class ShapeRule(Enum):
    """Which collectives raise for arrays of equal size that have different shapes on different ranks."""

    ANY_SHAPE = "none, as in torch"
    BY_COLLECTIVE = "those that combine or copy the array of each rank element by element"
    EQUAL_SHAPE = "all, as at debug level DETAIL"


class Elements(str):
    """The element counts of a call's arrays as a word of its signature; `begin` comes before them.

    Attributes:
        with_shapes: The word with the shapes, for messages: `float64[2, 3]`.
        shaped: The word with the shapes, to compare. All shapes of an array with at most one element are alike.
        is_elementwise: The shapes must be equal by default: the elements of all ranks belong together by their places.
    """

    with_shapes: str
    shaped: str
    is_elementwise: bool

    def __new__(cls, arrays: list[Array], begin: str = "", *, is_elementwise: bool = False) -> Elements:
        dtype = in_words(arrays[0].dtype)
        word = super().__new__(cls, f"{begin}{dtype}[{', '.join(str(array.size) for array in arrays)}]")
        word.with_shapes = word.shaped = _with_shapes(begin, dtype, [array.shape for array in arrays])
        if any(array.size <= 1 for array in arrays):
            shapes = [array.shape if array.size > 1 else (array.size,) for array in arrays]
            word.shaped = _with_shapes(begin, dtype, shapes)
        word.is_elementwise = is_elementwise
        return word

    def compared(self, rule: ShapeRule) -> str:
        """Return the word that must be equal on all ranks."""
        return self.shaped if self.compares_shapes(rule) else str(self)

    def compares_shapes(self, rule: ShapeRule) -> bool:
        """Return whether `compared` has the shapes."""
        return rule is ShapeRule.EQUAL_SHAPE or (self.is_elementwise and rule is ShapeRule.BY_COLLECTIVE)


@lru_cache(maxsize=1024)  # NumPy makes the words anew each time, in some microseconds
def in_words(dtype: Any) -> str:
    """Return a dtype as a word of a signature."""
    return str(dtype)


def _with_shapes(begin: str, dtype: str, shapes: list[tuple[int, ...]]) -> str:
    if len(shapes) > 1 and len(set(shapes)) == 1:
        return f"{len(shapes)} x {dtype}{list(shapes[0])}"
    return begin + ", ".join(f"{dtype}{list(shape)}" for shape in shapes)


class Call(NamedTuple):
    """One call of one rank. Backends get it checked, with plain contiguous buffers and ranks of the group.

    Attributes:
        collective: The definition, which has the name and the default algorithm.
        error_prefix: The collective, group and rank, with which error messages begin.
        rank: This rank in the group.
        size: The group's size.
        send: The input: an array, a list of `size` arrays, or None.
        recv: The output, in the same forms. The same object as `send` for in-place collectives.
        op: The reduction; None if the collective has none.
        root: The source or destination, as a rank of the group; None if the collective has none.
        splits: Rows to and rows from each rank, for an all_to_all_single with split sizes.
        shape_rule: Whether all ranks must pass arrays of equal shape, and not only of equal size.
        words: What else must be equal on all ranks, in words; see `CallHooks.comparing`.
    """

    collective: CollectiveSpec
    error_prefix: str
    rank: int
    size: int
    send: Buffers
    recv: Buffers
    op: ReduceOp | None = None
    root: int | None = None
    splits: Splits | None = None
    shape_rule: ShapeRule = ShapeRule.BY_COLLECTIVE
    words: str = ""

    def signature(self) -> Signature:
        """Return what must be equal on all ranks: collective, dtype, element counts, op, root; shapes by the rule."""
        agreed = [part if isinstance(part, str) else str(part) for part in self.collective.agreed(self)]
        shown = [part.with_shapes if isinstance(part, Elements) else part for part in agreed]
        compared, by_default = _compared(agreed, self.shape_rule), _compared(agreed, ShapeRule.BY_COLLECTIVE)
        common = []
        if self.op is not None:
            common.append(f"op={self.op.value}")
        if self.root is not None:
            common.append(f"root={self.root}")
        if self.words:
            common.append(self.words)
        if self.shape_rule is ShapeRule.EQUAL_SHAPE and compared != by_default:
            common.append("shapes compared at debug level DETAIL")
        return Signature(self._words(shown, common), self._words(compared, common))

    def _words(self, agreed: list[str], common: list[str]) -> str:
        return f"{self.collective.name}({', '.join([*agreed, *common])})"

    def signature_form(self, signature: Signature) -> SignatureForm | None:
        """Return the form of the call's signature; None if that does not follow from the shape of its arrays alone."""
        agreed = self.collective.agreed(self)
        elements = agreed[0] if len(agreed) == 1 else None
        if not isinstance(elements, Elements) or self.shape_rule is ShapeRule.EQUAL_SHAPE:
            return None
        compares_shapes = elements.compares_shapes(self.shape_rule)
        for buffers, by_received in ((self.recv, True), (self.send, False)):
            arrays = each(buffers)
            if not arrays or any(array.shape != arrays[0].shape for array in arrays):
                continue
            shape, sizes = str([*arrays[0].shape]), str([arrays[0].size] * len(arrays))
            text = _around(signature.text, self.collective.name, elements.with_shapes, shape)
            word = elements.compared(self.shape_rule)
            compared = _around(signature.compared, self.collective.name, word, shape if compares_shapes else sizes)
            if text is not None and compared is not None:
                return SignatureForm(text, compared, by_received, 0 if compares_shapes else len(arrays))
        return None

    def on_plain_arrays(self) -> Call:
        """Return the call as its plan gets it: with contiguous arrays, here without values."""
        send = _plain_room(self.send)
        return self._replace(send=send, recv=send if self.recv is self.send else _plain_room(self.recv))

    def without_buffers(self) -> Call:
        """Return the call as a plan may keep it: plans must not hold arrays."""
        return self._replace(send=None, recv=None)


def _around(words: str, name: str, word: str, numbers: str) -> tuple[str, str] | None:
    """Return what comes before and after the numbers at the end of the first word of a signature, if it has them."""
    begin = f"{name}({word}"
    if not (word.endswith(numbers) and words.startswith(begin)):
        return None
    return begin[: -len(numbers)], words[len(begin) :]


def _plain_room(buffers: Buffers) -> Buffers:
    if isinstance(buffers, list):
        return [pack(array, keep=False) for array in buffers]
    return None if buffers is None else pack(buffers, keep=False)


def _compared(agreed: list[str], rule: ShapeRule) -> list[str]:
    return [part.compared(rule) if isinstance(part, Elements) else part for part in agreed]


def each(buffers: Buffers | Any) -> list[Any]:
    """Return the arrays of a buffer as a list."""
    if buffers is None:
        return []
    return buffers if isinstance(buffers, list) else [buffers]


def num_bytes(buffers: Any) -> int:
    """Return the bytes of an array, or of all arrays of a list; 0 for None."""
    if isinstance(buffers, (list, tuple)):
        return sum(map(num_bytes, buffers))
    return int(getattr(buffers, "nbytes", 0))


def hint_at_swapped_sides(collective: CollectiveSpec, send: Any, recv: Any) -> str:
    """Return a question if the list is in the place of one array, and one array in the place of the list."""
    given = [side for side, value in (("send", send), ("recv", recv)) if isinstance(value, (list, tuple))]
    is_swapped = len(given) == len(collective.lists) == 1 and given[0] not in collective.lists
    if not is_swapped or send is None or recv is None:
        return ""
    return f"; did you swap {collective.names[0]} and {collective.names[1]}?"


class PassedArrays:
    """The arrays of a call as the user passed them, of any layout; a plan gets plain arrays in their place.

    Raises:
        TypeError: They are not arrays of supported dtypes, or a list where one array is expected, or one for a list.
    """

    __slots__ = ("_given", "_in_place", "_names", "_packed", "_passed", "_taken")

    def __init__(self, collective: CollectiveSpec, send: Any, recv: Any) -> None:
        self._names, self._passed = collective.names, recv
        self._packed: list[Scratch] = []
        self._in_place = collective.in_place and recv is send
        (sent, received), lists, of = self._names, collective.lists, collective.name
        try:
            self._given = as_buffers(send, sent, "send" in lists, of, is_written=self._in_place)
            self._taken = self._given
            if not self._in_place:
                self._taken = as_buffers(recv, received, "recv" in lists, of, is_read=False, is_written=True)
        except TypeError as error:
            error.args = (f"{error}{hint_at_swapped_sides(collective, send, recv)}",)
            raise

    def in_native_order(self) -> tuple[Buffers, Buffers]:
        """Return the input and the output in the byte order of this machine."""
        sends = _in_native_order(self._given)
        return sends, sends if self._in_place else _in_native_order(self._taken)

    def are_native(self) -> bool:
        """Return whether all are in the byte order of this machine."""
        return all(array.dtype.isnative for buffers in (self._given, self._taken) for array in each(buffers))

    def check_output(self) -> None:
        """Raise if the output cannot be written."""
        if isinstance(self._taken, list):
            for place, (array, value) in enumerate(zip(self._taken, self._passed, strict=True)):
                check_writable(array, f"{self._names[1]}[{place}]", value)
        elif self._taken is not None:
            check_writable(self._taken, self._names[1], self._passed)

    def check_factor(self, factor: PremulSum) -> None:
        """Raise if the input cannot be multiplied by `factor`."""
        for array in each(self._given):
            factor.check(array, self._names[0])

    def check_apart(self) -> None:
        """Raise ValueError if two arrays of a list that is written share memory."""
        if isinstance(self._taken, list):
            check_apart(self._taken, self._names[1])

    @contextmanager
    def plain(self, factor: PremulSum | None, *, copies: bool, writes: bool) -> Iterator[tuple[Buffers, Buffers]]:
        """Give plain arrays to send, multiplied by `factor` if there is one, and plain arrays to receive into.

        At the end, what was received is copied to the user's arrays if the call `writes` and it was not received there.
        """
        sent = self._plain(self._given, copies) if factor is None else _scaled(factor, self._given)
        received = sent if self._in_place else self._plain(self._taken)
        yield sent, received  # after an error, a peer may still use the memory
        if writes:
            for array, plain in zip(each(self._taken), each(received), strict=True):
                if plain is not array:
                    array[...] = plain
        for scratch in self._packed:
            scratch.release()

    def _plain(self, buffers: Buffers, copy: bool = False) -> Buffers:
        if isinstance(buffers, list):
            return [self._plain_array(array, copy) for array in buffers]
        return None if buffers is None else self._plain_array(buffers, copy)

    def _plain_array(self, array: Array, copy: bool) -> Array:
        if is_plain(array) and not copy:
            return array
        scratch = Scratch(array.shape, array, native(array).dtype)
        self._packed.append(scratch)
        scratch.array[...] = array
        return scratch.array


def _in_native_order(buffers: Buffers) -> Buffers:
    if isinstance(buffers, list):
        return [native(array) for array in buffers]
    return None if buffers is None else native(buffers)


def _scaled(factor: PremulSum, buffers: Buffers) -> Buffers:
    products = [quietly(factor.scaled, array) for array in each(buffers)]
    return products if isinstance(buffers, list) else products[0]


def must_be_copied(call: Call) -> bool:
    """Return whether the input must be copied, because the output overwrites it."""
    # A composed collective copies its input in any case.
    if call.send is None or call.recv is None or call.collective.composition is not None:
        return False
    return must_copy(call.send, call.recv, call.rank, call.size, call.op is not None)
