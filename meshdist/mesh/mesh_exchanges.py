"""MeshExchanges: arrays passed along an axis, and the exchange of the boundaries of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import getattr_static
from operator import index
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from meshdist import core
from meshdist.arrays.device_types import new_empty, taken
from meshdist.arrays.host import AnyArray, Array, check_dtype, check_writable, describe_array, describe_value
from meshdist.arrays.overlap import can_be_filled, share_memory
from meshdist.arrays.plain_numbers import plain_form, plain_number, plain_truth
from meshdist.collectives.definition import known_to_core
from meshdist.groups.message_exchanges import Terms, terms_of
from meshdist.mesh.mesh_slices import MeshSlices
from meshdist.runtime.plan_cache import remember
from meshdist.system.name_hints import explaining
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from meshdist.groups.process_group import ProcessGroup

V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., Any])
# A value for all axes, one for each in order, or those of some axes by name or index.
PerAxis: TypeAlias = "V | Sequence[V] | Mapping[int | str, V]"

_ALIKE = (
    "all ranks along axis {} must call it with the same `by` and `periodic`, and with arrays of the same shape and"
    " dtype, or with an `out` that matches the incoming array"
)


class _KnownMethod:
    """A method whose calls the core makes again, if they were made before; found in the mesh once it was bound."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._explained = explaining(method)

    def __get__(self, mesh: MeshSlices | None, owner: type) -> Callable[..., Any]:
        if mesh is None:
            return self._explained
        if core.module is None:
            return MethodType(self._explained, mesh)
        bound = known_to_core(MethodType(self._method, mesh))
        if getattr_static(owner, self._method.__name__) is self:  # not overridden
            mesh.__dict__[self._method.__name__] = bound
        return bound


def _known(method: F) -> F:
    return cast("F", _KnownMethod(method))


