"""Gradients in flat buckets: which parameter is in which bucket, their arrays, and what is wrong in a step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from meshdist.arrays.device import cupy_module
from meshdist.arrays.device_types import new_empty, taken
from meshdist.arrays.host import consecutive_views
from meshdist.arrays.reduce_op import ReduceOp, check_op_dtype
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.objects import all_gather_object
from meshdist.errors import DistBackendError
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.shared_arrays import zeros
from meshdist.runtime.call_site import call_site
from meshdist.runtime.rank_text import call_rank
from meshdist.system.plurals import counted


@dataclass(frozen=True)
class Parameter:
    """A named array: its gradient has the same shape, dtype and device.

    Attributes:
        array: A NumPy array, or CuPy's.
        dtype: In native byte order.
        device: The number of the GPU; None on the CPU.
    """

    name: str
    array: Any
    dtype: Any
    device: int | None

    def __str__(self) -> str:
        device = "" if self.device is None else " on a GPU"
        return f"{self.name!r}, {self.dtype}{list(self.array.shape)}{device}"

    @property
    def nbytes(self) -> int:
        """The bytes of its gradient."""
        return int(self.array.size) * int(self.dtype.itemsize)


def checked_count(of: str, name: str, value: Any, least: int) -> int:
    """Return a number of bytes, steps or columns.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: It is less than `least`.
    """
    try:
        count: int = index(value)
    except TypeError:
        raise TypeError(f"{of}: {name} must be an integer, got {value!r:.80}") from None
    if count < least:
        raise ValueError(f"{of}: {name} must be at least {least}, got {count}")
    return count


def parameters_of(prefix: str, named_arrays: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[Parameter]:
    """Return the parameters of a mapping, or of pairs of name and array.

    Raises:
        TypeError: A name that is no string, no array, or a dtype that has no mean.
        ValueError: No parameters, or two of one name.
    """
    found: dict[str, Parameter] = {}
    if hasattr(named_arrays, "dtype"):
        raise TypeError(
            f"{prefix}: named_arrays must be a dict, or pairs (name, array), got one array; give it a name, as in"
            ' {"weights": array}'
        )
    for pair in named_arrays.items() if isinstance(named_arrays, Mapping) else named_arrays:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"{prefix}: named_arrays must be a dict, or pairs (name, array), got {pair!r:.80}")
        name, value = pair
        if not isinstance(name, str):
            raise TypeError(f"{prefix}: the names of parameters must be strings, got {name!r:.80}")
        if name in found:
            raise ValueError(f"{prefix}: two parameters have the name {name!r}; give each its own")
        try:
            array = taken(value, f"named_arrays[{name!r}]")
        except TypeError as error:
            raise TypeError(f"{prefix}: {error}") from None
        is_on_cpu = isinstance(array, np.ndarray)
        dtype = array.dtype.newbyteorder("=") if is_on_cpu and not array.dtype.isnative else array.dtype
        try:
            check_op_dtype(ReduceOp.AVG, dtype)
        except TypeError:
            what = (
                f"named_arrays[{name!r}] has dtype {dtype}, and only floating-point and complex arrays can be averaged"
            )
            raise TypeError(f"{prefix}: {what}; leave it out, or convert it with astype(float)") from None
        found[name] = Parameter(name, array, dtype, None if is_on_cpu else int(array.device.id))
    if not found:
        raise ValueError(f"{prefix}: named_arrays is empty; pass at least one parameter")
    return list(found.values())


def agree_on(group: ProcessGroup, prefix: str, parameters: Sequence[Parameter], settings: Sequence[str] = ()) -> None:
    """Compare the parameters of all ranks by their digests; all ranks call it.

    Raises:
        DistBackendError: They differ; raised on all ranks, with the first difference.
    """
    rows = [*settings, *map(str, parameters)]
    digests: list[Any] = [None] * group.size()
    all_gather_object(digests, hashlib.sha256("\n".join(rows).encode()).hexdigest(), group)
    if digests.count(digests[0]) == len(digests):
        return
    all_rows: list[Any] = [None] * group.size()
    all_gather_object(all_rows, rows, group)
    other = next(place for place, digest in enumerate(digests) if digest != digests[0])
    first, second = all_rows[0], all_rows[other]
    at = next((k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    what = "parameters" if at >= len(settings) else "settings"
    number = f"number {at - len(settings)} " if at >= len(settings) else ""
    parts = [
        f"{call_rank(place, group.ranks)} has {rows[at] if at < len(rows) else 'no more'}"
        for place, rows in ((0, first), (other, second))
    ]
    order = ", in the same order" if number else ""
    raise DistBackendError(
        f"{prefix}: the ranks' {what} differ, first {number}where {' and '.join(parts)}; pass the same on all ranks"
        f"{order}"
    )


def assigned(parameters: Sequence[Parameter], bucket_bytes: int, first_bucket_bytes: int) -> list[list[Parameter]]:
    """Return the parameters of each bucket.

    Gradients come in about the reverse order of the parameters, so that is the order of the buckets. A bucket is closed
    once it has `bucket_bytes`, the first one `first_bucket_bytes`: a small first one, so that communication begins
    early. A bucket has one dtype, and one device.

    Example:
        >>> arrays = {name: np.zeros(size) for name, size in {"a": 3, "b": 1, "c": 1, "d": 1}.items()}
        >>> [[each.name for each in some] for some in assigned(parameters_of("", arrays), 16, 8)]
        [['d'], ['c', 'b'], ['a']]
    """
    open_buckets: dict[Any, list[Parameter]] = {}
    limits: dict[Any, int] = {}
    closed: list[list[Parameter]] = []
    place = {parameter.name: number for number, parameter in enumerate(parameters)}
    for parameter in reversed(parameters):
        key = parameter.dtype, parameter.device
        bucket = open_buckets.setdefault(key, [])
        bucket.append(parameter)
        if sum(each.nbytes for each in bucket) >= limits.get(key, first_bucket_bytes):
            limits[key] = bucket_bytes
            closed.append(open_buckets.pop(key))
    # In the order in which they fill.
    return sorted([*closed, *open_buckets.values()], key=lambda bucket: -place[bucket[-1].name])


def gradient_like(view: Any, name: str, gradient: Any) -> Any:
    """Return the gradient of a parameter as an array.

    Raises:
        TypeError: `gradient` is not an array.
        ValueError: It has a different shape, dtype or device than `view`.
    """
    try:
        array = taken(gradient, "gradient")
    except TypeError as error:
        raise TypeError(f"the gradient of {name!r}: {error}") from None
    if array.shape != view.shape or array.dtype != view.dtype or type(array) is not type(view):
        found, due = (f"{each.dtype}{list(each.shape)}" for each in (array, view))
        modules = "" if type(array) is type(view) else f" of {type(array).__module__}, not {type(view).__module__}"
        raise ValueError(f"the gradient of {name!r} must be {due}, got {found}{modules}")
    return array


def check_not_complex(array: Any, into: Any, what: str) -> None:
    """Raise TypeError where copying `array`, which the message calls `what`, would lose its imaginary part."""
    if np.iscomplexobj(array) and not np.iscomplexobj(into):
        raise TypeError(f"{what} is complex, and {into.dtype} has no imaginary part")


class NamedViews(Mapping[str, Any]):
    """Arrays by name that stay where they are: `views[name] = array` copies, and `views[name] += array` adds in place.

    Example:
        >>> x = np.zeros(2)
        >>> views = NamedViews({"x": x})
        >>> views["x"] = np.ones(2)
        >>> views["x"] += 1
        >>> x.tolist()
        [2.0, 2.0]
    """

    def __init__(self, views: Mapping[str, Any]) -> None:
        self._views = dict(views)

    def __repr__(self) -> str:
        return f"NamedViews({self._views})"

    def __getitem__(self, name: str) -> Any:
        try:
            return self._views[name]
        except KeyError:
            raise KeyError(f"there is no array {name!r}; there are {names_text(list(self._views))}") from None

    def __setitem__(self, name: str, value: Any) -> None:
        view = self[name]
        if value is view:  # after `+=`
            return
        if np.shape(value) != view.shape:
            raise ValueError(f"{name!r} has shape {view.shape}, and cannot take one of {np.shape(value)}")
        check_not_complex(value, view, f"the value for {name!r}")
        view[...] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._views)

    def __len__(self) -> int:
        return len(self._views)


class FlatArrays:
    """Arrays of one dtype that are consecutive views of a flat array, which the ranks of a host share if they can.

    Args:
        extra: Elements at the end that belong to no array.

    Attributes:
        flat: All elements, and the extra ones.
        views: The arrays by name.
    """

    def __init__(self, group: ProcessGroup, parameters: Sequence[Parameter], extra: int = 0) -> None:
        first = parameters[0]
        self.size = sum(int(parameter.array.size) for parameter in parameters)
        length = self.size + extra
        if first.device is None:
            self.flat: Any = zeros(length, first.dtype, group)
        else:
            self.flat = new_empty((length,), first.array)
            self.flat[...] = 0
        names, shapes = zip(*((parameter.name, parameter.array.shape) for parameter in parameters), strict=True)
        self.views: dict[str, Any] = dict(zip(names, consecutive_views(self.flat, shapes), strict=True))


class GradBucket:
    """The gradients of some parameters in one flat array: what a communication hook gets.

    Attributes:
        group: The group of the reducer.

    Example:
        >>> import meshdist as dist
        >>> def scaled_down(bucket):  # a hook: halves what is averaged
        ...     bucket.buffer()[...] /= 2
        ...     return dist.all_reduce(bucket.buffer(), "avg", bucket.group, async_op=True)
    """

    def __init__(
        self, group: ProcessGroup, index: int, is_last: bool, parameters: Sequence[Parameter], buffer: Any
    ) -> None:
        self.group = group
        self._index = index
        self._is_last = is_last
        self._parameters = tuple(parameters)
        self._buffer = buffer

    def __repr__(self) -> str:
        held = counted(len(self._parameters), "gradient")
        return f"<GradBucket {self._index}: {held}, {self._buffer.dtype}[{self._buffer.size}]>"

    def index(self) -> int:
        """Return the number of the bucket: buckets are reduced in this order."""
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last bucket of a step."""
        return self._is_last

    def buffer(self) -> Any:
        """Return the flat array of all gradients of the bucket, of shape `(elements,)`."""
        return self._buffer

    def names(self) -> list[str]:
        """Return the names of its parameters, in the order of the buffer."""
        return [parameter.name for parameter in self._parameters]

    def parameters(self) -> list[Any]:
        """Return its parameters, as the reducer was given them, in the order of the buffer."""
        return [parameter.array for parameter in self._parameters]

    def gradients(self) -> list[Any]:
        """Return its gradients: views of the buffer with the shapes of the parameters."""
        return consecutive_views(self._buffer, (parameter.array.shape for parameter in self._parameters))

    def over(self, buffer: Any) -> GradBucket:
        """Return a bucket of the same parameters over another buffer, such as one of a different dtype.

        Args:
            buffer: An array of shape `(elements,)`, like this bucket's.
        """
        return GradBucket(self.group, self._index, self._is_last, self._parameters, buffer)


