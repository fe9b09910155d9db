"""probe and iprobe: what the next message is, before it is received."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from meshdist.arrays.plain_numbers import plain_number
from meshdist.collectives.send_recv import NamingSender, source_of
from meshdist.runtime.context import GroupLike, resolve
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from meshdist.runtime.interfaces import Group
    from meshdist.runtime.waiting import Found

P = ParamSpec("P")
R = TypeVar("R")


class MessageInfo(NamedTuple):
    """A message that `probe` or `iprobe` has found.

    Attributes:
        source: The sender's global rank; from a method, its rank in the group or along the mesh.
        tag: The message's tag.
        nbytes: The size of the message in bytes. For a list of objects it is the size of their pickle; a short pickle
            is padded.
        dtype: The dtype of the array that was sent. It is None for a list of objects, in a dry run, and for a dtype of
            ml_dtypes if this rank has not imported that package.
        num_objects: The length of a list of objects, as `send_object_list` sends it; None for an array.

    Example:
        >>> import numpy as np
        >>> from meshdist import MessageInfo
        >>> info = MessageInfo(source=0, tag=3, nbytes=16, dtype=np.dtype(np.float64))
        >>> np.empty(info.count(), info.dtype).shape, info.count(np.float32)
        ((2,), 4)
    """

    source: int
    tag: int
    nbytes: int
    dtype: np.dtype[Any] | None = None
    num_objects: int | None = None

    def __repr__(self) -> str:
        what = f"dtype={self.dtype!r}" if self.num_objects is None else counted(self.num_objects, "object")
        return f"MessageInfo(source={self.source}, tag={self.tag}, nbytes={self.nbytes}, {what})"

    def count(self, dtype: Any = None) -> int:
        """Return the number of elements, like MPI's Get_count; for a list of objects, the number of objects.

        Args:
            dtype: The dtype of the elements; that of the array that was sent if None.

        Raises:
            ValueError: The message is not a whole number of such elements, or is a list of objects, which has no
                elements; or `dtype` is None and the dtype of the message is not known.
        """
        if self.num_objects is not None:
            if dtype is not None:
                raise ValueError(
                    f"MessageInfo.count: a list of {counted(self.num_objects, 'object')} has no elements of"
                    f" {np.dtype(dtype)}; call count() without dtype"
                )
            return self.num_objects
        if dtype is None and self.dtype is None:
            raise ValueError("MessageInfo.count: the dtype of the message is not known; pass it")
        element = np.dtype(self.dtype if dtype is None else dtype)
        number, rest = divmod(self.nbytes, element.itemsize)
        if rest:
            sent = "" if self.dtype is None else f"; it was sent as {self.dtype}"
            raise ValueError(
                f"MessageInfo.count: a message of {counted(self.nbytes, 'byte')} is not a whole number of elements of"
                f" {element} ({counted(element.itemsize, 'byte')} each){sent}"
            )
        return number


for _name, _what in {
    "source": "The sender's global rank; from a method, its rank in the group or along the mesh.",
    "tag": "The message's tag.",
    "nbytes": "Its size in bytes.",
    "dtype": "The dtype of the array that was sent; None if it is not known.",
    "num_objects": "The length of a list of objects; None for an array.",
}.items():
    vars(MessageInfo)[_name].__doc__ = _what  # help() would call it a field with a number


class _Probe(NamingSender[P, R]):
    @staticmethod
    def in_world(found: MessageInfo | None, group: Group) -> MessageInfo | None:
        return None if found is None else found._replace(source=group.global_rank(found.source))


_Probe.__name__ = "function"  # what help() calls it


@_Probe
def probe(
    src: int | None = None, group: GroupLike = None, tag: int | None = 0, group_src: int | None = None
) -> MessageInfo:
    """Wait for a message and return its sender, tag, size and dtype, without receiving it.

    A `recv` from this sender with this tag then receives it, unless another thread of this rank receives it first.

    Args:
        src: Global rank of the sender; as a method, its rank in the group or along the mesh. None looks for the first
            message from any rank.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        tag: The tag it was sent with; None looks for any.
        group_src: The sender's rank in the group, instead of `src`; -1 is any.

    Returns:
        A MessageInfo: `source`, `tag`, `nbytes` and `dtype`. In a dry run, every message has arrived and has 0 bytes.
        For a list of objects, `num_objects` is its length; otherwise it is None.

    Raises:
        TypeError: A rank or the tag is not an integer.
        ValueError: Both `src` and `group_src` are given, the sender is not a member of the group, `tag` is negative, or
            the sender is this rank and has sent itself no such message.
        DistBackendError: The sender failed; or the backend, such as nccl, does not support probing.
        DistTimeoutError: No message arrived within the group's timeout.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     if dist.get_rank() == 0:
        ...         dist.send(np.arange(5.0), dst=1)
        ...     else:
        ...         info = dist.probe()
        ...         x = np.empty(info.count(), info.dtype)
        ...         dist.recv(x, src=info.source)
        ...         return info.source, x.tolist()
        >>> dist.run(main, 2)[1]
        (0, [0.0, 1.0, 2.0, 3.0, 4.0])
    """
    members = resolve(group)
    found: Any = members.messages.probe(source_of(members, "probe", src, group_src), plain_number(tag))
    return _info(found)  # type: ignore[return-value]


@_Probe
def iprobe(
    src: int | None = None, group: GroupLike = None, tag: int | None = 0, group_src: int | None = None
) -> MessageInfo | None:
    """Return a MessageInfo of a message that has arrived, without receiving it; None if none has arrived.

    Args:
        src: As in `probe`.
        group: As in `probe`.
        tag: As in `probe`.
        group_src: As in `probe`.

    Returns:
        A MessageInfo, or None.

    Raises:
        TypeError: As for `probe`.
        ValueError: Both `src` and `group_src` are given, the sender is not a member of the group, or `tag` is negative.
        DistBackendError: As for `probe`.
    """
    members = resolve(group)
    return _info(members.messages.iprobe(source_of(members, "iprobe", src, group_src), plain_number(tag)))


def _info(found: Found | None) -> MessageInfo | None:
    return None if found is None else MessageInfo(*found)
