"""Find the other ranks: from an init method such as env:// to a store, a rank and a world size."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshdist.deadline import DEFAULT_TIMEOUT_S, Timeout, seconds
from meshdist.store import FileStore, PrefixStore, Store, TCPStore

if TYPE_CHECKING:
    from urllib.parse import SplitResult

Rendezvous = tuple[Store, int, int]
RendezvousHandler = Callable[[str, int, int, float], Rendezvous]
"""Takes the URL, the rank and the world size (-1 where not given) and the timeout in seconds."""

AGENT_STORE_VARIABLE = "MESHDIST_AGENT_STORE"

_NOT_GIVEN = -1


def rendezvous(
    init_method: str, rank: int = _NOT_GIVEN, world_size: int = _NOT_GIVEN, timeout: Timeout = DEFAULT_TIMEOUT_S
) -> Rendezvous:
    """Return the store that the ranks share, this process's rank and the world size.

    Args:
        init_method: A URL whose scheme has a handler.

            - `env://` reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
            - `tcp://host:port` names the host and port at which rank 0 hosts the store.
            - `file:///path` names a file that all ranks can reach.

            Each may end in `?rank=0&world_size=2` in place of the arguments.
        rank: This process's rank, or -1 if `init_method` says it.
        world_size: The number of ranks, or -1 if `init_method` says it.
        timeout: How long to wait for the store, and the store's default: a timedelta or seconds.

    Raises:
        ValueError: The scheme is not known; or something is missing, said twice, no number or out of range.
        DistNetworkError: There is no store of this job where there should be one.
        DistStoreError: The file cannot be used.

    Example:
        >>> store, rank, world_size = rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1")
        >>> rank, world_size
        (0, 1)
        >>> store.close()
    """
    if not isinstance(init_method, str):
        raise TypeError(f"init_method must be a str such as 'env://', got {type(init_method).__name__}")
    scheme, separator, _ = init_method.partition("://")
    handler = _HANDLERS.get(scheme.lower()) if separator else None
    if handler is None:
        known = ", ".join(f"{name}://" for name in sorted(_HANDLERS))
        raise ValueError(f"init_method must begin with one of {known}, got {init_method!r}")
    return handler(init_method, rank, world_size, seconds(timeout))


def register_rendezvous_handler(scheme: str, handler: RendezvousHandler) -> None:
    """Have `rendezvous` use `handler` for URLs of `scheme`.

    Args:
        scheme: What comes before "://".
        handler: Takes the URL, the rank and the world size (-1 where not given) and the timeout in seconds, and returns
            the store, the rank and the world size.

    Raises:
        ValueError: The scheme has a handler already.
    """
    if scheme.lower() in _HANDLERS:
        raise ValueError(f"the scheme {scheme!r} has a rendezvous handler already; choose another name")
    _HANDLERS[scheme.lower()] = handler


def _rendezvous_env(url: str, rank: int, world_size: int, timeout_s: float) -> Rendezvous:
    rank, world_size = _with_query(_split(url), url, rank, world_size)
    needed = ["MASTER_ADDR", "MASTER_PORT"]
    needed += ["RANK"] * (rank == _NOT_GIVEN) + ["WORLD_SIZE"] * (world_size == _NOT_GIVEN)
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"env:// rendezvous: {', '.join(missing)} missing from the environment; start the script with meshrun, or "
            "set them (RANK and WORLD_SIZE may also be given as rank= and world_size=)"
        )
    if rank == _NOT_GIVEN:
        rank = _env_int("RANK")
    if world_size == _NOT_GIVEN:
        world_size = _env_int("WORLD_SIZE")
    host, port = os.environ["MASTER_ADDR"], _env_int("MASTER_PORT")
    _check_ranks(url, rank, world_size)
    if not _is_launchers_store():
        return _tcp_store(url, host, port, rank, world_size, timeout_s), rank, world_size
    # The launcher hosts the store through all restarts; each start of the workers has its own part of it.
    _check_port(url, port, 1)
    attempt = _env_int("TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in os.environ else 0
    store = TCPStore(host, port, is_master=False, timeout=timeout_s)
    return PrefixStore(f"worker/attempt_{attempt}", store), rank, world_size


def _is_launchers_store() -> bool:
    """Return True if MASTER_ADDR and MASTER_PORT are the launcher's, not set by the script for a store of its own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return False
    master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return os.environ.get(AGENT_STORE_VARIABLE, master) == master


