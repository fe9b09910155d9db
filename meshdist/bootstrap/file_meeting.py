"""Ranks that meet in a file: `file://`, and beside torchrun's own store."""

from __future__ import annotations

import os
from contextlib import suppress
from glob import escape, glob
from urllib.parse import quote, unquote

from meshdist.bootstrap.rank_assignment import number_ranks, refuse_this_process
from meshdist.bootstrap.spawned import MEET_STRANGERS_S, check_common_secret
from meshdist.bootstrap.url import ImpossibleRankError, parse_init_url
from meshdist.errors import DistStoreError, DistTimeoutError
from meshdist.security.credentials import SECRET_VARIABLE
from meshdist.store import Store
from meshdist.store.file import FileStore, OtherJobsFileError
from meshdist.system.deadline import Deadline

_NAMED_GROUPS = 5


def rendezvous_file(text: str, rank: int, world_size: int, timeout_s: float) -> tuple[Store, int, int]:
    """Return what `rendezvous` does, for a `file://` URL."""
    url = parse_init_url(text, rank, world_size)
    if url.parts.netloc not in ("", "localhost") or not url.parts.path:
        raise ValueError(f"{text}: write file:///path with three slashes and the file's full path")
    # Refuse an impossible rank where the others meet, so that they get the error too.
    impossible: ImpossibleRankError | None = None
    try:
        url.require(rank=False)
    except ImpossibleRankError as error:
        impossible = error
    # One file per job, so that jobs do not disturb each other.
    path = unquote(url.parts.path)
    own = path + (f".{quote(url.group_name, safe='')}" if url.group_name else "")
    check_common_secret(text, url.world_size, lambda: meet_in_file(own, url.rank, url.world_size, MEET_STRANGERS_S))
    try:
        return meet_in_file(own, url.rank, url.world_size, timeout_s)
    except DistTimeoutError as error:
        raise DistTimeoutError(f"{error}{_other_names(path, url.group_name)}") from None
    except (DistStoreError, ValueError):
        if impossible is not None:
            raise ValueError(str(impossible)) from None
        raise


def _other_names(path: str, group_name: str) -> str:
    """Return the other group names with a file at this path, for the end of a message."""
    # A store's auxiliary files have other names: list only files of jobs.
    files = [file for file in [path, *sorted(glob(f"{escape(path)}.*"))] if os.path.isfile(file)]
    others = [name for name in (unquote(file[len(path) + 1 :]) for file in files) if name != group_name]
    if not others:
        return ""
    named = ", ".join(map(repr, others[:_NAMED_GROUPS])) + (", ..." if len(others) > _NAMED_GROUPS else "")
    return f"; this process joined as group_name {group_name!r}, and there is a meeting at this file as {named}"


def meet_in_file(path: str, rank: int, world_size: int, timeout_s: float) -> tuple[Store, int, int]:
    """Return the store in a file, the number of this process and the world size."""
    deadline = Deadline(timeout_s)
    try:
        store = FileStore(path, world_size, timeout=timeout_s)
    except OtherJobsFileError as error:
        # Those who wait there are told: it is most likely one job, as only this user can write to the file.
        with suppress(DistStoreError), FileStore(path, timeout=timeout_s) as others:
            refuse_this_process(others, f"it has another {SECRET_VARIABLE}")
        raise error
    try:
        number = number_ranks(store, rank, world_size, deadline, all_or_none=True)
    except BaseException:
        store.withdraw()
        raise
    return store, number, world_size
