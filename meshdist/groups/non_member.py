"""NonMember: stands for a group on a rank that is not in it."""

from __future__ import annotations

from typing import Any

from meshdist.collectives.methods import CollectiveMethods
from meshdist.runtime.call_site import warn_not_member


class SilentMessages:
    """Has the methods of `PointToPoint`, which do nothing but warn."""

    def peer(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        return -1

    def send(self, tensor: Any, dst: int, tag: int) -> None:
        warn_not_member("send")

    def recv(self, tensor: Any, src: int | None, tag: int) -> int:
        warn_not_member("recv")
        return -1

    def sendrecv(self, send: Any, recv: Any, dst: int, src: int | None, tags: tuple[int, int]) -> int:
        warn_not_member("sendrecv")
        return -1

    def probe(self, src: int | None, tag: int | None) -> None:
        warn_not_member("probe")

    def iprobe(self, src: int | None, tag: int | None) -> None:
        warn_not_member("iprobe")

    def isend(self, tensor: Any, dst: int, tag: int) -> None:
        warn_not_member("isend")

    def irecv(self, tensor: Any, src: int | None, tag: int) -> None:
        warn_not_member("irecv")


class NonMember(CollectiveMethods):
    """The result of `new_group` on a rank that is not in the group: calls on it do nothing but warn."""

    ranks: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"

    def __bool__(self) -> bool:
        """Return False, so that `if group:` runs on the members."""
        return False

    def __enter__(self) -> NonMember:
        """Return this object, so that a `with` block runs on all ranks."""
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: there is nothing to destroy."""

    @property
    def collective_group(self) -> Any:
        return self

    def rank(self) -> int:
        return -1

    def carries(self, device: str) -> bool:
        """Return True: calls that do nothing accept arrays on any device."""
        return True

    def reduces_apart(self, array: Any) -> bool:
        """Return False: nothing is written."""
        return False

    def size(self) -> int:
        return -1

    @property
    def messages(self) -> SilentMessages:
        return SilentMessages()

    def submit(self, collective: Any, *args: Any, **kwargs: Any) -> None:
        warn_not_member(collective.name)

    def root(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        return -1

    root_or_first = root

    def error_prefix(self, name: str) -> str:
        return name

    def named(self, error_prefix: str, function: Any, *args: Any) -> None:
        """Do nothing: the arguments of a call that does nothing are not checked."""

    def global_rank(self, place: int) -> int:
        """Return -1, as torch's recv does on a rank that is not in the group."""
        return -1