def _rendezvous_tcp(url: str, rank: int, world_size: int, timeout_s: float) -> Rendezvous:
    parts = _split(url)
    rank, world_size = _with_query(parts, url, rank, world_size)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url}: {error}; write tcp://host:port, an IPv6 address in brackets") from error
    if not host or port is None or parts.path not in ("", "/"):
        raise ValueError(f"{url}: write tcp://host:port, an IPv6 address in brackets")
    _require_ranks(url, rank, world_size)
    return _tcp_store(url, host, port, rank, world_size, timeout_s), rank, world_size


def _rendezvous_file(url: str, rank: int, world_size: int, timeout_s: float) -> Rendezvous:
    from urllib.parse import unquote

    parts = _split(url)
    rank, world_size = _with_query(parts, url, rank, world_size)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ValueError(f"{url}: write file:///path with three slashes and the file's full path")
    _require_ranks(url, rank, world_size)
    return FileStore(unquote(parts.path), world_size, timeout=timeout_s), rank, world_size


def _tcp_store(url: str, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> TCPStore:
    """Return the store that rank 0 hosts; it is there, the other ranks need not be yet."""
    _check_port(url, port, 0 if world_size == 1 else 1)
    return TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout_s, wait_for_workers=False)


def _check_port(url: str, port: int, lowest: int) -> None:
    if not lowest <= port <= 65535:
        raise ValueError(f"{url}: the port must be between {lowest} and 65535, and the same on all ranks, got {port}")


def _split(url: str) -> SplitResult:
    from urllib.parse import urlsplit  # not needed to import meshdist

    try:
        return urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error


def _with_query(parts: SplitResult, url: str, rank: int, world_size: int) -> tuple[int, int]:
    """Return `rank` and `world_size` with what the URL's query says of them."""
    from urllib.parse import parse_qsl

    given = {"rank": rank, "world_size": world_size}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in given:
            raise ValueError(f"{url}: the query may have rank and world_size, got {name!r}")
        if given[name] != _NOT_GIVEN:
            raise ValueError(f"{url}: {name} is given twice ({given[name]} and {text}); give it once")
        given[name] = _to_int(text, f"{url}: {name}")
        if given[name] < 0:
            raise ValueError(f"{url}: {name} must not be negative, got {text}")
    return given["rank"], given["world_size"]


def _require_ranks(url: str, rank: int, world_size: int) -> None:
    missing = [name for name, value in (("rank", rank), ("world_size", world_size)) if value == _NOT_GIVEN]
    if missing:
        raise ValueError(
            f"{url}: {' and '.join(missing)} missing, and not assigned automatically; give them as arguments or as "
            "?rank=0&world_size=2"
        )
    _check_ranks(url, rank, world_size)


def _check_ranks(url: str, rank: int, world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"{url}: world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"{url}: rank must be between 0 and world_size - 1 = {world_size - 1}, got {rank}")


def _env_int(name: str) -> int:
    return _to_int(os.environ[name], f"the environment variable {name}")


def _to_int(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{what} must be a whole number, got {text!r}") from None


# What users add here holds for the whole process, as a backend's name does: a table of its own, not a part of a World.
_HANDLERS: dict[str, RendezvousHandler] = {
    "env": _rendezvous_env,
    "file": _rendezvous_file,
    "tcp": _rendezvous_tcp,
}
