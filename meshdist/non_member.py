"""What stands for a group on a rank that is not in it."""

from __future__ import annotations

from typing import Any

from meshdist.call import warn_not_member
from meshdist.collectives.methods import CollectiveMethods


class SilentMessages:
    """Takes the calls of `Messages`, and does nothing but warn."""

    def peer(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        """Return -1: who the members are is not known here."""
        return -1

    def send(self, tensor: Any, dst: int, tag: int) -> None:
        """Do nothing but warn."""
        warn_not_member("send")

    def recv(self, tensor: Any, src: int | None, tag: int) -> int:
        """Do nothing but warn."""
        warn_not_member("recv")
        return -1

    def isend(self, tensor: Any, dst: int, tag: int) -> None:
        """Do nothing but warn."""
        warn_not_member("isend")

    def irecv(self, tensor: Any, src: int | None, tag: int) -> None:
        """Do nothing but warn."""
        warn_not_member("irecv")


class NonMember(CollectiveMethods):
    """What `new_group` returns on a rank that is not in the group: calls on it do nothing but warn.

    Example:
        >>> NonMember().rank()
        -1
    """

    ranks: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"

    def __enter__(self) -> NonMember:
        """Return this object, so that a block with a group runs on all ranks alike."""
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: there is nothing to destroy."""

    @property
    def collective_group(self) -> Any:
        """This object: it takes calls as a group does."""
        return self

    def rank(self) -> int:
        """Return -1: this rank is no member."""
        return -1

    def carries(self, device: str) -> bool:
        """Return True: what calls do nothing with may be anywhere."""
        return True

    def size(self) -> int:
        """Return -1: the size is known to the members."""
        return -1

    @property
    def messages(self) -> SilentMessages:
        """Takes sends and receipts as a group's does."""
        return SilentMessages()

    def submit(self, collective: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing but warn."""
        warn_not_member(collective.name)

    def root(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        """Return -1: who the members are is not known here."""
        return -1

    root_or_first = root

    def where(self, name: str) -> str:
        """Return how messages about a call of `name` begin."""
        return name

    def named(self, where: str, function: Any, *args: Any) -> None:
        """Do nothing: the arguments of a call that does nothing need not be right."""

    def global_rank(self, place: int) -> int:
        """Return -1, as torch's recv does on a rank that is not in the group."""
        return -1
