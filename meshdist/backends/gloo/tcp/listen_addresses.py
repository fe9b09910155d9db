"""The addresses of this host at which a rank listens for its peers."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from meshdist.errors import DistNetworkError
from meshdist.store import PrefixStore, Store, TCPStore
from meshdist.store.address import resolve
from meshdist.system.platform import ioctl

VARIABLES = ("MESHDIST_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915
_IPV6_LINK_LOCAL = "fe80"
# TEST-NET-1, which no host has: a route to it is the default route. Nothing is sent.
_SOMEWHERE = "192.0.2.1"
_ANY_PORT = 9


def listen_addresses(store: Store, *, one_machine: bool) -> list[str]:
    """Return the addresses of this host at which peers can reach it, in order of use.

    They are those of the interfaces that the environment names; else loopback if all ranks are on one machine; else the
    one on the route to the store's host.

    Raises:
        DistNetworkError: An interface that the environment names does not exist or has no address; or there is no
            address but loopback.
    """
    for variable in VARIABLES:
        names = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
        if names:
            return [_address_of(name, variable) for name in names]
    if one_machine:
        return [LOOPBACK]
    return [_way_to(*_store_host(store)) or _way_to(_SOMEWHERE, _ANY_PORT) or _own_name() or _any_interface()]


def _address_of(interface: str, variable: str) -> str:
    address = _ipv4_address(interface) or _ipv6_address(interface)
    if address is None:
        known = [name for name in _interfaces() if _ipv4_address(name) or _ipv6_address(name)]
        raise DistNetworkError(
            f"{variable}={os.environ[variable]}: there is no interface {interface!r} with an address on this host;"
            f" those that have one are {', '.join(known)}"
        )
    return address


def _ipv4_address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_address(interface: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    for digits, *_, name in map(str.split, lines):
        # A link-local address would need the peer's name of the interface.
        if name == interface and not digits.startswith(_IPV6_LINK_LOCAL):
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return None


def _store_host(store: Store) -> tuple[str, int]:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else (_SOMEWHERE, _ANY_PORT)


def _way_to(host: str, port: int) -> str | None:
    """Return the source address of packets to a host; None if there is no route, or the host is this one."""
    try:
        addresses = resolve(host, port)
    except OSError:
        return None
    for address in addresses:
        with socket.socket(address.family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect(address.sockaddr)
            except OSError:
                continue
            found: str = sock.getsockname()[0]
            if not found.startswith("127.") and found != "::1":
                return found
    return None


def _own_name() -> str | None:
    try:
        addresses = resolve(socket.gethostname(), 0)
    except OSError:
        return None
    return next((str(address.sockaddr[0]) for address in addresses if not address.is_loopback), None)


def _any_interface() -> str:
    for name in _interfaces():
        address = _ipv4_address(name) or _ipv6_address(name)
        if address is not None and not address.startswith("127.") and address != "::1":
            return address
    raise DistNetworkError(
        "this host has no address at which ranks on other hosts could reach it; name an interface that has one in"
        f" {VARIABLES[0]}: there are {', '.join(_interfaces())}"
    )


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]
