"""Agreement: whether all ranks made the same mesh, found out in the store with one request of each rank.

The meshes of a universe, which is the world or a group, are numbered as each of its ranks makes them. For its n-th mesh
a rank asks the store to put down what it made if nothing is there yet, and gets what is there (`compare_set`). So the
first rank leaves its mesh and every later one compares its own, in one round trip and without waiting for anybody.

A rank that finds another mesh raises at once, and before that leaves a note beside what it found. The others look for
the note in their next call on a group of the mesh: before it begins and, where it is the first call of the group, while
they wait in it. A rank that was refused, for names that do not fit say, leaves that it was in place of a mesh. Nothing
is asked once groups are at work: a rank that lives on without the call is missing in it as any other.

A universe of one rank needs none of this. In a dry run the store is the rank's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from meshdist.current import current_world, is_initialized
from meshdist.errors import DistBackendError, DistError
from meshdist.mesh.layout import Layout
from meshdist.mesh.render import ranks_text

if TYPE_CHECKING:
    from meshdist.process_group import ProcessGroup
    from meshdist.store import Store
    from meshdist.world import World

_REFUSED = "refused"
_REFUSALS = (ValueError, TypeError, DistBackendError)


class Agreement:
    """One mesh as its universe's ranks made it.

    Args:
        store: The world's.
        key: Where the mesh is put down.

    Example:
        >>> from meshdist.store import HashStore
        >>> Agreement(HashStore(), "mesh/world/1").broken() is None
        True
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key

    def broken(self) -> str | None:
        """Return how the ranks' meshes differ; None where no rank has found that they do."""
        note = f"{self._key}/differs"
        return self._store.get(note).decode() if self._store.check([note]) else None

    def compare(self, rank: int, digest: str, text: str) -> str | None:
        """Put down what `rank` made, or compare it with what is there; return the difference, None if there is none."""
        theirs, _, rest = self._store.compare_set(self._key, "", f"{digest} {rank} {text}").decode().partition(" ")
        if theirs == digest:
            return None
        other, _, made = rest.partition(" ")
        if made == text:  # what differs is not in the words, among thousands of ranks say
            made, text = f"{made} [{theirs[:8]}]", f"{text} [{digest[:8]}]"
        difference = (
            f"the ranks' meshes differ: global rank {other} {made}, global rank {rank} {text}; every rank must make the"
            " same meshes in the same order, also the ranks outside them; give group= to a mesh that only some ranks"
            " make"
        )
        self._store.compare_set(f"{self._key}/differs", "", difference)  # the first note stands
        return difference


def agree(
    world: World, universe: str, num_ranks: int, device_type: str, layout: Layout, backends: Sequence[str | None]
) -> Agreement | None:
    """Compare this rank's next mesh of a universe with what the other ranks made.

    Args:
        world: The caller's.
        universe: What the universe is called on all its ranks, and nothing else is.
        num_ranks: How many ranks it has.
        device_type: The mesh's, as are the next two.
        layout: Its ranks and names.
        backends: One per axis.

    Returns:
        What its groups rest on; None where there is nobody to differ from.

    Raises:
        ValueError: Another rank made another mesh; says both.
        DistError: The store is gone.
    """
    agreement = _next(world, universe, num_ranks)
    if agreement is None:
        return None
    digest = hashlib.sha256(repr((device_type, layout.names, layout.shape, tuple(backends))).encode())
    digest.update(layout.ranks.tobytes())
    given = f", backends {', '.join(map(str, backends))}" if any(backends) else ""
    text = f"made DeviceMesh({device_type!r}, {layout.describe()}, {ranks_text(layout)}{given})"
    difference = agreement.compare(world.rank, digest.hexdigest(), text)
    if difference is not None:
        raise ValueError(f"DeviceMesh: {difference}")
    return agreement


@contextmanager
def refusals_told(universe: ProcessGroup | None) -> Iterator[None]:
    """Tell the other ranks of `universe`, None for the world, if the block refuses a mesh that they may have made."""
    try:
        yield
    except _REFUSALS as error:
        if is_initialized():
            group = universe or current_world().default_group
            _tell(group.name, group.size(), error)
        raise


@contextmanager
def refusals_told_in(universe: str, num_ranks: int) -> Iterator[None]:
    """Do as `refusals_told` for a universe that is known by its name and has so many ranks."""
    try:
        yield
    except _REFUSALS as error:
        _tell(universe, num_ranks, error)
        raise


def _tell(universe: str, num_ranks: int, error: Exception) -> None:
    world = current_world()
    with suppress(DistError):  # the refusal is what the caller is to see, not that the store is gone as well
        agreement = _next(world, universe, num_ranks)
        if agreement is not None:
            agreement.compare(world.rank, _REFUSED, f"was refused one ({error})")


def _next(world: World, universe: str, num_ranks: int) -> Agreement | None:
    if num_ranks == 1:
        return None
    return Agreement(world.store, f"mesh/{universe}/{world.next_mesh(universe)}")
