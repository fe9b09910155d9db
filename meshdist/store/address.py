"""Host names and ports: resolving, naming and listening on them."""

from __future__ import annotations

import errno
import socket
from typing import Any, NamedTuple

from meshdist.errors import DistNetworkError
from meshdist.security.credentials import is_insecure_allowed, require_secret
from meshdist.security.encryption import is_loopback

_BACKLOG = 4096
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})


class PortTakenError(DistNetworkError):
    """Report a port that another socket listens on."""


class Address(NamedTuple):
    """One resolved address."""

    family: socket.AddressFamily
    sockaddr: tuple[Any, ...]

    @property
    def is_loopback(self) -> bool:
        """True if only processes of this host can reach it."""
        return is_loopback(str(self.sockaddr[0]))


def endpoint(host: str, port: int) -> str:
    """Return "host:port", with an IPv6 literal in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_port(port: int, name: str = "port") -> int:
    """Return `port`; raise TypeError or ValueError unless it is an integer from 0 to 65535."""
    if not isinstance(port, int) or isinstance(port, bool):
        raise TypeError(f"{name} must be an integer, got {type(port).__name__}")
    if not 0 <= port <= 65535:
        raise ValueError(f"{name} must be between 0 and 65535, got {port}")
    return port


def resolve(host: str, port: int) -> list[Address]:
    """Return the addresses of `host`, in the order in which to try them; raise OSError if it is unknown."""
    try:
        found = socket.getaddrinfo(_encoded(host), port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise OSError(f"the name {host!r} cannot be resolved: {error.strerror}") from error
    return list(dict.fromkeys(Address(family, sockaddr) for family, _, _, _, sockaddr in found))


def _encoded(host: str) -> str | bytes:
    """Return an IPv4 address as bytes: `getaddrinfo` encodes text by IDNA, whose tables take 2 ms to import."""
    return host.encode("ascii") if host.isascii() and host.replace(".", "").isdecimal() else host


def is_loopback_only(addresses: list[Address]) -> bool:
    """Return True if none of `addresses` is reachable from other hosts."""
    return all(address.is_loopback for address in addresses)


def listen(host: str, port: int, secret: bytes) -> socket.socket:
    """Return a non-blocking listening socket for `host`:`port`; port 0 picks a free one.

    A loopback host is bound as it is, any other on all interfaces: the name that other ranks know need not be the
    address of an interface (address translation, several networks).

    Raises:
        PortTakenError: The port is taken.
        DistNetworkError: The host is unknown, or can be reached from outside, and there is no secret.
    """
    try:
        addresses = resolve(host, port)
    except OSError as error:
        raise DistNetworkError(f"cannot listen on {endpoint(host, port)}: {error}") from error
    if not is_loopback_only(addresses):
        require_secret(endpoint(host, port), secret)
    last_error: OSError | None = None
    for address in _bind_candidates(host, port, addresses, secret):
        try:
            return _listen_on(address)
        except OSError as error:
            last_error = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    if last_error is not None and last_error.errno == errno.EADDRINUSE:
        raise _taken(host, port) from last_error
    raise DistNetworkError(f"cannot listen on {endpoint(host, port)}: {last_error}") from last_error


def listen_everywhere(host: str, port: int, secret: bytes) -> list[socket.socket]:
    """Return listening sockets for all addresses of `host`, on one port, as `listen` does for one of them.

    If localhost means both 127.0.0.1 and ::1, ranks may use either; all other hosts need one socket.

    Raises:
        PortTakenError: The port is taken at one of them.
        DistNetworkError: The host is unknown, or can be reached from outside, and there is no secret.
    """
    listeners = [listen(host, port, secret)]
    try:
        bound = listeners[0].getsockname()
        for address in resolve(host, bound[1]) if Address(listeners[0].family, bound).is_loopback else ():
            if address.family != listeners[0].family and address.is_loopback:
                listeners.append(_listen_on(address))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            _close(listeners)
            if port == 0:
                return listen_everywhere(host, port, secret)  # it was free in one IP version only
            raise _taken(host, port) from error
        # Otherwise this host lacks the address, although its name resolves to it.
    return listeners


def _close(listeners: list[socket.socket]) -> None:
    for listener in listeners:
        listener.close()


def _taken(host: str, port: int) -> PortTakenError:
    return PortTakenError(
        f"{endpoint(host, port)} is taken by another socket: choose another port, or port 0 for any free one"
    )


def _bind_candidates(host: str, port: int, addresses: list[Address], secret: bytes) -> list[Address]:
    if is_loopback_only(addresses):
        # Some systems map the host's own name to 127.0.1.1; other hosts resolve it differently and must be able to
        # connect.
        is_own_name = host.lower() not in _LOOPBACK_NAMES and not _is_literal(host)
        if not is_own_name or not (secret or is_insecure_allowed()):
            return addresses
        wants_ipv6 = True
    else:
        wants_ipv6 = any(address.family == socket.AF_INET6 for address in addresses)
    anywhere = [Address(socket.AF_INET, ("0.0.0.0", port))]
    return [Address(socket.AF_INET6, ("::", port)), *anywhere] if wants_ipv6 else anywhere


def _is_literal(host: str) -> bool:
    """Return True if `host` is an address rather than a name."""
    try:
        socket.getaddrinfo(_encoded(host), None, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return True


def _listen_on(address: Address) -> socket.socket:
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # despite connections of a finished run in TIME_WAIT
        if address.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address.sockaddr[0] == "::" else 1)
        sock.bind(address.sockaddr)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def adopt_listener(fd: int, port: int, secret: bytes) -> socket.socket:
    """Take over `fd`, a bound TCP socket, as the listener.

    Raises:
        ValueError: `fd` is not such a socket, or is bound to a port other than `port`.
        DistNetworkError: It can be reached from other hosts, and there is no secret.
    """
    try:
        sock = socket.socket(fileno=fd)
    except (OSError, TypeError) as error:
        raise ValueError(f"master_listen_fd must be a bound TCP socket, got {fd!r}: {error}") from error
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            raise ValueError(f"master_listen_fd must be a bound TCP socket, got {sock}")
        address = Address(sock.family, sock.getsockname())
        host, own_port = address.sockaddr[:2]
        if port not in (0, own_port):
            raise ValueError(f"master_listen_fd is bound to port {own_port}, but port says {port}")
        if not address.is_loopback:
            require_secret(endpoint(host, own_port), secret)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.detach()  # still the caller's
        raise
    sock.setblocking(False)
    return sock


def reachable_from_here(listener: socket.socket) -> Address:
    """Return the address at which this host itself reaches `listener`."""
    host, *rest = listener.getsockname()
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return Address(listener.family, (loopback, *rest))
