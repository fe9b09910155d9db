"""Peer: the other rank of a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdist.backends.gloo.channel import Channel
from meshdist.doorbells import SocketDoorbells
from meshdist.errors import DistBackendError

if TYPE_CHECKING:
    from meshdist.backends.base import Backend

LEFT, FAILED = 1, 2


class Peer:
    """The other rank of a channel."""

    def __init__(self, backend: Backend, rank: int) -> None:
        assert isinstance(backend.options.bells, SocketDoorbells)
        self._bells = backend.options.bells
        self._options = backend.options
        self.global_rank = backend.options.ranks[rank]
        self.card = self._options.peers.card(self.global_rank)
        self.description = self._options.peers.describe(self.global_rank)

    def ended(self) -> bool:
        """Return True once its process has ended."""
        return self._options.peers.ended(self.global_rank)

    def wake(self, channel: Channel) -> None:
        """Ring those of its threads that sleep on this channel."""
        sleepers = channel.sleepers()
        number = 1
        while sleepers:
            if sleepers & 1:
                self._bells.ring(self.card.bells, number)
            sleepers >>= 1
            number += 1

    def check(self, channel: Channel) -> None:
        """Raise DistBackendError if it has given up, left or died."""
        self.check_state(channel)
        self.check_alive()

    def check_alive(self) -> None:
        """Raise DistBackendError if its process has ended."""
        if self.ended():
            raise DistBackendError(f"{self.description} has died", peer_failed=True)

    def check_state(self, channel: Channel) -> None:
        """Raise DistBackendError if it said that it has given up or left."""
        state, text = channel.state()
        if state == FAILED:
            raise DistBackendError(f"{self.description} gave up: {text}", peer_failed=True)
        if state == LEFT:
            raise DistBackendError(f"{self.description} has destroyed the group", peer_failed=True)
