"""Lists of objects as messages: one pickle each, whose receiver need not know how long it is."""

from __future__ import annotations

import copyreg
import pickle
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from meshdist.arrays.host import Array, dtype_of_objects
from meshdist.errors import DistError
from meshdist.runtime.work import Future, ReceiptWork

# Up to here, pickles are padded to a power of two, at least the smaller one, so that there are few kinds of such
# messages, which have a fast path; the core sends them as they are. What follows a pickle is ignored.
_LEAST_PADDED, MOST_PADDED = 256, 4 << 10


# The dtypes whose arrays and scalars have short pickles, and their names, which mean the same on all systems.
_NAMES = {np.dtype(char): np.dtype(char).str for char in "?bhilqBHILQefdFD"}
# A pickler is not kept after a longer pickle: its memo keeps the memory that it had, and clearing that takes time.
_MOST_KEPT = 4 << 10


def _reduce_array(array: Any) -> Any:
    name = _NAMES.get(array.dtype)
    if name is None or array.dtype.metadata is not None or not array.flags.c_contiguous:
        return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return np.ndarray, (array.shape, name, pickle.PickleBuffer(array))


def _reduce_scalar(scalar: np.generic[Any]) -> Any:
    return type(scalar), (scalar.item(),)


class _Pickler:
    """Pickles objects one after the other.

    NumPy's pickle of a short array takes three times as long, and of a scalar twice, both to write and to read: it has
    the dtype as an object. Any unpickler can read these.
    """

    _OWN: ClassVar[dict[Any, Any]] = {
        np.ndarray: _reduce_array,
        # The type of Boolean scalars has another name in NumPy 2 than before.
        **{dtype.type: _reduce_scalar for dtype in _NAMES if dtype.kind != "b"},
    }

    def __init__(self) -> None:
        self._parts: list[Any] = []  # it writes long bytes and buffers as they are
        self._pickler = pickle.Pickler(SimpleNamespace(write=self._parts.append), pickle.HIGHEST_PROTOCOL)
        self._registered: dict[Any, Any] | None = None

    def dump(self, value: Any) -> bytes:
        """Return the pickle of a value; after an error, this pickler is not to be used again."""
        if self._registered != copyreg.dispatch_table:  # what the program registers precedes
            self._registered = dict(copyreg.dispatch_table)
            self._pickler.dispatch_table = {**self._OWN, **self._registered}
        self._pickler.dump(value)
        # The memory of an array in Fortran order is contiguous, too.
        data = b"".join([part.raw() if type(part) is pickle.PickleBuffer else part for part in self._parts])
        self._parts.clear()
        self._pickler.clear_memo()
        return data


_idle: list[_Pickler] = []


def pickle_of(value: Any) -> bytes:
    """Return the pickle of an object.

    In a long one, bytes and arrays are copied once. `pickle.dumps` writes into memory that it lets grow by half each
    time, into new pages: for an array of 256 KiB or more, that took ten times as long.
    """
    try:
        pickler = _idle.pop()
    except IndexError:  # none is idle: it is the first one, or others are in use
        pickler = _Pickler()
    data = pickler.dump(value)
    if len(data) <= _MOST_KEPT:
        _idle.append(pickler)
    return data


def unpickle(data: Any, error_prefix: str, failed: Exception | None = None) -> Any:
    """Return the object that another rank has pickled, from bytes or an array of them.

    The core has tried where `failed` is given.

    Raises:
        DistError: It cannot be unpickled on this rank; says why.
    """
    try:
        if failed is not None:
            raise failed
        return pickle.loads(data)
    except MemoryError as error:
        raise MemoryError(f"{error_prefix}: no memory is left to unpickle an object") from error
    except Exception as error:  # the object's own code may raise anything
        cause = cause_in_the_object(error)
        is_missing = isinstance(error, (ImportError, AttributeError)) and cause is None
        advice = "; the module that defines its type must be the same on all ranks" if is_missing else ""
        raise DistError(
            f"an object that was sent to this rank cannot be unpickled here: {type(error).__name__}: {error}{advice}",
            error_prefix=error_prefix,
        ) from cause


