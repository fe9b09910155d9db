"""Agreement: check that all ranks made the same mesh, with one store request per rank.

Each rank numbers the meshes it makes in a universe, which is the world or a group. For its n-th mesh a rank calls
`compare_set` on the store: the first rank writes a description of its mesh, and every later rank gets that description
and compares it with its own. That takes one round trip and no waiting.

A rank that finds a difference writes a note to the store and raises. The other ranks read the note in their next call
on a group of the mesh: before the call and, in the first call of the group, while they wait. A rank whose arguments
were refused writes the refusal in place of a mesh. Once a group has completed a call, it is not checked again: a rank
that left is then reported as missing.

A universe of one rank needs no check. In a dry run the store is local.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from meshdist.errors import DistBackendError, DistError
from meshdist.groups.world import current_world
from meshdist.mesh.layout.layout import Layout
from meshdist.runtime.context import is_initialized
from meshdist.runtime.rank_text import ranks_text

if TYPE_CHECKING:
    from meshdist.groups.process_group import ProcessGroup
    from meshdist.groups.world import World
    from meshdist.store import Store

_REFUSED = "refused"
_REFUSALS = (ValueError, TypeError, DistBackendError)


class Agreement:
    """The description of one mesh in the world's store, under `key`."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key

    def broken(self) -> str | None:
        """Return how the meshes of the ranks differ; None if no rank has found a difference."""
        note = f"{self._key}/differs"
        return self._store.get(note).decode() if self._store.check([note]) else None

    def compare(self, rank: int, digest: str, text: str) -> str | None:
        """Write the mesh of `rank`, or compare it with the first one; return the difference, or None."""
        theirs, _, rest = self._store.compare_set(self._key, "", f"{digest} {rank} {text}").decode().partition(" ")
        if theirs == digest:
            return None
        other, _, made = rest.partition(" ")
        if made == text:  # the difference is in ranks that the text abbreviates
            made, text = f"{made} [{theirs[:8]}]", f"{text} [{digest[:8]}]"
        difference = (
            f"the ranks' meshes differ: global rank {other} {made}, global rank {rank} {text}; every rank must create"
            " the same meshes in the same order, even the ranks outside them; pass group= for a mesh that only some"
            " ranks create"
        )
        self._store.compare_set(f"{self._key}/differs", "", difference)  # keeps the first note
        return difference


def agree(
    world: World, universe: str, num_ranks: int, device_type: str, layout: Layout, backends: Sequence[str | None]
) -> Agreement | None:
    """Compare this rank's next mesh of a universe with the meshes of the other ranks.

    `universe` is the name of the universe, unique and equal on all its `num_ranks` ranks. Return the precondition of
    the groups of the mesh; None in a universe of one rank.
    """
    agreement = _next(world, universe, num_ranks)
    if agreement is None:
        return None
    from hashlib import sha256  # loaded since this rank has joined

    digest = sha256(repr((device_type, layout.names, layout.shape, tuple(backends))).encode())
    digest.update(layout.ranks.tobytes())
    given = f", backends {', '.join(map(str, backends))}" if any(backends) else ""
    text = f"created DeviceMesh({device_type!r}, {layout.describe()}, {ranks_text(layout.ranks.reshape(-1))}{given})"
    difference = agreement.compare(world.rank, digest.hexdigest(), text)
    if difference is not None:
        raise ValueError(f"DeviceMesh: {difference}")
    return agreement


@contextmanager
def refusals_reported(universe: ProcessGroup | None) -> Iterator[None]:
    """Report to the other ranks of `universe` (the world if None) if the block refuses a mesh."""
    try:
        yield
    except _REFUSALS as error:
        if is_initialized():
            group = universe or current_world().default_group
            _report_refusal(group.name, group.size(), error)
        raise


@contextmanager
def refusals_reported_in(universe: str, num_ranks: int) -> Iterator[None]:
    """As `refusals_reported`, for a universe of `num_ranks` ranks given by its name."""
    try:
        yield
    except _REFUSALS as error:
        _report_refusal(universe, num_ranks, error)
        raise


def _report_refusal(universe: str, num_ranks: int, error: Exception) -> None:
    world = current_world()
    with suppress(DistError):  # the caller must see the refusal, not a second failure of the store
        agreement = _next(world, universe, num_ranks)
        if agreement is not None:
            agreement.compare(world.rank, _REFUSED, f"raised an error for its mesh ({error})")


def _next(world: World, universe: str, num_ranks: int) -> Agreement | None:
    if num_ranks == 1:
        return None
    return Agreement(world.store, f"mesh/{universe}/{world.next_mesh(universe)}")