_MOST_NAMED = 8


def names_text(names: Sequence[str]) -> str:
    """Return names in words; of many, the first ones.

    Example:
        >>> names_text(["w", "b"])
        "'w', 'b'"
    """
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(repr, names[:_MOST_NAMED])) + more


def _joined(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MOST_NAMED} more faults" if len(texts) > _MOST_NAMED else ""
    return "; ".join(texts[:_MOST_NAMED]) + more


class StepFaults:
    """The faults of one rank in the current step.

    Args:
        prefix: The beginning of the message.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._texts)

    def add(self, what: str) -> None:
        """Add a fault, with the line of the user's call."""
        self._texts.append(f"{what} (at {call_site()})")

    def add_missing(self, names: Sequence[str]) -> None:
        """Add that these parameters have no gradient."""
        self._texts.append(
            f"no gradient for {names_text(names)} before wait(): call ready() for every parameter, or make the reducer"
            " with find_unused_parameters=True"
        )

    def clear(self) -> None:
        """Begin another step."""
        self._texts = []

    def are_on_any_rank(self, group: ProcessGroup | None) -> bool:
        """Return whether a rank of the group has found a fault, by a small call; whether this one has if None."""
        count: Any = np.array(len(self._texts))
        if group is not None:
            count = count if group.carries("cpu") else cupy_module().asarray(count)
            all_reduce(count, group=group)
        return bool(count != 0)

    def raise_on_all(self, group: ProcessGroup | None) -> None:
        """Raise DistBackendError with the faults of all ranks of the group; all of them call it."""
        if group is None:
            raise DistBackendError(f"{self._prefix}: {_joined(self._texts)}")
        found: list[Any] = [None] * group.size()
        all_gather_object(found, self._texts, group)
        parts = [f"{call_rank(place, group.ranks)}: {_joined(texts)}" for place, texts in enumerate(found) if texts]
        raise DistBackendError(f"{self._prefix}: {'. '.join(parts)}")