class MeshExchanges(MeshSlices):
    """Messages between neighbours along the axes of a mesh."""

    @_known
    def shift(
        self,
        x: AnyArray,
        by: int = 1,
        periodic: bool = True,
        out: AnyArray | None = None,
        *,
        axis: int | str | None = None,
        tag: int = 0,
    ) -> Array | None:
        """Shift `x` along an axis by `by` ranks, and return the array received from the rank `by` places before.

        All ranks along the axis call it, with equal `by` and `periodic`. It is MPI's Cart_shift and Sendrecv in one: at
        the open end of an axis there is no sender, so nothing is received, `out` is unchanged, and the result is None;
        at the other end, nothing is sent.

        Args:
            x: An array; of the same shape and dtype on all ranks, unless `out` describes the incoming array.
            by: The number of ranks to shift by; negative values shift in the other direction. 0 returns a copy.
            periodic: Whether the axis wraps around: the last rank sends to the first.
            out: The array to receive into, which must not overlap `x`; a new array like `x` if None.
            axis: The axis, by name or index. May be None on a mesh of one axis, such as `mesh["x"]`.
            tag: The tag of the messages.

        Returns:
            `out` or the new array; None where nothing is received.

        Raises:
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.
            TypeError: `x` or `out` is not an array, or `by` is not an integer.
            ValueError: `axis` is None on a mesh of several axes, `out` cannot be written or shares memory with `x`, or
                the calling rank is outside the mesh. Nothing is sent.
            DistBackendError: A neighbour failed, or its array does not fit: it has a different shape or dtype, or comes
                from a call with a different `periodic`.
            DistTimeoutError: A neighbour did not call within the group's timeout.

        Example:
            >>> import numpy as np, meshdist
            >>> def program():
            ...     row = meshdist.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
            ...     mine = np.array([row.get_rank()])
            ...     before, after = row.shift(mine), row.shift(mine, -1, periodic=False)
            ...     return before.item(), None if after is None else after.item()
            >>> meshdist.run(program, 4)
            [(3, 1), (0, 2), (1, 3), (2, None)]
        """
        key: Any = None
        tag = plain_number(tag)
        if type(x) is type(out) is np.ndarray or (type(x) is np.ndarray and out is None):
            along, places, wraps = plain_number(axis), plain_number(by), plain_truth(periodic)
            if type(places) is int and type(wraps) in (int, bool) and (along is None or type(along) in (int, str)):
                key = (along, places, wraps, x.dtype, x.shape, None if out is None else (out.dtype, out.shape))
            known = self._known_exchanges.get(key)
            if known is not None and (out is None or (can_be_filled(out) and not share_memory(out, x))):
                messages, legs = known.group.messages, _legs(known, x, out)
                run = None if out is None or legs is None else messages.known_exchange("shift", *legs, tag, known.terms)
                messages.note_exchange(run or partial(_shifted, known, tag), known.error_prefix, x, out)
                return _shifted(known, tag, x, out)
        along = self._one_axis("shift", axis, "x, axis=")
        group = self.get_group(along)
        prefix, me, size = group.error_prefix("shift"), group.rank(), group.size()
        array = group.named(prefix, _sendable, x, "x")
        room = None if out is None else group.named(prefix, taken, out, "out")
        places, wraps = group.named(prefix, _whole, by, "by"), bool(group.named(prefix, _truth, periodic, "periodic"))
        if room is not None:
            group.named(prefix, _check_room, room, out, array)
        before, after = (_neighbour(me, step, size, wraps) for step in (-places, places))
        # Where `by` differs, the ranks wait for each other in a circle.
        words = _ALIKE.format(self._layout.axis_text(along))
        is_alike = room is None or room.shape == array.shape
        terms = terms_of(array, (), wraps, words) if is_alike else Terms(words)
        shift = _Shift(group, before, after, terms, prefix)
        if key is not None:
            remember(self._known_exchanges, key, shift)
        return _shifted(shift, tag, array, room, out)

    @_known
    def halo_exchange(
        self,
        block: AnyArray,
        width: PerAxis[int] = 1,
        periodic: PerAxis[bool] = False,
        *,
        dims: PerAxis[int] | None = None,
        tag: int = 0,
    ) -> AnyArray:
        """Fill the ghost cells of this rank's block with the neighbours' cells, in place, corners included.

        `block` includes its frame of ghost cells: in an array without one, the outermost cells would be overwritten.

        Axis i of this mesh divides dimension i of an array, unless `dims` says otherwise. Each rank's block has `width`
        ghost cells at both ends of each divided dimension; between them are the cells that the rank computes. The call
        copies the outermost of those into the ghost cells of the neighbours. The axes are exchanged one
        after another, and each also passes on the ghost cells filled by the previous ones, so that a corner comes from
        the diagonal neighbour.

        At the boundary of the whole array, unless the axis is periodic, ghost cells keep their values: boundary
        conditions go there. Blocks may be of different lengths along the axis that divides them.

        With `width=1`, on a mesh of 2 x 2 ranks whose blocks have 2 x 2 cells, rank 0 gets::

            . . . .         . . . .
            . 0 0 .         . 0 0 1       . boundary, as before
            . 0 0 .   ->    . 0 0 1       1 from the right, 2 from below,
            . . . .         . 2 2 3       3 from the diagonal neighbour

        Args:
            block: An array with its ghost cells; `np.pad(cells, width)` makes one. It need not be contiguous.
            width: How many ghost cells at each end. One number; a sequence of one for each axis; or a dict of axes, by
                name or index, in which missing axes have none. Equal on all ranks.
            periodic: Whether the first rank along an axis is the last one's neighbour, in the same forms.
            dims: The dimension of `block` that each axis divides: a sequence of one for each axis, or a dict; axes that
                are missing there are not exchanged. None: axis i divides dimension i. Other dimensions are not divided.
            tag: The tag of the messages.

        Returns:
            `block`.

        Raises:
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.
            TypeError: `block` is not an array, or a width or dimension is not an integer.
            ValueError: A width is negative or larger than the cells between the ghost cells; a dimension is missing or
                given twice; `block` cannot be written; or the calling rank is outside the mesh. Nothing is sent.
            DistBackendError: A neighbour failed, or its block has a different shape, or comes from a call with a
                different `periodic`.
            DistTimeoutError: A neighbour did not call within the group's timeout.

        Example:
            >>> import numpy as np, meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x"))
            ...     block = np.pad(np.full((2, 2), mesh.get_rank()), 1, constant_values=-1)
            ...     return mesh.halo_exchange(block)
            >>> meshdist.run(program, 4)[0]
            array([[-1, -1, -1, -1],
                   [-1,  0,  0,  1],
                   [-1,  0,  0,  1],
                   [-1,  2,  2,  3]])
        """
        key: Any = None
        tag = plain_number(tag)
        if type(block) is np.ndarray:
            divided = "each" if dims is None else plain_form(dims, plain_number)
            forms = plain_form(width, plain_number), plain_form(periodic, plain_truth), divided
            if None not in forms:
                key = (forms, block.dtype, block.shape, block.strides)
            known = self._known_exchanges.get(key)
            if known is not None and block.flags.writeable:
                if known:
                    run = partial(_exchange_edges, known, tag)
                    known[0].group.messages.note_exchange(run, "", None, block)
                _exchange_edges(known, tag, None, block)
                return block
        of = "halo_exchange"
        if self.get_coordinate() is None:
            raise ValueError(self._outside(f"DeviceMesh.{of}", "it has no neighbours"))
        prefix = f"{of} on mesh {self._layout.describe()} (rank {self.get_rank()})"
        array = _named(prefix, _sendable, block, "block")
        if isinstance(array, np.ndarray):
            _named(prefix, check_writable, array, "block", block)
        widths = self._per_axis(prefix, "width", width, _whole)
        wraps = self._per_axis(prefix, "periodic", periodic, _truth)
        places = self._dims(prefix, array, dims)
        for axis, dim in places.items():
            self._check_width(prefix, array, dim, widths[axis], axis)
        edges = [
            _edges(self.get_group(axis), array, dim, widths[axis], bool(wraps[axis]), self._layout.axis_text(axis))
            for axis, dim in places.items()
            if widths[axis]
        ]
        if key is not None:
            remember(self._known_exchanges, key, edges)
        _exchange_edges(edges, tag, None, array)
        return block

    def _per_axis(self, prefix: str, name: str, value: Any, convert: Callable[[Any, str], int]) -> list[int]:
        """Return the number of each axis, from one of the forms of `PerAxis`; 0 of axes that are missing in a dict."""
        if isinstance(value, Mapping):
            numbers: list[Any] = [0] * self.ndim
            for axis, number in value.items():
                numbers[self._layout.axis(axis)] = number
        elif isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str):
            numbers = list(value)
            if len(numbers) != self.ndim:
                raise ValueError(
                    f"{prefix}: {name} must have {counted(self.ndim, 'value')}, one for each axis, got {len(numbers)}"
                )
        else:
            numbers = [value] * self.ndim
        return [_named(prefix, convert, number, name) for number in numbers]

    def _dims(self, prefix: str, array: Any, dims: Any) -> dict[int, int]:
        """Return the dimension that each axis divides, of the axes that divide one."""
        if dims is None:
            found = dict(enumerate(range(self.ndim)))
        elif isinstance(dims, Mapping):
            found = {self._layout.axis(axis): _named(prefix, _whole, dim, "dims") for axis, dim in dims.items()}
        else:
            found = dict(enumerate(self._per_axis(prefix, "dims", dims, _whole)))
        for axis, dim in found.items():
            if not -array.ndim <= dim < array.ndim:
                raise ValueError(
                    f"{prefix}: axis {self._layout.axis_text(axis)} divides dim {dim}, and block has"
                    f" {counted(array.ndim, 'dimension')}, {describe_array(array)}; pass dims=, the dimension of"
                    " each axis"
                )
        divided = {axis: dim % array.ndim for axis, dim in sorted(found.items())}
        if len(set(divided.values())) < len(divided):
            raise ValueError(f"{prefix}: dims must be different for each axis, got {list(found.values())}")
        return divided

    def _check_width(self, prefix: str, array: Any, dim: int, width: int, axis: int) -> None:
        if width < 0:
            raise ValueError(f"{prefix}: width must not be negative, got {width} for {self._layout.axis_text(axis)}")
        extent = array.shape[dim]
        if extent < 3 * width:
            interior = max(0, extent - 2 * width)
            raise ValueError(
                f"{prefix}: dim {dim} of block has length {extent}; with width={width} it has"
                f" {counted(interior, 'interior cell') if interior else 'no interior cells'}, and the neighbours along"
                f" {self._layout.axis_text(axis)} need {width}; the length must be at least {3 * width}, ghost cells"
                " included"
            )


