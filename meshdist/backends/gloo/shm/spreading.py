"""Spread the ranks of a host evenly over the processors that they share; the compiled core does it: see spreading.c."""

from __future__ import annotations

import logging
from functools import partial

from meshdist import core
from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.gloo.shm.segment import Segment, create, find
from meshdist.errors import DistError
from meshdist.system.env_flags import SPREADING, switch

_log = logging.getLogger("meshdist")
# How far the places of two ranks are apart, so that each writes to cache lines of its own.
_WORDS, _WORD_BYTES = 16, 8


def spread_ranks(options: BackendOptions) -> None:
    """Spread the ranks of this host from here on, until this rank leaves the world; with the core."""
    if switch(SPREADING) is not False:
        options.peers.once("places", partial(_Places, options))


class _Places:
    """The memory in which the ranks of this host tell each other where they run: a line for each.

    The line before says when one of them has moved. The first rank that needs the memory makes it, and keeps it open
    for those that come later. It is not a file, which a rank that is killed would leave behind.
    """

    def __init__(self, options: BackendOptions) -> None:
        self._made: Segment | None = None
        self._words: memoryview | None = None
        try:
            self._use(options)
        except DistError as error:  # the ranks run as well without it
            _log.debug("ranks are not spread over the processors that they share: %s", error)

    def _use(self, options: BackendOptions) -> None:
        peers = options.peers
        cards = peers.cards(range(peers.num_ranks))
        here = [rank for rank, card in enumerate(cards) if card.host == peers.mine.host]
        num_bytes = (1 + len(here)) * _WORDS * _WORD_BYTES
        self._made = segment = create(num_bytes, [cards[rank].pid for rank in here])
        if not segment.is_anonymous:
            segment.seal()
            return
        place = options.world_store.compare_set(f"places/{peers.mine.host}", "", segment.place).decode()
        if place != segment.place:
            segment.seal()
            self._made, segment = None, find(place, num_bytes)
        self._words, rank = memoryview(segment.memory).cast("B").cast("Q"), here.index(options.ranks[options.rank])
        core.module.spread_ranks(self._words, _WORDS, _WORDS, 0, len(here), rank)

    def close(self) -> None:
        if self._words is not None:
            core.module.leave_places(self._words)
        if self._made is not None:
            self._made.seal()

    def disown(self) -> None:
        """Do nothing: what is made of the memory in a forked child is closed with its last array."""
