"""SharedDescriptors: how the ranks of a group tell each other that their blocks are in shared arrays.

Before the first step of a call that can use it, a rank sets a flag: its blocks are in shared arrays, whose places it
writes down as well, or they are not. After that step all ranks have seen all flags, and decide alike. Flags and places
exist twice, for the two phases: those of a call stay readable until the call after the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshdist.arrays.host import Array
from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.gloo.shm.flag_barrier import FlagBarrier
from meshdist.backends.gloo.shm.heap import Heap
from meshdist.backends.gloo.shm.mapping_cache import NOWHERE, MappingCache, Place, SharedMemory
from meshdist.backends.gloo.shm.shared_region import HEAP, OPENS_HEAPS, SharedRegion
from meshdist.backends.gloo.shm.single_copy import address_of
from meshdist.collectives.dataflow import Blocks
from meshdist.runtime.call import Buffers

# Values of the flags.
ORDINARY, SHARED = 0, 1
# Values of the words that say whether a rank can open the heaps.
_YES, _NO = 1, 2
_MOST_VIEWS = 256


class SharedDescriptors:
    """The shared arrays of a group's ranks; `flags` holds, for each phase, what this rank set last."""

    def __init__(self, options: BackendOptions, region: SharedRegion, memory: SharedMemory) -> None:
        size = len(options.ranks)
        self.heap = memory.heap
        self._flag_bytes = [region.shared_flags(phase) for phase in (0, 1)]
        self._word = region.words.__getitem__
        self._flag_words = tuple(tuple(region.shared_flag_words(phase)) for phase in (0, 1))
        self.flags = [ORDINARY, ORDINARY]
        self._rank = options.rank
        self._peers = options.peers
        self._global_ranks = options.ranks
        self._memory = memory
        self._region = region
        # This rank's places, and what they were written for; of each peer, the place of its block for this rank.
        self._mine = [region.places(phase, options.rank) for phase in (0, 1)]
        self._written_for: list[Any] = [None, None]
        self._theirs = [[region.places(phase, peer)[options.rank] for peer in range(size)] for phase in (0, 1)]
        self._views: dict[Any, Array] = {}
        self._opened: set[int] = set()
        self._refused = False

    @property
    def possible(self) -> bool:
        """Whether this rank may have shared arrays, which all ranks can open as far as is known."""
        return self.heap.in_use and not self._refused

    def set_flag(self, phase: int, flag: int) -> None:
        if self.flags[phase] != flag:
            self.flags[phase] = self._flag_bytes[phase][self._rank] = flag

    def told_by(self, barrier: FlagBarrier) -> tuple[Heap, FlagBarrier, tuple[tuple[int, ...], ...]]:
        """Return what tells whether arrays are shared: this rank's heap, and for each phase words of the barrier."""
        return self.heap, barrier, self._flag_words

    def any_shared(self, phase: int) -> bool:
        return any(map(self._word, self._flag_words[phase]))

    def all_shared(self, phase: int, ranks: Sequence[int]) -> bool:
        return all(self._flag_bytes[phase][rank] == SHARED for rank in ranks)

    def publish_places(self, phase: int, send: Buffers, give: Callable[[Buffers], Blocks]) -> bool:
        """If all blocks are in shared arrays, set the flag, write their places, and return True."""
        key = None
        if isinstance(send, np.ndarray):
            address = address_of(send)
            extent = self.heap.find(address)
            key = None if extent is None else (give, address, extent.begin)
        if key is None or key != self._written_for[phase]:
            places = self._places(give(send))
            if places is None:
                self.set_flag(phase, ORDINARY)
                return False
            self._mine[phase][:] = places
            self._written_for[phase] = key
            self._region.words[self._region.line(self._rank, HEAP)] = self.heap.fd or 0
        self.set_flag(phase, SHARED)
        return True

    def unopened(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` whose heaps not all ranks have opened yet; equal on all ranks."""
        return [rank for rank in ranks if rank not in self._opened]

    def publish_opened(self, ranks: list[int]) -> None:
        """Try to open the heaps of `ranks`, and publish the result, before a step."""
        others = [rank for rank in ranks if rank != self._rank]
        opens = all(self._mappings(rank).can_open(self._heap_of(rank)) for rank in others)
        self._region.words[self._region.line(self._rank, OPENS_HEAPS)] = _YES if opens else _NO

    def all_open(self, ranks: list[int]) -> bool:
        """Return, after the step, whether all ranks can open these heaps; if not, shared arrays are no longer used."""
        words, line = self._region.words, self._region.line
        shut_out = [rank for rank in range(len(self._global_ranks)) if words[line(rank, OPENS_HEAPS)] != _YES]
        if shut_out:
            self._refused = True
            who = self._peers.describe(self._global_ranks[shut_out[0]])
            self.heap.warn_once(f"{who} may not open the shared arrays of its peers")
        self._opened.update(ranks)
        return not shut_out

    def view(self, phase: int, peer: int, dtype: np.dtype[Any], count: int) -> Array:
        """Return a peer's block for this rank: a flat array of `count` elements over the peer's memory."""
        place = Place(*self._theirs[phase][peer].tolist())
        key = peer, place, dtype, count
        view = self._views.get(key)
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            cache = self._mappings(peer)
            view = self._views[key] = cache.view(self._heap_of(peer), place, dtype, count)
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
        return self._region.words[self._region.line(rank, HEAP)]

    def _mappings(self, rank: int) -> MappingCache:
        card = self._peers.card(self._global_ranks[rank])
        return self._memory.mappings(card.pid, lambda: self._peers.describe(self._global_ranks[rank]))
