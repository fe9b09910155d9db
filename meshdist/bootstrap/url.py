"""The URL of an init method: its parts and its query."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple

from meshdist.system.env_flags import to_int

if TYPE_CHECKING:
    from urllib.parse import SplitResult

NOT_GIVEN = -1
"""Rank or world size that is left to the URL, the environment or the other ranks."""

_KEYS = ("rank", "world_size", "group_name")
_EXAMPLES = {"rank": "rank=0", "world_size": "world_size=2"}


class InitUrl(NamedTuple):
    """A parsed URL; `rank` and `world_size` may be NOT_GIVEN, `group_name` is empty if there is one job only."""

    text: str
    parts: SplitResult
    rank: int
    world_size: int
    group_name: str

    def host_and_port(self) -> tuple[str, int]:
        """Return the host, without the brackets of an IPv6 address, and the port, or raise ValueError."""
        wanted = "write tcp://host:port, an IPv6 address in brackets"
        try:
            host, port = self.parts.hostname, self.parts.port
        except ValueError as error:
            raise ValueError(f"{self.text}: {error}; {wanted}") from error
        if not host or port is None or self.parts.path not in ("", "/"):
            raise ValueError(f"{self.text}: {wanted}")
        return host, port

    def require(self, *, rank: bool = True) -> None:
        """Raise ValueError unless the world size and, if `rank`, the rank are given and possible."""
        needed = [("rank", self.rank)] * rank + [("world_size", self.world_size)]
        missing = [name for name, value in needed if value == NOT_GIVEN]
        if missing:
            hint = "&".join(_EXAMPLES[name] for name in missing)
            raise ValueError(f"{self.text}: {' and '.join(missing)} missing; pass it as an argument or as ?{hint}")
        check_ranks(self.text, self.rank if rank or self.rank != NOT_GIVEN else 0, self.world_size)


def parse_init_url(text: str, rank: int, world_size: int) -> InitUrl:
    """Parse `text`; `rank` and `world_size` are the arguments, NOT_GIVEN if the query may give them.

    Raises:
        ValueError: The query has an unknown key, not a number, or repeats an argument.
    """
    from urllib.parse import parse_qsl, urlsplit  # not needed to import meshdist

    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error
    numbers, group_name = {"rank": rank, "world_size": world_size}, ""
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _KEYS:
            raise ValueError(f"{text}: the query may have {', '.join(_KEYS[:-1])} and {_KEYS[-1]}, got {name!r}")
        if name == "group_name":
            if group_name not in ("", value):
                raise ValueError(f"{text}: group_name is given twice ({group_name!r} and {value!r}); pass it once")
            group_name = value
            continue
        if numbers[name] != NOT_GIVEN:
            raise ValueError(f"{text}: {name} is given twice ({numbers[name]} and {value}); pass it once")
        numbers[name] = to_int(value, f"{text}: {name}")
        if numbers[name] < 0:
            raise ValueError(f"{text}: {name} must not be negative, got {value}")
    return InitUrl(text, parts, numbers["rank"], numbers["world_size"], group_name)


def with_group_name(text: str, group_name: str) -> str:
    """Return the URL `text` with `group_name`, unless empty, in its query."""
    if not group_name:
        return text
    from urllib.parse import quote

    return f"{text}{'&' if '?' in text else '?'}group_name={quote(group_name, safe='')}"


class ImpossibleRankError(ValueError):
    """Report a rank that the world does not have."""


def check_ranks(where: str, rank: int, world_size: int) -> None:
    """Raise ImpossibleRankError if no world of `world_size` ranks has `rank`, ValueError if there is no such world."""
    if world_size < 1:
        raise ValueError(f"{where}: world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ImpossibleRankError(f"{where}: rank must be between 0 and world_size - 1 = {world_size - 1}, got {rank}")


def whole_number(value: int, name: str) -> int:
    """Return the argument `value`, of any integer type, as an int; raise TypeError for other types."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got the bool {value}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}") from None
