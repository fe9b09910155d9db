"""Two network namespaces joined by a veth pair, which stand for two hosts; and the launcher that starts ranks in them.

Run as `python -m sidebyside.hosts NAMESPACE,NAMESPACE PER_HOST PORT ARGUMENTS...`, it starts so many ranks in each, as
`python ARGUMENTS...`, and ends when they do.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

ADDRESSES = ("10.213.78.1", "10.213.78.2")
INTERFACE = "cable"


class NoHostsError(RuntimeError):
    """Namespaces cannot be made here."""


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Make the namespaces, and remove them at the end of the block; yield their names."""
    tag = secrets.token_hex(3)
    names = [f"side-{tag}-{index}" for index in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        ends = [("type", "veth", "peer", INTERFACE, "netns", names[1])]
        _ip("link", "add", INTERFACE, "netns", names[0], *ends[0])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def launcher(names: list[str], ranks: int, encryption: str = "on") -> list[str]:
    """Return the command that starts `ranks` ranks, half of them in each namespace."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    variable = f"MESHDIST_ENCRYPTION={encryption}"
    return ["env", variable, sys.executable, "-m", "sidebyside.hosts", ",".join(names), str(ranks // 2), str(port)]


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise NoHostsError("needs the program ip (iproute2)") from None
    except subprocess.CalledProcessError as error:
        raise NoHostsError(f"ip {' '.join(words)}: {error.stderr.strip()}") from None


def _launch(names: list[str], per_host: int, port: str, arguments: list[str]) -> int:
    world_size = per_host * len(names)
    common = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(per_host),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "MESHDIST_SECRET": secrets.token_hex(16),
    }
    processes = []
    for rank in range(world_size):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank % per_host)}
        command = ["ip", "netns", "exec", names[rank // per_host], sys.executable, *arguments]
        processes.append(subprocess.Popen(command, env=environment))

    def end(*_: object) -> None:
        for process in processes:
            process.terminate()

    signal.signal(signal.SIGTERM, end)
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(_launch(sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
