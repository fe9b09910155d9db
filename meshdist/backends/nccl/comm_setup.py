"""The set-up of an NCCL communicator.

NCCL's own bootstrap has no deadline and waits silently for a missing rank. So the ranks first meet in the group's store
and exchange their GPUs and versions, so that impossible combinations are reported on all ranks.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshdist.backends.group_setup import SetUpWait, StoreBarrier
from meshdist.backends.nccl.library import Communicator, Library
from meshdist.errors import DistBackendError
from meshdist.runtime.call import Signature
from meshdist.runtime.call_mismatch import CallCheck
from meshdist.runtime.departure import LeftOut, peer_gone
from meshdist.runtime.peer_monitor import PeerMonitor
from meshdist.runtime.waiting import Doorbell, Waitable, wait_until
from meshdist.store import PrefixStore
from meshdist.system.deadline import Deadline

if TYPE_CHECKING:
    from meshdist.backends.backend_options import BackendOptions

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
_FIRST_MULTI_RANK = 23000


def compare_calls(
    options: BackendOptions,
    number: int,
    signature: Signature,
    error_prefix: str,
    timeout_s: float,
    check: Callable[[], None],
) -> None:
    """Compare the ranks' calls through the store; `check` raises if the backend has given up meanwhile.

    All ranks call this equally often; `number` counts the comparisons.

    Raises:
        DistBackendError: The calls differ.
        DistTimeoutError: Some ranks did not arrive.
    """
    members = tuple(range(len(options.ranks)))
    store = PrefixStore(f"nccl/calls/{number}", options.store)
    counted = StoreBarrier(options, store, members, json.dumps([signature.compared, CallCheck.words(signature)]), check)
    wait_until(counted, options.bells.mine(), Deadline(timeout_s), error_prefix, options.observer)
    calls = dict(zip(members, counted.cards(), strict=True))
    # Every rank that has arrived here has read the keys of the previous comparison.
    before = PrefixStore(f"nccl/calls/{number - 1}", options.store)
    for key in (f"here/{options.rank}", *(("num_here", "all_here") if options.rank == 0 else ())):
        before.delete_key(key)
    if len({compared for compared, _ in calls.values()}) > 1:
        raise CallCheck(options.rank, options.ranks).error({rank: words for rank, (_, words) in calls.items()})


class CommSetup:
    """The ranks of a new communicator, members of the group, meet at a place in the group's store.

    `check` raises if the backend has given up meanwhile.
    """

    def __init__(
        self,
        options: BackendOptions,
        members: tuple[int, ...],
        place: str,
        error_prefix: str,
        check: Callable[[], None],
    ) -> None:
        self._options, self._members, self._error_prefix, self._check = options, members, error_prefix, check
        self._store = PrefixStore(place, options.store)

    def unique_id(self, library: Library, gpu: tuple[str, str]) -> bytes:
        """Return NCCL's unique id once all ranks have arrived; `gpu` is this rank's GPU and its host.

        Raises:
            DistBackendError: A rank is gone; two ranks have one GPU, or the NCCL versions differ.
            DistTimeoutError: Some ranks did not arrive.
        """
        options, store = self._options, self._store
        if self._members[0] == options.rank:
            store.set("id", library.unique_id().hex())
        shares = os.environ.get(MULTI_RANK) == "1"
        card = json.dumps({"gpu": gpu, "version": library.version(), "shares": shares})
        counted = StoreBarrier(options, store, self._members, card, self._check)
        self._wait(SetUpWait(counted, options))
        check_cards(dict(zip(self._members, counted.cards(), strict=True)))
        return bytes.fromhex(store.get("id").decode())

    def made_in_time(self, make: Callable[[], Communicator]) -> Communicator:
        """Return `make()`, which blocks until all ranks call it, run by a thread that can be abandoned.

        Raises:
            DistBackendError: A rank is gone.
            DistTimeoutError: It takes longer than the group's timeout.
        """
        options = self._options
        making = _Making(make, options, self._members, self._check)
        threading.Thread(target=making.make, name=f"meshdist-nccl-{options.name}", daemon=True).start()
        try:
            self._wait(making)
        except BaseException:
            making.leave()
            raise
        assert making.made is not None
        return making.made

    def _wait(self, waitable: Waitable) -> None:
        options = self._options
        wait_until(waitable, options.bells.mine(), Deadline(options.timeout_s), self._error_prefix, options.observer)


def check_cards(cards: dict[int, Any]) -> None:
    """Raise DistBackendError if the ranks, by their `gpu`, NCCL `version` and `shares`, cannot form a communicator."""
    versions = {card["version"]: rank for rank, card in cards.items()}
    if len(versions) > 1:
        found = ", ".join(f"{spelled(version)} (rank {rank})" for version, rank in sorted(versions.items()))
        raise DistBackendError(f"the ranks have different versions of NCCL, {found}; install the same everywhere")
    first: dict[tuple[str, ...], int] = {}
    for rank, card in cards.items():
        other = first.setdefault(tuple(card["gpu"]), rank)
        if other == rank or (card["shares"] and card["version"] >= _FIRST_MULTI_RANK):
            continue
        raise DistBackendError(
            f"ranks {other} and {rank} share one GPU, {card['gpu'][0]}, but NCCL needs one for each: call"
            " cupy.cuda.Device(local_rank).use() before arrays are created, or pass device_id=local_rank to"
            f" init_process_group; from NCCL 2.30 on, {MULTI_RANK}=1 lets ranks share a GPU"
        )


def spelled(version: int) -> str:
    """Return an NCCL version as text: 22703 is "2.27.3"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class _Making(Waitable):
    def __init__(
        self,
        make: Callable[[], Communicator],
        options: BackendOptions,
        members: tuple[int, ...],
        check: Callable[[], None],
    ) -> None:
        self._make, self._options, self._check = make, options, check
        self._others = [rank for rank in members if rank != options.rank]
        self._monitor = PeerMonitor()
        self._bell: Doorbell | None = None
        self._error: BaseException | None = None
        self._leaving, self._is_left = threading.Lock(), False
        self.made: Communicator | None = None

    def make(self) -> None:
        try:
            made = self._make()
            with self._leaving:
                if not self._is_left:
                    self.made = made
            if self.made is None:
                made.abort()
        except BaseException as error:  # raised by `ready`
            self._error = error
        bell = self._bell
        if bell is not None:
            bell.ring()

    def leave(self) -> None:
        """Abort the communicator, now or as soon as it is created."""
        with self._leaving:
            self._is_left, made = True, self.made
        if made is not None:
            threading.Thread(target=made.abort, name="meshdist-nccl-abort", daemon=True).start()

    def ready(self) -> bool:
        if self._error is not None:
            raise self._error
        return self.made is not None

    def check(self) -> None:
        self._check()
        for rank in self._monitor.turn(self._others) if self._monitor.is_due() else ():
            how = self._options.gone(rank)
            # A rank that left in order has created its communicator; this one is about to be complete.
            if how is not None and not how.exit.is_orderly:
                raise peer_gone(self._options.call(rank), how, LeftOut.COMMUNICATOR, rank=self._options.ranks[rank])

    def arm(self, bell: Doorbell) -> None:
        self._bell = bell

    def disarm(self, bell: Doorbell) -> None:
        self._bell = None

    def missing(self) -> str:
        return "NCCL to create the communicator (NCCL_DEBUG=INFO shows what it is doing)"