class _Shift(NamedTuple):
    group: ProcessGroup
    before: int | None  # the ranks of the group that this one receives from and sends to
    after: int | None
    terms: Terms
    error_prefix: str


def _legs(shift: _Shift, array: Any, room: Any) -> tuple[Sequence[tuple[Any, int]], Sequence[tuple[Any, int]]] | None:
    """Return what is received and sent; None if there are no messages."""
    before, after = shift.before, shift.after
    if before == after and (before is None or before == shift.group.rank()):
        return None
    return () if before is None else ((room, before),), () if after is None else ((array, after),)


def _shifted(shift: _Shift, tag: int, array: Any, room: Any, out: Any = None) -> Array | None:
    """Carry out a shift into `room`; return `out`, by default the same, unless nothing was received."""
    before = shift.before
    if before is not None and room is None:
        room = new_empty(array.shape, array)
    legs = _legs(shift, array, room)
    if legs is not None:
        shift.group.messages.exchange("shift", *legs, tag, shift.terms)
    elif before is not None:
        room[...] = array
    result: Array | None = None if before is None else room if out is None else out
    return result


_Cells: TypeAlias = "tuple[tuple[slice, ...], int]"  # at one end of an axis, and the rank of the group beside them


class _Edges(NamedTuple):
    """The cells of a block at both ends of an axis that a neighbour has, or computes."""

    group: ProcessGroup
    ghosts: tuple[_Cells, ...]
    edges: tuple[_Cells, ...]
    terms: Terms


