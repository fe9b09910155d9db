"""How the ranks of a communicator find each other before NCCL is asked to make it.

NCCL's own meeting has no deadline, and waits without a word for a rank that never comes. So the ranks meet in the
group's store first, and say which GPU they are on: what cannot be is found out there, on all ranks alike.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshdist.backends.counting_in import Counted
from meshdist.backends.nccl.library import Communicator, Library
from meshdist.backends.whereabouts import SetUpWait
from meshdist.call import Signature
from meshdist.deadline import Deadline
from meshdist.debug.mismatch import disagreement
from meshdist.errors import DistBackendError
from meshdist.farewell import ORDERLY, peer_gone
from meshdist.store import PrefixStore
from meshdist.waiting import Doorbell, Waitable, wait_until

if TYPE_CHECKING:
    from meshdist.backends.base import BackendOptions

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
_FIRST_MULTI_RANK = 23000
_LOOK_S = 0.1
# How many of the others are looked after at each look.
_LOOKED_AFTER = 16


def compare_calls(
    options: BackendOptions, number: int, signature: Signature, where: str, timeout_s: float, check: Callable[[], None]
) -> None:
    """Compare what the ranks are about to call, in the store; all ranks come to it as often.

    Args:
        options: The group's.
        number: How often they have.
        signature: What this rank calls.
        where: How messages begin.
        timeout_s: How long to wait for the others.
        check: Raises where the engine has given up meanwhile.

    Raises:
        DistBackendError: They call different things; says who calls what.
        DistTimeoutError: Some ranks did not come; says which.
    """
    members = tuple(range(len(options.ranks)))
    store = PrefixStore(f"nccl/calls/{number}", options.store)
    counted = Counted(options, store, members, json.dumps([signature.compared, signature.text]), check)
    wait_until(counted, options.bells.mine(), Deadline(timeout_s), where, options.vigil)
    calls = dict(zip(members, counted.cards(), strict=True))
    # Who has come here has read what was left the time before.
    before = PrefixStore(f"nccl/calls/{number - 1}", options.store)
    for key in (f"here/{options.rank}", *(("num_here", "all_here") if options.rank == 0 else ())):
        before.delete_key(key)
    if len({compared for compared, _ in calls.values()}) > 1:
        raise DistBackendError(disagreement({rank: text for rank, (_, text) in calls.items()}, options.ranks))


class Meeting:
    """The ranks of a new communicator find each other.

    Args:
        options: The group's.
        members: The ranks of the communicator, in the group.
        place: Where in the group's store.
        where: How messages begin.
        check: Raises where the engine has given up meanwhile.
    """

    def __init__(
        self,
        options: BackendOptions,
        members: tuple[int, ...],
        place: str,
        where: str,
        check: Callable[[], None],
    ) -> None:
        self._options, self._members, self._where, self._check = options, members, where, check
        self._store = PrefixStore(place, options.store)

    def unique_id(self, library: Library, gpu: tuple[str, str]) -> bytes:
        """Return what the ranks have in common, once all have come.

        Args:
            library: NCCL.
            gpu: This rank's GPU: its name for people, and what tells its host from others.

        Raises:
            DistBackendError: A rank is gone; two ranks have one GPU, or their NCCLs differ.
            DistTimeoutError: Some ranks did not come.
        """
        options, store = self._options, self._store
        if self._members[0] == options.rank:
            store.set("id", library.unique_id().hex())
        shares = os.environ.get(MULTI_RANK) == "1"
        card = json.dumps({"gpu": gpu, "version": library.version(), "shares": shares})
        counted = Counted(options, store, self._members, card, self._check)
        self._wait(SetUpWait(counted, options))
        check_cards(dict(zip(self._members, counted.cards(), strict=True)))
        return bytes.fromhex(store.get("id").decode())

    def made_in_time(self, make: Callable[[], Communicator]) -> Communicator:
        """Return what `make` returns, which waits for all ranks without end; by a thread that can be left behind.

        Raises:
            DistBackendError: A rank is gone.
            DistTimeoutError: It takes longer than the group's timeout.
            BaseException: What `make` raises.
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
        wait_until(waitable, options.bells.mine(), Deadline(options.timeout_s), self._where, options.vigil)


def check_cards(cards: dict[int, Any]) -> None:
    """Raise DistBackendError where the ranks cannot have a communicator.

    Args:
        cards: By rank: `gpu`, its name and its host, NCCL's `version`, and whether ranks may share GPUs.
    """
    versions = {card["version"]: rank for rank, card in cards.items()}
    if len(versions) > 1:
        found = ", ".join(f"{spelled(version)} (rank {rank})" for version, rank in sorted(versions.items()))
        raise DistBackendError(f"the ranks have several versions of NCCL, {found}; install the same everywhere")
    first: dict[tuple[str, ...], int] = {}
    for rank, card in cards.items():
        other = first.setdefault(tuple(card["gpu"]), rank)
        if other == rank or (card["shares"] and card["version"] >= _FIRST_MULTI_RANK):
            continue
        raise DistBackendError(
            f"ranks {other} and {rank} use one GPU, {card['gpu'][0]}, and NCCL wants one for each: call"
            " cupy.cuda.Device(local_rank).use() before arrays are made, or pass device_id=local_rank to"
            f" init_process_group; from NCCL 2.30 on, {MULTI_RANK}=1 lets ranks share a GPU"
        )


def spelled(version: int) -> str:
    """Return a version as people write it.

    Example:
        >>> spelled(22703)
        '2.27.3'
    """
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
        self._others = [rank for rank in members if rank != options.rank][:_LOOKED_AFTER]
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
                made.abort()  # nobody would ever end it
        except BaseException as error:  # it belongs to whoever waits
            self._error = error
        bell = self._bell
        if bell is not None:
            bell.ring()

    def leave(self) -> None:
        """Have what was made, or will be, aborted: nobody takes it."""
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
        for rank in self._others:
            how = self._options.gone(rank)
            # Who left in order has made its end of the communicator; this one is about to be done.
            if how is not None and how not in ORDERLY:
                raise peer_gone(self._options.call(rank), how, "making the communicator")

    def arm(self, bell: Doorbell) -> None:
        self._bell = bell

    def disarm(self, bell: Doorbell) -> None:
        self._bell = None

    def missing(self) -> str:
        return "NCCL to make the communicator (NCCL_DEBUG=INFO says what it is at)"
