"""A link between two hosts, which are network namespaces: it delays, reorders or loses packets, resets connections, or
holds packets back.

Each namespace has a tun device, and a thread of this process carries the packets from one to the other: a link with
faults without the kernel's traffic control, which not every kernel has.
"""

import fcntl
import heapq
import os
import random
import select
import socket
import struct
import threading
import time
import uuid

from two_hosts import TwoHosts, ip

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_SYN, _RST = 0x02, 0x04
_MTU = 60_000  # few packets, as each costs the thread some tens of microseconds


class FaultyLink:
    """Carries packets between two descriptors; the attributes may be set at any time.

    Args:
        fds: Of the tun devices; host 0's first.
    """

    def __init__(self, fds):
        self.delay_s = 0.0
        self.jitter_s = 0.0  # up to so much more delay for each packet, so that packets overtake each other
        self.loss = 0.0  # the share of packets that are lost
        self.cut_from = set()  # the hosts whose packets are all lost
        # The hosts that are told, as by the next packet of a connection, that it was reset; ports of which not.
        self.reset_at = set()
        self.spared_ports = set()
        self.num_resets = 0
        self.num_carried = 0
        self._fds = fds
        self._random = random.Random(7)
        self._waiting = []
        self._ended, self._ender = os.pipe()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self, *hosts):
        """Lose what these hosts send, or both, until `mend`."""
        self.cut_from = set(hosts or (0, 1))

    def mend(self):
        self.delay_s = self.jitter_s = self.loss = 0.0
        self.cut_from = set()

    def reset(self, *hosts):
        """Reset the connection whose packet comes next, at these hosts, or at both; see `spared_ports`."""
        self.reset_at = set(hosts or (0, 1))

    def close(self):
        os.write(self._ender, b"x")
        self._thread.join()
        for fd in (*self._fds, self._ended, self._ender):
            os.close(fd)

    def _run(self):
        while True:
            timeout_s = max(self._waiting[0][0] - time.monotonic(), 0) if self._waiting else None
            ready, _, _ = select.select([*self._fds, self._ended], [], [], timeout_s)
            if self._ended in ready:
                return
            for host, fd in enumerate(self._fds):
                if fd in ready:
                    self._take(host, os.read(fd, 1 << 16))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, host, packet = heapq.heappop(self._waiting)
                os.write(self._fds[1 - host], packet)

    def _take(self, host, packet):
        self.num_carried += 1
        if self.reset_at:
            self._reset_by(host, packet)
        if host in self.cut_from or self._random.random() < self.loss:
            return
        due_s = time.monotonic() + self.delay_s + self._random.random() * self.jitter_s
        heapq.heappush(self._waiting, (due_s, self.num_carried, host, packet))

    def _reset_by(self, host, packet):
        """Inject resets as a middlebox does that sees a packet of a connection that it has forgotten."""
        header = (packet[0] & 15) * 4
        source, target, sequence, acknowledged, _, flags = struct.unpack_from("!HHIIBB", packet, header)
        if packet[9] != socket.IPPROTO_TCP or flags & (_SYN | _RST) or {source, target} & self.spared_ports:
            return
        back = packet[16:20] + packet[12:16]
        for at in sorted(self.reset_at):
            if at == host:  # what its packet acknowledges is what it expects next
                os.write(self._fds[at], _reset_packet(back, target, source, acknowledged))
            else:
                os.write(self._fds[at], _reset_packet(packet[12:20], source, target, sequence))
        self.num_resets += len(self.reset_at)
        self.reset_at = set()


def _reset_packet(addresses, source, target, sequence):
    tcp = struct.pack("!HHIIBBHHH", source, target, sequence, 0, 5 << 4, _RST, 0, 0, 0)
    pseudo = addresses + struct.pack("!BBH", 0, socket.IPPROTO_TCP, len(tcp))
    tcp = tcp[:16] + struct.pack("!H", _checksum(pseudo + tcp)) + tcp[18:]
    ip_header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, socket.IPPROTO_TCP, 0) + addresses
    return ip_header[:10] + struct.pack("!H", _checksum(ip_header)) + ip_header[12:] + tcp


def _checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class FaultyHosts(TwoHosts):
    """Two hosts whose only connection is the `link`."""

    addresses = ("10.213.79.1", "10.213.79.2")

    def build(self):
        self.link = None
        tag, fds = uuid.uuid4().hex[:6], []
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            device = f"tun{tag}{index}"
            fds.append(_tun(device))
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "mtu", str(_MTU), "up")
        self.link = FaultyLink(fds)

    def remove_link(self):
        if self.link is not None:
            self.link.close()


def _tun(device):
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError as error:
        raise PermissionError(f"tun devices cannot be made here: {error}") from error
    return fd
