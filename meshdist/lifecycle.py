"""The start and the end of a world: init_process_group, destroy_process_group, abort_process_group, and a fork."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any

from meshdist.arrays.device_types import check_device_id
from meshdist.backends.device_backends import by_device, check_rank_kind, usable_backend_name
from meshdist.backends.p2p.eager_messages import eager_bytes
from meshdist.backends.registry import entry_of
from meshdist.core import check_choice
from meshdist.debug.debug_level import begin_debugging, get_debug_level
from meshdist.debug.user_traceback import ending_at_the_call, user_frames
from meshdist.errors import DistBackendError, DistError, DistNetworkError, DistTimeoutError
from meshdist.groups.api import connect_to_device
from meshdist.groups.non_member import NonMember
from meshdist.groups.process_group import DESTROYED
from meshdist.groups.world import Instrumentation, World, current_world, resolve, world_in
from meshdist.runtime.context import GroupLike, WorldSlot, current_slot
from meshdist.runtime.departure import giving_up
from meshdist.runtime.log import RankLog, show_warnings
from meshdist.runtime.waiting import Doorbells
from meshdist.store.interface import Store
from meshdist.system.deadline import Deadline, Timeout
from meshdist.system.env_flags import check_switches, has_mpi_launcher
from meshdist.system.platform import check_processes
from meshdist.system.variables import unknown_variables

_STORE_LINGER_S = 2.0  # at most
# A store that ends so long after a rank has come was not that of a world that was just leaving.
_NOTED_S = 1.0


@ending_at_the_call
def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Join the world: wait for all other ranks, and create the default group.

    Args:
        backend: "gloo" (shared memory, TCP between hosts), "mpi", "nccl" or another registered name, in any case; or
            pairs of device type and name, as in "cpu:gloo,cuda:nccl". None means "gloo" and, for arrays on a GPU,
            "nccl" if it is available.
        init_method: How the ranks find each other: `env://` (the default: MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE
            from the environment, as `meshrun` sets them; with none of these and no launcher, this process is a world of
            one rank), `tcp://host:port` or `file:///path`. With a file or a multicast address, the ranks can be
            numbered automatically. `mpi://`, the default for backend "mpi": the ranks are those of the MPI job that
            `mpirun` started.
        timeout: How long to wait for the other ranks, and how long any call of this world may wait: seconds or a
            timedelta. 30 minutes if None.
        world_size: Number of ranks, if neither the environment nor the URL has it.
        rank: The rank of this process, if neither the environment nor the URL has it.
        store: A store that all ranks reach, instead of `init_method`; then rank and world_size are required.
        group_name: Distinguishes jobs that use the same file or multicast address; ignored elsewhere.
        pg_options: `ProcessGroupNCCL.Options` for the nccl backend. Passed to a backend that was registered with
            `extended_api=True`; other backends have no options.
        device_id: The GPU of this rank's arrays: "cuda:1", its index, or a device object. With the nccl backend the
            ranks connect at once, and not at the first call. Ignored by CPU backends.

    Raises:
        ValueError: Called twice; the backend is unknown, is not for ranks that are processes, or differs between the
            ranks; the rank or world size is missing or invalid; another process has this rank.
        DistBackendError: A registered backend could not be created on another rank; that rank raises the original
            error.
        DistNetworkError: The store cannot be reached.
        DistTimeoutError: Some ranks did not arrive; the message names them.
        DistError: Ranks cannot be processes on this system.
    """
    slot = current_slot()
    if slot.world is not None and (slot.dry is None or slot.dry.is_joined):
        raise ValueError(
            "the default process group is already initialized; call destroy_process_group() before"
            " init_process_group() again"
        )
    if store is not None and init_method is not None:
        raise ValueError("pass init_method or store, and only one of them")
    check_device_id("init_process_group", device_id)
    check_environment()
    name, deadline = usable_backend_name(backend), Deadline(timeout)
    if slot.dry is not None:
        slot.dry.join(None if backend is None else name, deadline.timeout_s, world_size, rank)
        world = current_world()
    elif store is not None:
        from meshdist.bootstrap.url import whole_number
        from meshdist.runtime.doorbells import SocketDoorbells

        check_processes("init_process_group")
        rank, world_size = whole_number(rank, "rank"), whole_number(world_size, "world_size")
        _check_place(rank, world_size)
        world = enter_world(slot, store, rank, world_size, name, SocketDoorbells(), deadline)
    else:
        world = _meet(slot, init_method, rank, world_size, group_name, name, deadline)
    world.default_group.pg_options, world.default_group.device_id = pg_options, device_id
    if device_id is not None:
        _connect(slot, world)
    if not all(entry_of(each).is_ours for each in by_device(name).values()):
        _make_registered(slot, world, deadline)


def check_environment() -> None:
    """Refuse wrong values in the environment, before other ranks wait for this one; warn of unknown variables."""
    get_debug_level()
    check_switches()
    eager_bytes()
    check_choice()
    unknown = unknown_variables()
    if unknown:
        _warn_of(unknown)