def _edges(group: ProcessGroup, array: Any, dim: int, width: int, periodic: bool, axis: str) -> _Edges:
    """Return the edges along one axis, in words `axis`; of the other dimensions, ghost cells are included."""
    me, size, extent = group.rank(), group.size(), array.shape[dim]
    below, above = (_neighbour(me, step, size, periodic) for step in (-1, 1))

    def cells(*ends: tuple[int, int | None]) -> tuple[_Cells, ...]:
        whole = (slice(None),) * dim
        return tuple(((*whole, slice(begin, begin + width)), peer) for begin, peer in ends if peer is not None)

    words = (
        f"all ranks along {axis} must call it with the same width, `periodic` and tag, and with blocks of the same"
        f" dtype and shape, except for dim {dim}, which is divided along this axis; the block of this rank is"
        f" {describe_array(array)}, ghost cells included"
    )
    # Between two ranks of a periodic axis there are two messages each way. The first sent is that of the low edge, so
    # the first received is that of the high ghost cells.
    ghosts = cells((extent - width, above), (0, below))
    edges = cells((width, below), (extent - 2 * width, above))
    one = array[(slice(None),) * dim + (slice(0, width),)]
    return _Edges(group, ghosts, edges, terms_of(one, (dim,), periodic, words))


def _exchange_edges(axes: Sequence[_Edges], tag: int, nothing: None, block: Any) -> None:
    """Exchange the edges along all axes, one after the other; called as `Messages.note_exchange` says."""
    for group, ghosts, edges, terms in axes:
        if group.size() == 1:
            for (ghost, _), (edge, _) in zip(ghosts, edges, strict=True):
                block[ghost] = block[edge]
            continue
        known = group.messages.exchange_of(terms, tag)
        if known is not None:
            known(tuple([block[place] for place, _ in edges]), tuple([block[place] for place, _ in ghosts]))
            continue
        receives = [(block[place], peer) for place, peer in ghosts]
        sends = [(block[place], peer) for place, peer in edges]
        group.messages.exchange("halo_exchange", receives, sends, tag, terms)


def _neighbour(me: int, step: int, size: int, periodic: bool) -> int | None:
    place = me + step
    if periodic:
        return place % size
    return place if 0 <= place < size else None


def _whole(value: Any, name: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {describe_value(value)}") from None


def _truth(value: Any, name: str) -> int:
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return int(value)
    raise TypeError(f"{name} must be True or False, got {value!r}")


def _sendable(value: Any, name: str) -> Any:
    array = taken(value, name)
    if isinstance(array, np.ndarray):
        check_dtype(array, name)
    return array


def _check_room(room: Any, out: Any, array: Any) -> None:
    if isinstance(room, np.ndarray):
        check_writable(room, "out", out)
        if isinstance(array, np.ndarray) and share_memory(room, array):
            raise ValueError("out shares memory with x, and this call writes to it; pass a different array")


def _named(prefix: str, function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{prefix}: {error}") from None
