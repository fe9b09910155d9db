"""A rank that is a task of Ray: it enters a world, runs a function, and says how that ended."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ray
import ray.cloudpickle
from ray.util import get_node_ip_address

from meshdist.errors import DistError
from meshdist.launch.failures import follows_from_peer
from meshdist.launch.rank_functions import RankResult, frames_of_user
from meshdist.launch.worker import write_whole_lines
from meshdist.lifecycle import abort_process_group, destroy_process_group
from meshdist.ray.meeting import Meeting, entry_of, put_entry
from meshdist.runtime.context import current_slot, is_initialized
from meshdist.system.deadline import Deadline


class Seat(NamedTuple):
    """Where a rank runs."""

    node_id: str  # Ray's
    pid: int
    host: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Place(NamedTuple):
    """Which rank of which job a process is, and how long its calls may wait."""

    job: str  # its name, of this start alone
    rank: int
    size: int
    local_rank: int
    join_timeout_s: float
    timeout_s: float


class Raised(NamedTuple):
    """The failure of a rank, whose exception may be of a type that only its process can unpickle."""

    time_s: float  # since the epoch
    secondary: bool  # it follows from the failure of another rank
    traceback: str
    exception: bytes | None  # pickled, if that is possible

    def cause(self) -> BaseException | None:
        """Return the exception, or None where it cannot be unpickled."""
        try:
            found = ray.cloudpickle.loads(self.exception) if self.exception is not None else None
        except Exception:  # whatever an exception's own code raises
            return None
        return found if isinstance(found, BaseException) else None


def my_seat() -> Seat:
    """Return where this process runs."""
    context = ray.get_runtime_context()
    return Seat(context.get_node_id(), os.getpid(), f"{socket.gethostname()}, {get_node_ip_address()}")


def seat_name(job: str, rank: int) -> str:
    """Return the name of the entry that says where a rank of a job runs."""
    return f"{job} {rank}"


def seat_of(job: str, rank: int) -> Seat | None:
    """Return where a rank of a job runs; None if it has not started."""
    entry = entry_of(seat_name(job, rank))
    return None if entry is None else Seat(*json.loads(entry))


def local_ranks(nodes: Sequence[str]) -> list[int]:
    """Return the number of each rank among those of its node, from the node of each."""
    return [nodes[:rank].count(node) for rank, node in enumerate(nodes)]


def enter(place: Place, call: str) -> None:
    """Enter the world of the job, which becomes that of this process; `call` is for errors.

    Raises:
        DistError: The ranks did not meet.
    """
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    advice = "did its process end? Ray's log of it says why"
    meeting = Meeting(place.job, place.rank, place.size, Deadline(place.join_timeout_s), call, advice)
    meeting.enter_world(current_slot(), place.timeout_s)


def leave() -> None:
    """Leave the world, if the function has not done it."""
    if is_initialized():
        destroy_process_group()


def run_rank(place: Place, job: Sequence[Any]) -> RankResult | Raised:
    """Return what the function of a job returns, or how it failed; `job` is a reference to the function, in a list."""
    put_entry(seat_name(place.job, place.rank), json.dumps(my_seat()).encode())
    fn, args, kwargs = ray.get(job[0])
    write_whole_lines()
    try:
        enter(place, "meshdist.ray.run")
        result = RankResult.of(_returned(fn, args, kwargs), place.rank, ray.cloudpickle.dumps)
        leave()
    except BaseException as error:  # handed to the caller of run
        raised = _raised(error)
        with suppress(DistError):
            if is_initialized():
                abort_process_group()
        return raised
    finally:
        _end_groups()
    return result


def _end_groups() -> None:
    """Leave the groups of ray.util.collective that the function has made: Ray keeps the process."""
    module = sys.modules.get("meshdist.ray.ray_group")
    if module is not None:
        with suppress(DistError):
            module.end_all()


def _returned(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return fn(*args, **kwargs)
    except SystemExit as error:
        if error.code in (None, 0):
            return None  # as a script would end
        raise


def _raised(error: BaseException) -> Raised:
    time_s = time.time()
    try:
        pickled = ray.cloudpickle.dumps(error)
    except Exception:  # whatever an exception's own code raises
        pickled = None
    lines = traceback.format_exception(type(error), error, frames_of_user(error))
    return Raised(time_s, follows_from_peer(error), "".join(lines), pickled)