def _warn_of(unknown: Mapping[str, str | None]) -> None:
    """Warn of variables that are not known, once in a job: its ranks have the same variables."""
    from meshdist.cluster.place import is_first_rank

    if is_first_rank():
        show_warnings()
        for name, meant in unknown.items():
            hint = "see docs/variables.md" if meant is None else f"did you mean {meant}?"
            RankLog().warning("the environment variable %s is unknown, and ignored; %s", name, hint)


def _meet(
    slot: WorldSlot,
    init_method: str | None,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    deadline: Deadline,
) -> World:
    from meshdist.bootstrap.rendezvous import rendezvous
    from meshdist.store.connect import NotReachedError

    check_processes("init_process_group")
    url = init_method if init_method is not None else "env://"
    if url == "env://" and "mpi" in by_device(backend).values():
        url = "mpi://"  # the MPI launcher knows the ranks without the variables
    timeout_s = deadline.timeout_s  # as it was given: the errors say it
    lost: DistNetworkError | None = None
    while True:
        try:
            own, my_rank, size = rendezvous(url, rank, world_size, timeout_s, group_name=group_name)
        except NotReachedError as error:
            if lost is not None:
                raise lost from None  # the store ended, and no other one has come
            add_hint(error, url)
            raise error from None
        joined_s = time.monotonic()
        try:
            world = enter_owned_world(slot, own, my_rank, size, backend, deadline)
        except DistNetworkError as error:
            # The store ended: it was that of the previous world, whose last rank was just leaving. Try again.
            if deadline.expired():
                raise
            if time.monotonic() - joined_s > _NOTED_S:  # else that world was just leaving
                words = "%s; perhaps its rank 0 has ended. Waiting for another store there for %.0f s more"
                RankLog().warning(words, error, deadline.remaining_s())
            lost = error
            timeout_s = deadline.remaining_s()
            continue
        except DistTimeoutError as error:
            add_hint(error, url)
            raise
        if url.startswith("mpi://"):
            from meshdist.bootstrap.mpi import finish_setup

            world.endings.append(finish_setup())
        if has_mpi_launcher():
            from meshdist.backends.mpi.aborting import report_once
            from meshdist.backends.mpi.shared_report import SharedReport

            world.endings.append(report_once(SharedReport(world.store, world.rank), user_frames))
        return world


def add_hint(error: DistError, url: str) -> None:
    """In an MPI job, add to an error of `init_process_group` why a rank may be missing."""
    if has_mpi_launcher():
        from meshdist.bootstrap.mpi import ELSEWHERE, UNSEEN

        error.add(f"; {UNSEEN if url.startswith('mpi://') else ELSEWHERE}")


def _connect(slot: WorldSlot, world: World) -> None:
    try:
        connect_to_device(world.default_group, "init_process_group")
    except BaseException as error:
        slot.world = None
        world.abort("its init_process_group failed:", error)
        world.close()
        raise


def _make_registered(slot: WorldSlot, world: World, deadline: Deadline) -> None:
    """Make a registered backend; if that fails on one rank, all ranks raise."""
    error_prefix = f"init_process_group (rank {world.rank} of {world.size})"
    mine: Exception | None = None
    try:
        world.default_group.usable_backend(error_prefix)
    except Exception as error:  # the user's function may raise anything
        mine = error
    try:
        world.store.set(f"engine/{world.rank}", "" if mine is None else _in_words(mine))
        keys = [f"engine/{rank}" for rank in range(world.size)]
        if mine is not None:
            raise mine
        world.store.wait(keys, deadline.remaining_s())
        for rank, words in enumerate(world.store.multi_get(keys)):
            if words:
                raise DistBackendError(f"on rank {rank}: {words.decode()}", peer_failed=True, error_prefix=error_prefix)
    except BaseException as error:
        slot.world = None
        world.abort("its init_process_group failed:", error)
        world.close()
        raise


def enter_owned_world(
    slot: WorldSlot, store: Store, rank: int, world_size: int, backend: str, deadline: Deadline
) -> World:
    """Join the other processes in a store that ends with the world; if that fails, withdraw from the store."""
    from meshdist.bootstrap.join import see_off_late
    from meshdist.runtime.doorbells import SocketDoorbells

    try:
        return enter_world(slot, store, rank, world_size, backend, SocketDoorbells(), deadline, own_store=True)
    except DistNetworkError:
        store.close()
        raise
    except DistTimeoutError:
        if store.is_master:
            see_off_late(store, world_size, min(_STORE_LINGER_S, deadline.timeout_s / 10))
        store.withdraw()
        raise
    except BaseException:
        store.withdraw()
        raise


