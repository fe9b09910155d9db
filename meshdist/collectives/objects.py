"""Collectives of objects: the sizes of the pickles first, then their bytes. Messages are in `object_messages`.

Unpickling runs code chosen by the sender. Only ranks that proved knowledge of the job's secret can send objects.
Pickles are arrays on the CPU; if the group's only backend is for GPUs, they are copied there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays.host import Array
from meshdist.collectives.all_gather import all_gather
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.all_to_all import all_to_all
from meshdist.collectives.broadcast import broadcast
from meshdist.collectives.definition import GroupFunction
from meshdist.collectives.gather import gather
from meshdist.collectives.scatter import scatter
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.context import GroupLike, resolve
from meshdist.runtime.object_messages import cause_in_the_object, pickle_of, unpickle
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective
    from meshdist.runtime.interfaces import Group


def _agreed_sizes(call: Call) -> tuple[Any, ...]:
    return (counted(_count(call.recv if call.root is not None else call.send), "object"),)


def _agreed_bytes(call: Call) -> tuple[Any, ...]:
    return ("the bytes of objects",)


def _count(buffers: Buffers) -> int:
    return buffers.size if isinstance(buffers, np.ndarray) else 1


_broadcast_sizes = broadcast.under("broadcast_object_list", _agreed_sizes, is_size_exchange=True)
_broadcast_bytes = broadcast.under("broadcast_object_list", _agreed_bytes)
_all_gather_sizes = all_gather_into_tensor.under("all_gather_object", _agreed_bytes, is_size_exchange=True)
_all_gather_bytes = all_gather.under("all_gather_object", _agreed_bytes)
_gather_sizes = gather.under("gather_object", _agreed_bytes, is_size_exchange=True)
_gather_bytes = all_to_all.under("gather_object", _agreed_bytes)
_scatter_sizes = scatter.under("scatter_object_list", _agreed_bytes, is_size_exchange=True)
_scatter_bytes = all_to_all.under("scatter_object_list", _agreed_bytes)


def pickled(of: str, objects: Sequence[Any]) -> list[Array]:
    return [np.frombuffer(_bytes_of(of, item), np.uint8) for item in objects]


def _bytes_of(of: str, item: Any) -> bytes:
    try:
        return pickle_of(item)
    except MemoryError as error:
        raise MemoryError(f"{of}: no memory is left to pickle an object of type {type(item).__name__}") from error
    except Exception as error:  # the object's own code may raise anything
        raise TypeError(
            f"{of}: an object of type {type(item).__name__} cannot be pickled: {error}; pass data, or functions and"
            " classes that are defined at the top level of a module"
        ) from cause_in_the_object(error)


def sizes_of(pickles: Sequence[Array]) -> Array:
    return np.array([data.size for data in pickles], np.int64)


def unpickled(of: str, pickles: Sequence[Array]) -> list[Any]:
    # No pickle is empty; in a dry run nothing is received.
    return [unpickle(data, of) if data.size else None for data in pickles]


def cut(data: Array, sizes: Array) -> list[Array]:
    parts: list[Array] = np.split(data, np.cumsum(sizes)[:-1])
    return parts


def as_list(of: str, name: str, value: Any, length: int | None = None, hint: str = "") -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{of}: {name} must be a list, got {type(value).__name__}{hint}")
    if length is not None and len(value) != length:
        raise ValueError(f"{of}: {name} must hold {counted(length, 'object')}, one for each rank, got {len(value)}")
    return value


def empty_blocks(size: int) -> list[Array]:
    return [np.empty(0, np.uint8) for _ in range(size)]


@GroupFunction
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: Any = None,
    group_src: int | None = None,
) -> list[Any]:
    """Copy the objects of one rank's list into the lists of all others.

    Args:
        object_list: All ranks must pass the same number of objects. On the source any that can be pickled; elsewhere
            they are replaced.
        src: Global rank of the source; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        device: Ignored: objects travel as arrays on the CPU.
        group_src: The source's rank in the group, instead of `src`. Without either it is the group's first rank.

    Returns:
        `object_list`.

    Raises:
        TypeError: `object_list` is not a list, or an object cannot be pickled; nothing is sent.
        DistBackendError: A rank failed, or the ranks' calls or the lengths of their lists disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members = resolve(group)
    root = members.root_or_first("broadcast_object_list", "src", src, group_src)
    hint = "; put it into a list, objects = [...], whose elements the call replaces on the other ranks"
    objects = as_list(members.error_prefix("broadcast_object_list"), "object_list", object_list, hint=hint)
    is_root = members.rank() == root
    pickles = pickled(members.error_prefix("broadcast_object_list"), objects) if is_root else []
    sizes = sizes_of(pickles) if is_root else np.zeros(len(objects), np.int64)
    if submit(members, _broadcast_sizes, sizes, sizes, None, root) is None:
        return None  # type: ignore[return-value]
    data = np.concatenate([*empty_blocks(1), *pickles]) if is_root else np.empty(int(sizes.sum()), np.uint8)
    submit(members, _broadcast_bytes, data, data, None, root)
    # Without objects, or in a dry run, nothing is received: the list stays unchanged.
    if data.size and not is_root:
        objects[:] = unpickled(members.error_prefix("broadcast_object_list"), cut(data, sizes))
    return objects