def cause_in_the_object(error: Exception) -> Exception | None:
    """Return an error that the caller has caught from pickle, if code of the object raised it; else None.

    Of pickle's own error, the message has all there is; the object's code has frames below those of the caller,
    and of what pickles.
    """
    trace = error.__traceback__ and error.__traceback__.tb_next
    own = (pickle_of.__code__, _Pickler.dump.__code__, _reduce_array.__code__)
    while trace is not None and trace.tb_frame.f_code in own:
        trace = trace.tb_next
    return None if trace is None else error


class ObjectMessage:
    """A list of objects that is sent or received; messages take it in the place of an array.

    Attributes:
        array: The pickle that is sent, empty in a receive; its dtype says how many objects are sent, or awaited.
        given: What the user sends, a list or a single object, or the list that is to get the objects; None if there is
            none.
        is_single: The user passes, or gets, the only object of the list.
        nbytes: The size of the pickle.
    """

    def __init__(self, array: Array, given: Any = None, *, is_single: bool = False) -> None:
        self.array = array
        self.given, self.is_single = given, is_single
        self.nbytes = array.nbytes
        self._pickle: Array | bytes = b""
        self._objects: list[Any] | None = None

    @classmethod
    def of_pickle(cls, data: bytes, number: int) -> ObjectMessage:
        """Return the message of a list of so many objects that is pickled already."""
        array = np.frombuffer(data, np.uint8)
        if array.size <= MOST_PADDED:
            padded = np.zeros(max(_LEAST_PADDED, 1 << (array.size - 1).bit_length()), np.uint8)
            padded[: array.size] = array
            array = padded
        return cls(array.view(dtype_of_objects(number)))

    @classmethod
    def to_receive(
        cls, number: int | None, given: list[Any] | None = None, *, is_single: bool = False
    ) -> ObjectMessage:
        """Return the message of a list of `number` objects; None is any number."""
        return cls(_no_objects(number), given, is_single=is_single)

    def take(self, data: Array | bytes) -> None:
        """Take the pickle that has come; empty in a dry run, where nothing comes."""
        self._pickle, self.nbytes = data, len(data)

    def objects(self, error_prefix: str) -> list[Any] | None:
        """Return the list that has come, the same one every time; None in a dry run."""
        if self._objects is None and self.nbytes:
            objects = unpickle(self._pickle, error_prefix)
            if self._objects is None:  # no other thread was faster
                self._objects = objects
                self._pickle = b""  # the memory is not needed any more
        return self._objects


def async_calls(message: Any) -> tuple[str, str]:
    """Return the names of the functions that begin to send and to receive such a message: objects, or an array."""
    return ("isend_object_list", "irecv_object_list") if type(message) is ObjectMessage else ("isend", "irecv")


def pickled_list(objects: list[Any]) -> bytes:
    """Return one pickle of all objects: what they have in common, they have in common where they are received."""
    return pickle_of(list(objects))


@lru_cache
def _no_objects(number: int | None) -> Array:
    return np.empty(0, dtype_of_objects(number))


class ObjectsWork(ReceiptWork):
    """The Work of an `irecv_object_list`; the thread that asks for the objects unpickles them.

    Unpickling runs code of the objects, which may take long, or make calls: the progress thread must not.
    """

    __slots__ = ()

    @property
    def message(self) -> ObjectMessage:
        if self._value is None:  # of a work that the core has made
            self._value = ObjectMessage.to_receive(None)
        message: ObjectMessage = self._value
        return message

    def result(self) -> list[Any]:
        self.wait()
        objects = self.message.objects(self._error_prefix)
        return [None] if objects is None else objects

    def _complete_future(self, future: Future) -> None:
        if self._error is not None:
            future.set_exception(self._error)
            return
        try:
            objects = self.result()
        except BaseException as error:  # whatever the objects' code raises, is raised where the future is waited for
            future.set_exception(error)
        else:
            future.set_result(objects)
