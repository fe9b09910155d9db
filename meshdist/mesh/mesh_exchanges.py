"""MeshExchanges: arrays passed along an axis, and the exchange of the boundaries of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from meshdist.arrays.device_types import new_empty, taken
from meshdist.arrays.host import Array, check_dtype, check_writable, describe_array
from meshdist.mesh.mesh_slices import MeshSlices
from meshdist.system.name_hints import explaining
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from meshdist.groups.process_group import ProcessGroup

V = TypeVar("V")
# A value for all axes, one for each in order, or those of some axes by name or index.
PerAxis: TypeAlias = "V | Sequence[V] | Mapping[int | str, V]"
# Arrays, each with the rank of the group that it is from or for, or None.
_Messages: TypeAlias = "Sequence[tuple[Any, int | None]]"

_ONE_SHAPE = "all ranks along the axis must pass arrays of one shape and dtype, or an out that fits what comes"


class MeshExchanges(MeshSlices):
    """Messages between neighbours along the axes of a mesh."""

    @explaining
    def shift(
        self,
        x: Any,
        by: int = 1,
        periodic: bool = True,
        out: Any = None,
        *,
        axis: int | str | None = None,
        tag: int = 0,
    ) -> Array | None:
        """Shift `x` along an axis by `by` ranks, and return the array received from the rank `by` places before.

        All ranks along the axis call it, with equal `by` and `periodic`. As MPI's Cart_shift and Sendrecv in one: where
        no rank is before, at the open end of an axis, nothing is received, `out` stays as it is, and the result is
        None, as a receive from MPI.PROC_NULL leaves its buffer; where no rank comes after, nothing is sent.

        Args:
            x: An array; of one shape and dtype on all ranks, unless `out` says what comes.
            by: How many places up the axis; negative: down. 0 returns a copy.
            periodic: Whether the axis wraps around: the last rank sends to the first.
            out: The array to receive into, apart from `x`; a new one like `x` if None.
            axis: The axis, by name or index. May be None on a mesh of one axis, such as `mesh["x"]`.
            tag: The tag of the messages.

        Returns:
            `out` or the new array; None where nothing is received.

        Raises:
            UnknownAxisError: No such axis (a KeyError and a ValueError).
            TypeError: Not an array, or `by` is not an integer.
            ValueError: `axis` is None on a mesh of several axes, `out` cannot be written or shares memory with `x`, or
                the calling rank is outside the mesh. Nothing is sent.
            DistBackendError: A neighbour failed, or its array does not fit.
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
        group = self.get_group(self._one_axis("shift", axis))
        prefix, me, size = group.error_prefix("shift"), group.rank(), group.size()
        array = group.named(prefix, _sendable, x, "x")
        room: Any = None if out is None else group.named(prefix, taken, out, "out")
        places, wraps = group.named(prefix, _whole, by, "by"), bool(group.named(prefix, _truth, periodic, "periodic"))
        if room is not None:
            group.named(prefix, _check_room, room, out, array)
        before, after = (_neighbour(me, step, size, wraps) for step in (-places, places))
        if before is not None and room is None:
            room = new_empty(array.shape, array)
        if before == me:
            room[...] = array
        else:
            _exchange(group, "shift", [(room, before)], [(array, after)], tag, _ONE_SHAPE)
        result: Array | None = None if before is None else room if out is None else out
        return result

    @explaining
    def halo_exchange(
        self,
        block: Any,
        width: PerAxis[int] = 1,
        periodic: PerAxis[bool] = False,
        *,
        dims: PerAxis[int] | None = None,
        tag: int = 0,
    ) -> Any:
        """Fill the ghost cells of this rank's block with the neighbours' cells, in place, corners included.

        An array is divided into blocks along the axes of this mesh. Each rank's block has `width` ghost cells at both
        ends of each divided dimension; between them are the cells that the rank computes. The call copies the outermost
        of those into the ghost cells of the neighbours. The axes follow one after the other, and each passes on the
        ghost cells that the ones before have filled, so that a corner comes from the diagonal neighbour.

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
                are missing there are not exchanged. None: axis i divides dimension i. Other dimensions are whole.
            tag: The tag of the messages.

        Returns:
            `block`.

        Raises:
            UnknownAxisError: No such axis (a KeyError and a ValueError).
            TypeError: Not an array, or values that are not integers.
            ValueError: A width is negative or larger than the cells between the ghost cells; a dimension is missing or
                given twice; `block` cannot be written; or the calling rank is outside the mesh. Nothing is sent.
            DistBackendError: A neighbour failed, or its block has another shape.
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
        for axis, dim in places.items():
            if widths[axis]:
                agree = (
                    f"all ranks along {self._layout.axis_text(axis)} must call it with equal width and tag, and with"
                    f" blocks of one dtype that differ in dim {dim} alone, which this axis divides"
                )
                _exchange_edges(self.get_group(axis), array, dim, widths[axis], bool(wraps[axis]), tag, agree)
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
            raise ValueError(
                f"{prefix}: dim {dim} of block is {extent} long, of which {max(0, extent - 2 * width)} cells are not"
                f" ghost cells, and the neighbours along {self._layout.axis_text(axis)} need {width}; with width="
                f"{width}, ghost cells included, it must be at least {3 * width}"
            )


def _exchange_edges(
    group: ProcessGroup, array: Any, dim: int, width: int, periodic: bool, tag: int, agree: str
) -> None:
    """Exchange the boundaries along one axis; of the other dimensions, ghost cells are included."""
    me, size, extent = group.rank(), group.size(), array.shape[dim]

    def cells(begin: int) -> Any:
        return array[(slice(None),) * dim + (slice(begin, begin + width),)]

    low_ghost, low_edge = cells(0), cells(width)
    high_edge, high_ghost = cells(extent - 2 * width), cells(extent - width)
    below, above = (_neighbour(me, step, size, periodic) for step in (-1, 1))
    if below == me:
        low_ghost[...], high_ghost[...] = high_edge, low_edge
        return
    # Between two ranks of a periodic axis there are two messages each way. The first sent is that of the low edge, so
    # the first received is that of the high ghost cells.
    receives, sends = [(high_ghost, above), (low_ghost, below)], [(low_edge, below), (high_edge, above)]
    _exchange(group, "halo_exchange", receives, sends, tag, agree)


def _exchange(group: ProcessGroup, of: str, receives: _Messages, sends: _Messages, tag: int, agree: str) -> None:
    """Make the messages that have another side, and wait for them; for `agree`, see `PointToPoint.exchange`."""
    received, sent = ([(array, peer) for array, peer in side if peer is not None] for side in (receives, sends))
    if received or sent:
        group.messages.exchange(of, received, sent, tag, agree)


def _neighbour(me: int, step: int, size: int, periodic: bool) -> int | None:
    place = me + step
    if periodic:
        return place % size
    return place if 0 <= place < size else None


def _whole(value: Any, name: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


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
        if isinstance(array, np.ndarray) and np.may_share_memory(room, array):
            raise ValueError("out shares memory with x, and is written; pass another array")


def _named(prefix: str, function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{prefix}: {error}") from None
