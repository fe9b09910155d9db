"""Sharing: how the ranks of a group tell each other that what they give lies in shared arrays.

Before the first step of a call that may make use of it, a rank leaves a sign: what it gives is in shared arrays, whose
places it writes down as well, or it is not. Past that step all ranks have seen all signs, and decide alike. Signs and
places lie twice, for the two uses of the slots in turn: those of a call can be read until the call after the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.gloo.arena import HEAP, OPENS_HEAPS, Arena
from meshdist.backends.gloo.routes import Blocks
from meshdist.backends.gloo.single_copy import address_of
from meshdist.backends.gloo.windows import NOWHERE, Place, SharedMemory, Windows
from meshdist.call import Buffers

if TYPE_CHECKING:
    from meshdist.backends.base import BackendOptions

# Signs.
ORDINARY, SHARED = 0, 1
_YES, _NO = 1, 2
_MOST_VIEWS = 256


class Sharing:
    """The shared arrays of a group's ranks.

    Args:
        options: What the group is.
        arena: Its memory.
        memory: The shared arrays of this rank.

    Attributes:
        heap: This rank's own.
        left: For each of the two uses, the sign that this rank left last.
    """

    def __init__(self, options: BackendOptions, arena: Arena, memory: SharedMemory) -> None:
        size = len(options.ranks)
        self.heap = memory.heap
        self._signs = [arena.signs(use) for use in (0, 1)]
        self._word = arena.words.__getitem__
        self._sign_words = [arena.sign_words(use) for use in (0, 1)]
        self.left = [ORDINARY, ORDINARY]
        self._rank = options.rank
        self._peers = options.peers
        self._global_ranks = options.ranks
        self._memory = memory
        self._arena = arena
        # This rank's places, and what they were written for; of each peer, the place of what it gives to this rank.
        self._mine = [arena.places(use, options.rank) for use in (0, 1)]
        self._written_for: list[Any] = [None, None]
        self._theirs = [[arena.places(use, peer)[options.rank] for peer in range(size)] for use in (0, 1)]
        self._views: dict[Any, Array] = {}
        self._opened: set[int] = set()
        self._refused = False

    @property
    def possible(self) -> bool:
        """Whether this rank may have shared arrays, which all ranks can open as far as is known."""
        return self.heap.in_use and not self._refused

    def leave(self, use: int, sign: int) -> None:
        """Leave a sign."""
        if self.left[use] != sign:
            self.left[use] = self._signs[use][self._rank] = sign

    def any_left(self, use: int) -> bool:
        """Return whether any rank has left the sign of shared arrays."""
        return any(map(self._word, self._sign_words[use]))

    def all_left(self, use: int, ranks: Sequence[int]) -> bool:
        """Return whether all of some ranks have left the sign of shared arrays."""
        return all(self._signs[use][rank] == SHARED for rank in ranks)

    def leave_places(self, use: int, send: Buffers, give: Callable[[Buffers], Blocks]) -> bool:
        """Leave the sign for what is sent, and the places of the blocks for each rank that `give` makes of it.

        Returns:
            Whether all of them are in shared arrays.
        """
        key = None
        if isinstance(send, np.ndarray):
            address = address_of(send)
            extent = self.heap.find(address)
            key = None if extent is None else (give, address, extent.begin)
        if key is None or key != self._written_for[use]:
            places = self._places(give(send))
            if places is None:
                self.leave(use, ORDINARY)
                return False
            self._mine[use][:] = places
            self._written_for[use] = key
            self._arena.words[self._arena.line(self._rank, HEAP)] = self.heap.fd or 0
        self.leave(use, SHARED)
        return True

    def unopened(self, ranks: Sequence[int]) -> list[int]:
        """Return those of some ranks whose memory not all ranks have opened yet; the same on all."""
        return [rank for rank in ranks if rank not in self._opened]

    def say_who_opens(self, ranks: list[int]) -> None:
        """Try to open the memory of some ranks, and say how it went; before a step."""
        others = [rank for rank in ranks if rank != self._rank]
        opens = all(self._windows(rank).can_open(self._heap_of(rank)) for rank in others)
        self._arena.words[self._arena.line(self._rank, OPENS_HEAPS)] = _YES if opens else _NO

    def all_open(self, ranks: list[int]) -> bool:
        """Return whether all ranks can open the memory of these, behind the step; if not, no array counts as shared."""
        words, line = self._arena.words, self._arena.line
        shut_out = [rank for rank in range(len(self._global_ranks)) if words[line(rank, OPENS_HEAPS)] != _YES]
        if shut_out:
            self._refused = True
            who = self._peers.describe(self._global_ranks[shut_out[0]])
            self.heap.say_once(f"{who} may not open the shared arrays of its peers")
        self._opened.update(ranks)
        return not shut_out

    def view(self, use: int, peer: int, dtype: np.dtype[Any], count: int) -> Array:
        """Return what a peer gives to this rank, a flat array of `count` elements over the peer's memory."""
        place = Place(*self._theirs[use][peer].tolist())
        key = peer, place, dtype, count
        view = self._views.get(key)
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            windows = self._windows(peer)
            view = self._views[key] = windows.view(self._heap_of(peer), place, dtype, count)
        return view

    def _places(self, blocks: Blocks) -> list[Place] | None:
        places = []
        for block in blocks:
            place = NOWHERE
            if block is not None and block.size:
                address = address_of(block)
                extent = self.heap.find(address)
                if extent is None:
                    return None
                place = Place(extent.begin, extent.num_bytes, address - extent.address)
            places.append(place)
        return places

    def _heap_of(self, rank: int) -> int:
        return self._arena.words[self._arena.line(rank, HEAP)]

    def _windows(self, rank: int) -> Windows:
        card = self._peers.card(self._global_ranks[rank])
        return self._memory.windows(card.pid, lambda: self._peers.describe(self._global_ranks[rank]))
