"""A store that one process hosts and others reach over TCP."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from meshdist.errors import DistNetworkError, DistStoreError
from meshdist.security.credentials import require_secret, secret_from_environment
from meshdist.security.encryption import Encryption, encryption_from_environment
from meshdist.security.handshake import HandshakeUnanswered
from meshdist.store.address import (
    Address,
    PortTakenError,
    adopt_listener,
    check_port,
    endpoint,
    is_loopback_only,
    listen_everywhere,
    reachable_from_here,
    resolve,
)
from meshdist.store.client import StoreClient
from meshdist.store.connect import Resolver
from meshdist.store.interface import DEFAULT_STORE_TIMEOUT_S, Store, Value, encode_key, encode_value, missing_error
from meshdist.store.prefix import PrefixStore
from meshdist.store.request import DryStore, RequestStore, dry_store
from meshdist.store.table import Op, Status
from meshdist.system.deadline import Deadline, Timeout

if TYPE_CHECKING:
    from meshdist.store.server import StoreServer

# The port that a dry run picks for port 0.
_DRY_PORT = 29500


def _is_flag(value: object) -> bool:
    numpy = sys.modules.get("numpy")  # launchers do without
    return isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_))


class TCPStore(RequestStore):
    """A store that one process, the master, hosts, and that others reach over TCP.

    Only processes with the job's secret can connect. Without a secret, only this host's loopback addresses can be used.
    Connections from other hosts are encrypted by TLS, see MESHDIST_ENCRYPTION. After a connection reset, the client
    reconnects, and each request is executed exactly once.

    Args:
        host_name: The master's host.
        port: The master's port; on the master, 0 selects a free port, which the attribute `port` returns.
        world_size: The number of stores that will join, including the master's; None or -1 if it is not fixed.
        is_master: Host the store in this process, in a thread of its own.
        timeout: How long to wait for the master and the others, and the calls' default: a timedelta or seconds.
        wait_for_workers: With a `world_size`, return only when that many have joined.
        multi_tenant: On the master: if a store of this job already uses the port, join it; a store that this process
            hosts ends only when its last client has left.
        master_listen_fd: On the master: a bound socket to listen on instead of a new one; the store closes it.
        use_libuv: Accepted for compatibility, and ignored.
        secret: The job's secret; MESHDIST_SECRET if None.

    Raises:
        TypeError: An argument has a wrong type, such as a timeout in the position of `is_master`.
        DistNetworkError: The port is taken, the master does not answer, or is not a store of this job; or the host can
            be reached from other hosts and there is no secret; or only one of the two sides uses TLS.
        ValueError: The variables of TLS and encryption contradict each other, or name files that cannot be used.
        DistStoreError: Fewer than `world_size` stores joined in time; the message says how many did.

    Example:
        >>> from meshdist import TCPStore
        >>> with TCPStore("127.0.0.1", 0, is_master=True) as store, TCPStore("127.0.0.1", store.port) as client:
        ...     store.set("key", "value")
        ...     client.get("key")
        b'value'
    """

    _client: StoreClient | DryStore
    _closer: weakref.finalize[Any, Any]

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_STORE_TIMEOUT_S,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        secret: bytes | None = None,
    ) -> None:
        if not isinstance(host_name, str) or not host_name:
            raise ValueError(f"host_name must be a host's name or address, got {host_name!r}")
        flags = {"is_master": is_master, "wait_for_workers": wait_for_workers, "multi_tenant": multi_tenant}
        for name, flag in flags.items():
            if not _is_flag(flag):
                raise TypeError(f"{name} must be True or False, got {type(flag).__name__} {flag!r}")
        if world_size is not None and (isinstance(world_size, bool) or not isinstance(world_size, int)):
            raise TypeError(
                f"world_size must be an integer, None or -1, got {type(world_size).__name__} {world_size!r}"
            )
        if world_size is not None and (world_size == 0 or world_size < -1):
            raise ValueError(f"world_size must be the number of stores that will join, None or -1, got {world_size!r}")
        if not is_master and check_port(port) == 0:
            raise ValueError("port 0 picks a free port on the master only; here, pass the port that it picked")
        deadline = Deadline(timeout)
        self._host = host_name
        self._port = check_port(port)
        self._timeout_s = deadline.timeout_s
        self._secret = secret_from_environment() if secret is None else secret
        dry = dry_store(f"TCPStore {endpoint(host_name, self._port or _DRY_PORT)}")
        if dry is not None:
            self._client, self._is_master = dry, is_master
            self._port = self._port or _DRY_PORT
            self._closer = weakref.finalize(self, dry.close)
            return
        encryption = encryption_from_environment(self._secret)
        server, resolver = self._host_store(encryption, multi_tenant, master_listen_fd) if is_master else (None, None)
        resolver = resolver or partial(_resolve_checked, self._host, self._port, self._secret)
        client = StoreClient(endpoint(host_name, self._port), resolver, self._secret, encryption)
        self._client = client
        self._is_master = server is not None
        self._take_refusals = server.take_refusals if server is not None else list[str]
        self._closer = weakref.finalize(self, _close, client, server)
        try:
            self._join_patiently(None if world_size == -1 else world_size, wait_for_workers, deadline)
        except BaseException:
            self.close()
            raise

    def _host_store(
        self, encryption: Encryption, multi_tenant: bool, listen_fd: int | None
    ) -> tuple[StoreServer | None, Resolver | None]:
        secret = self._secret
        try:
            if listen_fd is not None:
                listener, *others = [adopt_listener(listen_fd, self._port, secret)]
            else:
                listener, *others = listen_everywhere(self._host, self._port, secret)
        except PortTakenError:
            if not multi_tenant:
                raise
            return None, None
        self._port = listener.getsockname()[1]
        address = reachable_from_here(listener)
        encryption.prepare(str(each.getsockname()[0]) for each in (listener, *others))
        try:
            from meshdist.store.server import StoreServer  # one process of a job hosts the store

            server = StoreServer(listener, secret, multi_tenant, others, encryption)
        except OSError as error:
            raise DistNetworkError(f"{endpoint(self._host, self._port)} cannot be served: {error}") from error
        server.start()
        return server, lambda: [address]

    def _join_patiently(self, world_size: int | None, wait_for_workers: bool, deadline: Deadline) -> None:
        while True:
            self._client.connect(deadline)
            try:
                self._join(world_size, wait_for_workers, deadline)
                return
            except DistNetworkError:
                # That store was just ending, such as an earlier run's on the same port; ours is yet to start.
                if self._is_master or deadline.expired():
                    raise

    def _join(self, world_size: int | None, wait_for_workers: bool, deadline: Deadline) -> None:
        size = b"" if world_size is None else b"%d" % world_size
        awaited = size if wait_for_workers else b""
        status, reply = self._client.request(Op.JOIN, [size, awaited], deadline.remaining_s())
        if status is Status.INVALID:
            raise ValueError(f"TCPStore {self._client.name}: {reply[0].decode()}")
        if status is Status.MISSING:
            raise DistStoreError(
                f"TCPStore {self._client.name}: {reply[0].decode()} of {world_size} had joined after "
                f"{deadline.timeout_s:g} s; did the others start, with this address and port?"
            )

    def _request(self, op: Op, args: list[bytes], timeout_s: float) -> list[bytes]:
        status, reply = self._client.request(op, args, timeout_s)
        if status is Status.MISSING:
            raise missing_error(f"TCPStore {self._client.name}", [key.decode() for key in reply], timeout_s)
        if status is Status.INVALID:
            raise ValueError(reply[0].decode())
        return reply

    def set_last_will(self, values: Mapping[str, Value]) -> None:
        """Set the last will: keys that the server sets, if missing, when this client's connection ends in any way.

        This tells the other processes that this one was killed or disconnected. If the connection is reset while this
        process is alive, it reconnects; the server waits for this for 9 seconds. Use a separate store for the last
        will, and make no other calls on it, since they may drop connections. A later call replaces the values.

        Example:
            >>> from meshdist import TCPStore
            >>> with TCPStore("127.0.0.1", 0, is_master=True) as store:
            ...     client = TCPStore("127.0.0.1", store.port)
            ...     client.set_last_will({"gone": "client"})
            ...     client.close()
            ...     store.get("gone")
            b'client'
        """
        pairs = [part for key, value in values.items() for part in (encode_key(key), encode_value(value))]
        self._request(Op.SET_LAST_WILL, pairs, self._timeout_s)

    @property
    def host(self) -> str:
        """The master's host, as it was given."""
        return self._host

    @property
    def is_master(self) -> bool:
        """Whether the keys are held by this process, and end with this store."""
        return self._is_master

    @property
    def port(self) -> int:
        """The master's port."""
        return self._port

    def take_refusals(self) -> list[str]:
        """Return, on the master, the processes of meshdist that the store refused since the last call, and why."""
        return self._take_refusals()

    def disown(self) -> None:
        """In a forked process: close the inherited connections, which must end when the parent does."""
        if isinstance(self._client, StoreClient):
            self._client.follow_fork()

    def close(self) -> None:
        """Leave the store; on the master, end it. Calls that wait fail. May be called more than once."""
        self._closer()

    def __repr__(self) -> str:
        return f"TCPStore({self._host!r}, {self._port})"


