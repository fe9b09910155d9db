"""Who is there for an elastic job: the launcher that leads notes who comes and who leaves.

A job of `--nnodes 2:4` begins when two hosts are there and a last call has passed, or at once with four. Launchers that
come later wait for a place; so do those for which there is none at the moment.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence

from meshdist.errors import DistTimeoutError
from meshdist.launch.interrupts import Interrupts
from meshdist.launch.launchers_store import SignalledError, arrived, has_left, seat_key
from meshdist.launch.node_numbering import NodeCard, check_card, order_launchers
from meshdist.store import Store
from meshdist.system.deadline import Deadline
from meshdist.system.plurals import counted

_PAUSE_S = 0.05


class Arrivals:
    """The launchers that have come to the store of an elastic job; `leader`, with the card `mine`, is one of them."""

    def __init__(self, store: Store, mine: NodeCard, leader: int, last_call_s: float) -> None:
        self._store = store
        self._mine = mine
        self._leader = leader
        self._least = mine.least_nodes or mine.num_nodes
        self._last_call_s = last_call_s
        self._lock = threading.Lock()
        self._refused: set[int] = set()
        self._dismissed: set[int] = set()
        self.cards: dict[int, NodeCard] = {}  # of all that came and were given the same job

    def there(self) -> list[int]:
        """Return the launchers that are there now; refuse those that were given another job."""
        with self._lock:
            for number in arrived(self._store):
                if number not in self.cards and number not in self._refused:
                    self._admit(number)
            left = {number for number in self.cards if has_left(self._store, number)} | self._dismissed
            return [number for number in self.cards if number not in left]

    def dismiss(self, launchers: Iterable[int]) -> None:
        """Count these as gone, though they may not have left the store yet."""
        self._dismissed.update(launchers)

    def _admit(self, number: int) -> None:
        card = NodeCard.decode(self._store.get(f"card/{number}"))
        try:
            check_card(card, self._mine)
        except ValueError as error:
            self._refused.add(number)
            self._store.set(seat_key(number), json.dumps({"problem": str(error)}))
        else:
            self.cards[number] = card

    def gather(self, staying: Sequence[int], interrupts: Interrupts, deadline: Deadline) -> list[int]:
        """Return the launchers of the next start, in the order of their hosts' numbers.

        Those `staying` from the start before do not wait for others, as long as they are enough.

        Raises:
            SignalledError: A signal came.
            DistTimeoutError: There were too few until the deadline.
        """
        last_call: Deadline | None = None
        while True:
            there = self.there()
            if len(there) < self._least:
                last_call = None
                if deadline.expired():
                    raise self._too_few(there, deadline)
            elif len(there) >= self._mine.num_nodes or len(set(there) & set(staying)) >= self._least:
                break
            else:
                last_call = last_call or Deadline(self._last_call_s)
                if last_call.expired():
                    break
            if interrupts.pending():
                raise SignalledError
            threading.Event().wait(_PAUSE_S)
        cards = {launcher: self.cards[launcher] for launcher in there}
        return order_launchers(cards, staying, self._leader, self._mine.num_nodes)

    def newcomers(self, launchers: Sequence[int], stop: threading.Event) -> list[str]:
        """Wait for launchers beyond these for which there is room, and a last call; return their hosts.

        The result is empty if `stop` was set before.
        """
        room = self._mine.num_nodes - len(launchers)
        last_call: Deadline | None = None
        while not stop.wait(_PAUSE_S):
            new = sorted(set(self.there()) - set(launchers))[:room]
            if not new:
                last_call = None
                continue
            last_call = last_call or Deadline(self._last_call_s)
            if len(new) == room or last_call.expired():
                return [self.cards[launcher].host for launcher in new]
        return []

    def _too_few(self, there: Sequence[int], deadline: Deadline) -> DistTimeoutError:
        hosts = ", ".join(self.cards[launcher].host for launcher in there)
        return DistTimeoutError(
            f"{len(there)} of at least {counted(self._least, 'host')} (--nnodes {self._mine.nnodes}) joined within"
            f" {deadline.timeout_s:g} s: {hosts}; start meshrun on others too, with the same --rdzv-endpoint"
        )
