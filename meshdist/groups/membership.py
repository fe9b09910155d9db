"""The ranks of a group, by their place in the group and in the world, the names of groups, and what they need of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from meshdist import core
from meshdist.arrays.host import describe_value
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.departure import Departure
from meshdist.runtime.flight_recorder import FlightRecorder
from meshdist.runtime.log import RankLog
from meshdist.runtime.progress import Progress
from meshdist.runtime.rank_text import numbers_differ

if TYPE_CHECKING:
    from meshdist.backends.base import Backend

_T = TypeVar("_T")

# The functions in which the source may be left out.
_FROM_ANY = (
    *("recv", "irecv", "sendrecv", "probe", "iprobe"),
    *("recv_object", "recv_object_list", "irecv_object_list", "sendrecv_object"),
)


class GroupHome(Protocol):
    """What a group needs of its world."""

    rank: int
    progress: Progress
    recorder: FlightRecorder
    log: RankLog

    def make_backend(self, group: Any, backend: str) -> Backend: ...
    def hosts(self, ranks: Sequence[int]) -> list[str]: ...

    def announce_departure(self, group: Any, departure: Departure) -> None:
        """Leave a record for ranks that wait for this one in the first call of `group`."""

    def note_fault(self, cause: DistError) -> None:
        """Write down the state of this rank after a failed call, if that is enabled."""

    def note_interrupt(self) -> None:
        """Ctrl-C is about to end a call of this rank: say what it was doing, if nobody else does."""

    def end_block(self, group: Any, error: BaseException | None) -> None:
        """Destroy `group` at the end of its `with` block, which ended with `error`."""


@core.compare_by_identity
class Membership:
    """The ranks of a group, in its order, of which `rank` is the caller's.

    The `name` is the same on all ranks; the `label` is the group's name in errors and logs.
    """

    def __init__(self, ranks: tuple[int, ...], name: str, label: str, rank: int) -> None:
        self.ranks = ranks
        self.name = self.group_name = name
        self.label = label
        self._rank = place_of(rank, ranks)
        self._error_prefixes: dict[str, str] = {}

    @cached_property
    def _places(self) -> dict[int, int]:
        # Made at first use: most groups of a mesh of 100,000 ranks never need it.
        return {rank: place for place, rank in enumerate(self.ranks)}

    @property
    def group_desc(self) -> str:
        """The group's name in errors and logs, under torch's name."""
        return self.label

    def rank(self) -> int:
        """Return this process's rank in the group; -1 if it is not a member."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def root(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        """Return the root of a call as a rank of the group.

        Args:
            of: The function that is called, for messages.
            name: The parameter that `rank` is, `src` or `dst`; `group_rank` is `group_<name>`.
            rank: A global rank, or None.
            group_rank: A rank of the group, or None.

        Raises:
            TypeError: It is not an integer.
            ValueError: Both or none are given, or it is not a member.
        """
        if type(rank) is int and group_rank is None and rank in self._places:
            return self._places[rank]
        if (rank is None) == (group_rank is None):
            from meshdist.system.name_hints import is_method_call  # only needed here

            given = "" if rank is None else ", not both"
            what = f"{name} (a global rank) or group_{name} (a rank in the group){given}"
            if is_method_call():
                what = f"{name}, a rank in the group, 0 to {len(self.ranks) - 1}"
            raise ValueError(f"{self.error_prefix(of)}: pass {what}")
        try:
            place = self._places.get(index(rank)) if group_rank is None else index(group_rank)  # type: ignore[arg-type]
        except TypeError:
            from meshdist.system.name_hints import hint_at_swap  # only needed here

            peer = rank if group_rank is None else group_rank
            raise TypeError(
                f"{self.error_prefix(of)}: {name} must be an integer, got"
                f" {describe_value(peer)}{hint_at_swap(name, peer)}"
            ) from None
        if place is None:
            hint = "; leave src out to receive from any rank" if name == "src" and of in _FROM_ANY else ""
            if not hint and rank in range(len(self.ranks)):
                hint = f"; for a rank in the group, pass group_{name}={rank}"
            raise ValueError(
                f"{self.error_prefix(of)}: {name} must be a rank in the group, one of {listed(self.ranks)}; got"
                f" {rank}{hint}"
            )
        if not 0 <= place < len(self.ranks):
            highest = len(self.ranks) - 1
            allowed = f"a rank in the group, 0 to {highest}" if highest else "0, the only rank in the group"
            raise ValueError(f"{self.error_prefix(of)}: {name} must be {allowed}, got {place}")
        return place

    def root_or_first(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        """Return `root(...)`; the first rank of the group if no rank is given."""
        return 0 if rank is None and group_rank is None else self.root(of, name, rank, group_rank)

    def global_rank(self, place: int) -> int:
        """Return the global rank of a place in the group."""
        return self.ranks[place]

    def relabel(self, label: str) -> None:
        """Change the group's name in errors and logs."""
        self.label, self._error_prefixes = label, {}

    def error_prefix(self, name: str) -> str:
        """Return the beginning of messages about a call of `name`."""
        error_prefix = self._error_prefixes.get(name)
        if error_prefix is None:
            error_prefix = self._error_prefixes[name] = self._error_prefix(name)
        return error_prefix

    def named(self, error_prefix: str, function: Callable[..., _T], *args: Any) -> _T:
        """Return `function(*args)`; put `error_prefix` before the message of what it raises."""
        try:
            return function(*args)
        except DistBackendError as error:
            raise DistBackendError(str(error), error_prefix=error_prefix) from error.__cause__
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error_prefix}: {error}") from error.__cause__

    def _error_prefix(self, name: str) -> str:
        place = f"rank {self._rank} of {len(self.ranks)}"
        if self._rank >= 0 and numbers_differ(self.ranks):
            place += f", global rank {self.ranks[self._rank]}"
        return f"{name} on group {self.label!r} ({place})"


_NAMED_MEMBERS = 8
_LISTED_MEMBERS = 64


class GroupNames:
    """Gives every group of a world a name that its ranks agree on without communication.

    A name has the members and the number of groups that the same members have made before. So it does not depend on the
    other groups that a rank has made.
    """

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()

    def next(self, ranks: tuple[int, ...], kind: str) -> str:
        """Return the name of the next group of these global ranks, in this order; each kind has its own count."""
        name = f"{_members(ranks)}{kind}"
        self._made[name] += 1
        return f"{name}{self._made[name]}"


def _members(ranks: tuple[int, ...]) -> str:
    members = ",".join(map(str, ranks))
    if len(ranks) <= _NAMED_MEMBERS:
        return f"ranks {members}"
    from hashlib import sha256  # loaded since this rank has joined

    return f"{len(ranks)} ranks {sha256(members.encode()).hexdigest()[:16]}"


def listed(ranks: tuple[int, ...]) -> str:
    """Return the ranks as the text of a list, shortened in the middle if there are very many."""
    if len(ranks) <= _LISTED_MEMBERS:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]}] ({len(ranks)} ranks)"


def place_of(rank: int, ranks: tuple[int, ...]) -> int:
    """Return the place of a global rank in a group of `ranks`; -1 if it is not a member."""
    if rank < len(ranks) and ranks[rank] == rank:  # fast for the group of all ranks
        return rank
    try:
        return ranks.index(rank)
    except ValueError:
        return -1