def enter_world(
    slot: WorldSlot,
    store: Store,
    rank: int,
    world_size: int,
    backend: str,
    bells: Doorbells,
    deadline: Deadline,
    *,
    own_store: bool = False,
    instrumentation: Instrumentation | None = None,
) -> World:
    """Join the other ranks in `store` and put the World into `slot`."""
    # What a world needs, and `import meshdist` does not. No call, and no end of the process, imports it: Ctrl-C in an
    # import may leave its lock held.
    import hashlib  # noqa: F401 - loads OpenSSL; for the names of groups and the comparison of calls

    from meshdist.bootstrap.join import join
    from meshdist.debug.instrumentation import WorldInstrumentation
    from meshdist.debug.signals import SignalWatch
    from meshdist.runtime.doorbells import SocketDoorbells
    from meshdist.runtime.host_identity import my_card
    from meshdist.runtime.peer_monitor import Peers, leave_will

    begin_debugging()
    check_choice()
    card = my_card(bells.base)
    try:
        objection = check_rank_kind(backend, ranks_are_threads=not isinstance(bells, SocketDoorbells))
        joined = join(store, rank, world_size, card, deadline, backend, objection)
        peers = Peers(joined, card, world_size)
        peers.meet()
        if isinstance(bells, SocketDoorbells):
            leave_will(peers, joined, rank)
    except BaseException:
        bells.close()
        raise
    world = World(
        rank,
        world_size,
        backend,
        deadline.timeout_s,
        joined,
        peers,
        bells,
        store if own_store else None,
        instrumentation or WorldInstrumentation(),
    )
    slot.world, slot.orphaned = world, None
    _detach_forks(slot)
    if world.ranks_are_processes:
        world.endings.append(SignalWatch(slot).close)
    return world


def destroy_process_group(group: GroupLike = None) -> None:
    """Leave the world, or close one group.

    Calls in progress are completed first: sends and collectives for at most the group's timeout, receives for 5 s.
    Messages that were sent before can still be received. The end of the world waits up to 5 s for ranks that have yet
    to receive their first message from this one; after that, such messages are lost.

    Args:
        group: The group to close; None or the world's group closes all groups and ends the world, after which
            `init_process_group` may be called again.

    Raises:
        ValueError: There is no world, or the group has already been destroyed.
        Exception: That of an asynchronous save which has failed, as the world ends; if this is called while an
            exception is handled, it is logged.
    """
    if isinstance(group, NonMember):
        return
    world = current_world()
    members = resolve(group)
    if members is not world.default_group:
        world.drop(members)
        return
    current_slot().empty()
    try:
        if sys.exc_info()[1] is None:
            world.finish()
    finally:
        world.close()


def abort_process_group(group: GroupLike = None) -> None:
    """Abort at once: the calls of other ranks that wait for this one raise.

    Called while an exception is handled, it tells the other ranks of the exception.

    Args:
        group: The group; None or the world's group aborts all groups and ends the world.

    Raises:
        ValueError: There is no world.
    """
    if isinstance(group, NonMember):
        return
    world = current_world()
    members = resolve(group)
    cause = sys.exc_info()[1]  # the exception that is being handled
    reason = f"rank {world.rank} called abort_process_group" if cause is None else "it raised"
    if members is not world.default_group:
        members.give_up(giving_up(reason, cause))
        return
    abort_world(world, reason, cause)


def abort_world(world: World, reason: str, cause: BaseException | None = None, what: str = DESTROYED) -> None:
    """Abort all groups of the current world and end it; later calls raise with `what` became of them."""
    current_slot().empty()
    world.abort(reason, cause)
    world.close(what)


def _check_place(rank: int, world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"with store=, world_size must be given, at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"with store=, rank must be given, 0 to {world_size - 1}, got {rank}")


def _in_words(error: Exception) -> str:
    if isinstance(error, DistBackendError):
        return error.what
    return f"{type(error).__name__}: {error}"


def _detach_forks(slot: WorldSlot) -> None:
    """Detach all future forked children from the world in `slot`.

    A child has the memory and sockets of the rank, but not its threads, and its peers do not know it. So its calls
    raise, its exit is silent, and inherited descriptors that would make the rank look alive are closed.
    """
    if slot.orphans_forks or not hasattr(os, "register_at_fork"):
        return
    slot.orphans_forks = True
    known = weakref.ref(slot)

    def in_child() -> None:
        slot = known()
        world = None if slot is None else world_in(slot)
        if slot is not None and world is not None:
            slot.world, slot.orphaned = None, is_of_parent(world.rank, world.card.pid)
            world.disown(slot.orphaned)

    os.register_at_fork(after_in_child=in_child)


def is_of_parent(rank: int, pid: int) -> str:
    """Return the state of a group in a forked child of rank `rank`, whose process is `pid`."""
    return (
        f"belongs to rank {rank} (pid {pid}); this process was forked from it and is not a rank. Fork before"
        " init_process_group, use multiprocessing's start method 'spawn', or call init_process_group here to join"
        " another world"
    )