@GroupFunction
def all_gather_object(object_list: list[Any], obj: Any, group: GroupLike = None) -> list[Any]:
    """Gather every rank's object into a list on all ranks.

    Args:
        object_list: Output: a list as long as the group has ranks.
        obj: Input: any object that can be pickled.
        group: A ProcessGroup or a DeviceMesh; the world if None.

    Returns:
        `object_list`.

    Raises:
        TypeError: `object_list` is not a list, or `obj` cannot be pickled; nothing is sent.
        ValueError: `object_list` has the wrong length.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members = resolve(group)
    size = members.size() if members.rank() >= 0 else None
    error_prefix = members.error_prefix("all_gather_object")
    hint = "; did you swap object_list and obj?" if isinstance(obj, list) else ""
    objects = as_list(error_prefix, "object_list", object_list, size, hint)
    (data,) = pickled(error_prefix, [obj])
    sizes = np.empty(len(objects), np.int64)
    if submit(members, _all_gather_sizes, sizes_of([data]), sizes) is None:
        return None  # type: ignore[return-value]
    blocks = [np.empty(count, np.uint8) for count in sizes.tolist()]
    submit(members, _all_gather_bytes, data, blocks)
    objects[:] = unpickled(error_prefix, blocks)
    return objects


@GroupFunction
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    group_dst: int | None = None,
) -> list[Any] | None:
    """Gather every rank's object into a list on one rank.

    Args:
        obj: Input: any object that can be pickled.
        object_gather_list: Output. On the destination: a list as long as the group has ranks. Elsewhere None.
        dst: Global rank of the destination; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        group_dst: The destination's rank in the group, instead of `dst`. Without either it is the group's first rank.

    Returns:
        `object_gather_list`, which is None except on the destination.

    Raises:
        TypeError: `object_gather_list` is not a list on the destination, or `obj` cannot be pickled; nothing is sent.
        ValueError: `object_gather_list` has the wrong length, or is given on a rank that is not the destination.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members, of = resolve(group), "gather_object"
    rank, size = members.rank(), members.size()
    root = members.root_or_first(of, "dst", dst, group_dst)
    if rank < 0:
        submit(members, _gather_sizes, None, None)
        return None
    objects = _list_of_root(members.error_prefix(of), "object_gather_list", object_gather_list, size, rank, root)
    (data,) = pickled(members.error_prefix(of), [obj])
    counts = [np.empty(1, np.int64) for _ in objects]
    submit(members, _gather_sizes, sizes_of([data]), counts or None, None, root)
    give, take = empty_blocks(size), [np.empty(int(count[0]), np.uint8) for count in counts] or empty_blocks(size)
    give[root] = data
    submit(members, _gather_bytes, give, take)
    objects[:] = unpickled(members.error_prefix(of), take[: len(objects)])
    return object_gather_list


