"""Where the processes of a world listen for TCP, and a TCP client that is a stranger there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_LISTENS = "0A"


def listening_at(pid: int) -> list[tuple[str, int]]:
    """Return the IPv4 addresses and ports at which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except FileNotFoundError:
            continue
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == _LISTENS and f"socket:[{inode}]" in inodes:
            host, port = local.split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def num_fds(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))
