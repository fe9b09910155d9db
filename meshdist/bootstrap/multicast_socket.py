"""Multicast datagrams."""

from __future__ import annotations

import errno
import socket
import struct
import sys

from meshdist.errors import DistNetworkError
from meshdist.store.address import endpoint

_MOST_BYTES = 65_507
_THIS_HOST, _LOCAL_NETWORK = 0, 1  # how many networks a datagram may cross

Datagram = tuple[bytes, str]
"""A datagram and the host it came from."""


def is_multicast(host: str) -> bool:
    """Return True if `host` is a multicast address, such as 239.1.2.3 or ff15::1; False for a name."""
    import ipaddress  # not needed to import meshdist

    try:
        return ipaddress.ip_address(host).is_multicast
    except ValueError:
        return False


class MulticastSocket:
    """Sends datagrams to a multicast address over all interfaces, and receives those that others send there.

    Any number of sockets on a host can share an address and port, and each receives its own datagrams as well.
    Datagrams may be lost, duplicated or reordered. An IPv6 address may include its interface, "ff12::1%eth0". With
    `this_host_only`, nothing that is sent leaves this host.

    Raises:
        DistNetworkError: A socket that does not share it has the port, or no interface supports multicast.
    """

    def __init__(self, address: str, port: int, this_host_only: bool) -> None:
        self._address, _, zone = address.partition("%")
        self._port = port
        self.name = endpoint(address, port)
        self._is_ipv6 = ":" in address
        self._sock = self._bound(_THIS_HOST if this_host_only else _LOCAL_NETWORK)
        try:
            self._interfaces = self._join(zone)
        except BaseException:
            self._sock.close()
            raise

    def _bound(self, hops: int) -> socket.socket:
        try:
            sock = socket.socket(socket.AF_INET6 if self._is_ipv6 else socket.AF_INET, socket.SOCK_DGRAM)
        except OSError as error:
            raise DistNetworkError(f"{self.name} cannot be used: {error}") from error
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform != "linux" and hasattr(socket, "SO_REUSEPORT"):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if self._is_ipv6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, hops)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
                sock.bind(("::", self._port))
            else:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, hops)
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
                sock.bind((self._address, self._port))
        except OSError as error:
            sock.close()
            hint = "; choose another port" if error.errno == errno.EADDRINUSE else ""
            raise DistNetworkError(f"cannot listen on {self.name}: {error}{hint}") from error
        return sock

    def _join(self, zone: str) -> list[int]:
        """Join the group on every interface that supports it, and return their numbers."""
        joined, failure = [], "this host has no network interface"
        for number, name in socket.if_nameindex():
            if zone in ("", name, str(number)):
                try:
                    self._join_on(number)
                    joined.append(number)
                except OSError as error:
                    failure = f"{name}: {error}"
        if not joined:
            raise DistNetworkError(f"{self.name} cannot be joined on any interface ({failure})")
        return joined

    def _join_on(self, interface: int) -> None:
        if self._is_ipv6:
            group = socket.inet_pton(socket.AF_INET6, self._address) + struct.pack("@I", interface)
            self._sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
        else:
            group = struct.pack("@4s4si", socket.inet_aton(self._address), bytes(4), interface)
            self._sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)

    def send(self, data: bytes) -> None:
        """Send `data` over every interface that takes it; raise DistNetworkError if none does."""
        failure: OSError | None = None
        num_sent = 0
        for interface in self._interfaces:
            try:
                self._send_over(interface, data)
                num_sent += 1
            except OSError as error:  # such as an interface that is down, or has no address of this family
                failure = error
        if not num_sent and failure is not None:
            raise DistNetworkError(
                f"{self.name} cannot be reached over any interface: {failure}; is there a route for multicast? "
                "The loopback interface alone supports IPv4 only"
            ) from failure

    def _send_over(self, interface: int, data: bytes) -> None:
        if self._is_ipv6:
            self._sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, interface)
        else:
            choice = struct.pack("@4s4si", bytes(4), bytes(4), interface)
            self._sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, choice)
        self._sock.sendto(data, (self._address, self._port))

    def receive(self, timeout_s: float) -> Datagram | None:
        """Return the next datagram and the host it came from; None if none arrives in time."""
        self._sock.settimeout(max(timeout_s, 1e-4))
        try:
            data, source = self._sock.recvfrom(_MOST_BYTES)
        except OSError:  # a timeout, or an ICMP error for an earlier datagram
            return None
        host, scope = source[0], source[3] if self._is_ipv6 else 0
        return data, f"{host}%{scope}" if scope and "%" not in host else str(host)

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> MulticastSocket:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
