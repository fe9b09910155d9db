"""Peer: the other rank of a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdist.backends.gloo.channel import Channel
from meshdist.doorbells import SocketDoorbells
from meshdist.farewell import gave_up, peer_gone

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
        self.description = self._options.describe(rank)

    def describe(self) -> str:
        """Return what messages call it."""
        return self.description

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

    def check(self, channel: Channel, left_out: str) -> None:
        """Raise DistBackendError if it has given up, left or died, without `left_out`."""
        self.check_state(channel, left_out)
        if self.ended():
            self.check_state(channel, left_out)  # its last word may have come right after the look
            raise peer_gone(self.description, self._options.peers.how_ended(self.global_rank), left_out)

    def check_state(self, channel: Channel, left_out: str) -> None:
        """Raise DistBackendError if it said that it has given up or left."""
        state, text = channel.state()
        if state:
            raise peer_gone(self.description, text if state == LEFT else gave_up(text), left_out)