@GroupFunction
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    group_src: int | None = None,
) -> list[Any]:
    """Scatter the list of one rank: each rank gets the object at its index.

    Args:
        scatter_object_output_list: Output: a list of at least one element; its first becomes the object.
        scatter_object_input_list: Input. On the source: a picklable object for each rank. Elsewhere ignored; usually
            None.
        src: Global rank of the source; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        group_src: The source's rank in the group, instead of `src`. Without either it is the group's first rank.

    Returns:
        `scatter_object_output_list`.

    Raises:
        TypeError: An argument is not a list, or an object cannot be pickled; nothing is sent.
        ValueError: The output is empty, or the input of wrong length.
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not call within the group's timeout.
    """
    members, of = resolve(group), "scatter_object_list"
    rank, size = members.rank(), members.size()
    root = members.root_or_first(of, "src", src, group_src)
    if rank < 0:
        submit(members, _scatter_sizes, None, None)
        return None  # type: ignore[return-value]
    output = as_list(members.error_prefix(of), "scatter_object_output_list", scatter_object_output_list)
    if not output:
        raise ValueError(
            f"{members.error_prefix(of)}: scatter_object_output_list must hold at least one element, got an empty list"
        )
    inputs = (
        as_list(members.error_prefix(of), "scatter_object_input_list", scatter_object_input_list, size)
        if rank == root
        else []
    )
    output[0] = scattered_object(members, inputs, root, _scatter_sizes, _scatter_bytes)
    return output


def scattered_object(
    members: Group, inputs: list[Any], root: int, of_sizes: Collective[..., Any], of_bytes: Collective[..., Any]
) -> Any:
    """Return this rank's object of the list `inputs` of the rank `root`; None if nothing comes, in a dry run."""
    error_prefix, count = members.error_prefix(of_sizes.name), np.empty(1, np.int64)
    pickles = pickled(error_prefix, inputs)
    submit(members, of_sizes, [sizes_of([data]) for data in pickles] or None, count, None, root)
    take = empty_blocks(members.size())
    take[root] = np.empty(int(count[0]), np.uint8)
    submit(members, of_bytes, pickles or empty_blocks(members.size()), take)
    return unpickled(error_prefix, [take[root]])[0]


def _list_of_root(of: str, name: str, value: Any, size: int, rank: int, root: int) -> list[Any]:
    if rank == root:
        return as_list(of, name, value, size)
    if not (value is None or (isinstance(value, list) and not value)):
        raise ValueError(
            f"{of}: {name} is for the destination, rank {root} of the group, and this is rank {rank}; pass None"
        )
    return []


def submit(
    members: Group,
    collective: Collective[..., Any],
    send: Any,
    recv: Any,
    op: None = None,
    root: int | None = None,
) -> Any:
    if members.carries("cpu"):
        return members.submit(collective, send, recv, op, root)
    given = on_gpu(members, send)
    taken = given if recv is send else on_gpu(members, recv)
    members.submit(collective, given, taken, op, root)
    bring_back(taken, recv)
    return recv


def on_gpu(members: Group, buffers: Buffers) -> Any:
    from meshdist.arrays.device import cupy_module

    cupy, calls = cupy_module(), members.device_calls("objects")
    with cupy.cuda.Device(None if calls is None else calls.device):
        if isinstance(buffers, list):
            return [cupy.asarray(array) for array in buffers]
        return None if buffers is None else cupy.asarray(buffers)


def bring_back(taken: Any, buffers: Buffers) -> None:
    pairs = zip(taken, buffers, strict=True) if isinstance(buffers, list) else [(taken, buffers)]
    for there, here in pairs:
        if here is not None and here.size and here.flags.writeable:
            here[...] = there.get()
