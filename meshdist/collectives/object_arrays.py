"""The arrays of pickled objects, on groups that carry arrays on the CPU and on those that carry others alone.

Objects are made on the CPU. Where the group's only backend is one for GPUs, their bytes go there and come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshdist.arrays import Array
from meshdist.call import Buffers

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective
    from meshdist.process_group import ProcessGroup


def submit(
    members: ProcessGroup,
    collective: Collective[..., Any],
    send: Any,
    recv: Any,
    op: None = None,
    root: int | None = None,
) -> Any:
    """Carry out one call of `collective` on arrays on the CPU, whatever the group carries; see ProcessGroup.submit."""
    if members.carries("cpu"):
        return members.submit(collective, send, recv, op, root)
    given = _on_gpu(members, send)
    taken = given if recv is send else _on_gpu(members, recv)
    members.submit(collective, given, taken, op, root)
    _bring_back(taken, recv)
    return recv


def send_array(members: ProcessGroup, array: Array, dst: int, of: str, *, is_prelude: bool = False) -> None:
    """Send an array on the CPU, as a part of the function `of`."""
    tensor = array if members.carries("cpu") else _on_gpu(members, array)
    members.messages.send(tensor, dst, 0, of, is_prelude=is_prelude)


def receive_array(members: ProcessGroup, array: Array, src: int | None, of: str, *, is_prelude: bool = False) -> int:
    """Receive an array on the CPU, as a part of the function `of`; return the sender."""
    if members.carries("cpu"):
        return members.messages.recv(array, src, 0, of, is_prelude=is_prelude)
    taken = _on_gpu(members, array)
    source = members.messages.recv(taken, src, 0, of, is_prelude=is_prelude)
    _bring_back(taken, array)
    return source


def _on_gpu(members: ProcessGroup, buffers: Buffers) -> Any:
    from meshdist.cupy_arrays import cupy_module

    cupy, calls = cupy_module(), members.device_calls("objects")
    with cupy.cuda.Device(None if calls is None else calls.device):
        if isinstance(buffers, list):
            return [cupy.asarray(array) for array in buffers]
        return None if buffers is None else cupy.asarray(buffers)


def _bring_back(taken: Any, buffers: Buffers) -> None:
    pairs = zip(taken, buffers, strict=True) if isinstance(buffers, list) else [(taken, buffers)]
    for there, here in pairs:
        if here is not None and here.size and here.flags.writeable:
            here[...] = there.get()
