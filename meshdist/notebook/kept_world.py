"""Whether the workers can go on in their world after a cell that has failed.

They can if all ranks failed at the same line, or none did, and have made the same calls. Then no rank has made a call,
a group or a mesh that another lacks, and nothing is in progress.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from meshdist.groups.world import World

NOT_FAILED = "", 0


class RankState(NamedTuple):
    """What one rank has done when it ends a cell."""

    failed_at: tuple[str, int] = NOT_FAILED  # the type of the exception that ended the cell, and its line in the cell
    # The ranks of each group by its name, and how many collectives this rank has called on it.
    calls: dict[str, tuple[tuple[int, ...], int]] | None = None  # None if its world is not known to be at rest

    @property
    def has_failed(self) -> bool:
        return self.failed_at != NOT_FAILED


def place_of(error: BaseException, cell_name: str) -> tuple[str, int]:
    """Return the type of an exception, and the last line of the cell in its traceback."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == cell_name]
    return type(error).__qualname__, lines[-1] if lines else 0


def num_messages(world: World | None) -> int:
    """Return how many messages this rank has sent and received in all groups that there are."""
    return 0 if world is None else sum(group.messages.num_messages for group in world.groups)


def calls_at_rest(world: World | None, num_messages_before: int) -> dict[str, tuple[tuple[int, ...], int]] | None:
    """Return the calls of this rank; None if one has failed or is in progress, or the cell has sent messages.

    Whether a message was received is not known here.
    """
    if world is None or world.progress.pending or num_messages(world) != num_messages_before:
        return None
    if any(group.is_broken or group.outstanding for group in world.groups):
        return None
    return {group.name: (group.ranks, group.num_calls) for group in world.groups}


def failed_alike(states: Mapping[int, RankState]) -> bool:
    """Return whether the ranks that have ended the cell so far have ended it at the same line, or completed it."""
    return len({state.failed_at for state in states.values()}) <= 1 and all(
        state.calls is not None for state in states.values()
    )


def can_go_on(states: Mapping[int, RankState]) -> bool:
    """Return whether all ranks, by number, can go on in their world."""
    if not failed_alike(states):
        return False
    calls = {rank: state.calls or {} for rank, state in states.items()}
    return all(
        calls[member].get(name, (ranks, 0))[1] == count  # a group may not have been made yet where it has no calls
        for made in calls.values()
        for name, (ranks, count) in made.items()
        for member in ranks
    )