def secret_of(store: Store) -> bytes:
    """Return the secret of the job that a store belongs to: that of a TCPStore, else the one in the environment."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store._secret if isinstance(store, TCPStore) else secret_from_environment()


def connect_again(store: TCPStore, timeout_s: float) -> TCPStore:
    """Return another client of a store; where it is silent at first, its host may be stopped or cut off for a moment.

    Raises:
        DistNetworkError: It was so for the whole time, or the store has ended.
    """
    deadline = Deadline(timeout_s)
    while True:
        try:
            return TCPStore(store.host, store.port, timeout=max(deadline.remaining_s(), 1e-3), secret=store._secret)
        except HandshakeUnanswered as error:  # which takes some seconds
            if deadline.expired():
                raise DistNetworkError(
                    f"the store at {endpoint(store.host, store.port)} does not answer on a new connection within"
                    f" {timeout_s:g} s; is its process stopped, or the network to its host cut?"
                ) from error


def _close(client: StoreClient, server: StoreServer | None) -> None:
    client.close()
    if server is not None:
        server.close()


def _resolve_checked(host: str, port: int, secret: bytes) -> list[Address]:
    addresses = resolve(host, port)
    if not is_loopback_only(addresses):
        require_secret(endpoint(host, port), secret)
    return addresses
