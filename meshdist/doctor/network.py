"""Check the network of this machine, and the job's environment."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from meshdist.cluster.place import DEFAULT_PORT
from meshdist.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from meshdist.security.credentials import secret_from_environment, tls_files_from_environment
from meshdist.security.encryption import encryption_from_environment
from meshdist.system.platform import ioctl

_SIOCGIFADDR = 0x8915
_FEWEST_PORTS = 5000


def interfaces() -> dict[str, str]:
    """Return the IPv4 addresses of the network interfaces, by name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def addresses_elsewhere() -> dict[str, str]:
    """Return the addresses, by interface, that other hosts may reach."""
    return {name: address for name, address in interfaces().items() if not address.startswith("127.")}


def network_interfaces() -> Iterator[Finding]:
    found = addresses_elsewhere()
    if found:
        text = ", ".join(f"{name} {address}" for name, address in found.items())
        yield Finding("interfaces", OK, text)
    else:
        text = "only loopback: jobs can run on this host alone"
        yield Finding("interfaces", NOTE, text, "bring one up, or use --network host, for jobs on several hosts")


def host_name() -> Iterator[Finding]:
    """Check whether the name of this host resolves to an address that other hosts reach."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        text = f"{name} has no address ({error})"
        yield Finding("host name", WARNING, text, "add it to /etc/hosts or DNS, or give addresses in MASTER_ADDR")
        return
    if address.startswith("127.") and addresses_elsewhere():
        own = next(iter(addresses_elsewhere().values()))
        text = f"{name} is {address} here, which other hosts cannot reach"
        yield Finding("host name", NOTE, text, f"for several hosts, set MASTER_ADDR={own}, or correct /etc/hosts")
    else:
        yield Finding("host name", OK, f"{name} is {address}")


def ports() -> Iterator[Finding]:
    """Check that the store's port is free, and the range of ports for connections."""
    if "WORLD_SIZE" not in os.environ:  # in a job, its store uses the port
        port = int(os.environ.get("MASTER_PORT") or DEFAULT_PORT)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
                yield Finding("store's port", OK, f"{port} is free")
            except OSError as error:
                text = f"{port} cannot be used: {error}"
                yield Finding("store's port", WARNING, text, "set MASTER_PORT to another, or use meshrun --standalone")
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if path.exists():
        low, high = map(int, path.read_text().split())
        if high - low < _FEWEST_PORTS:
            remedy = 'sysctl net.ipv4.ip_local_port_range="32768 60999"'
            yield Finding("ports for connections", WARNING, f"only {high - low + 1}, {low} to {high}", remedy)
        else:
            yield Finding("ports for connections", OK, f"{low} to {high}")


def secret() -> Iterator[Finding]:
    try:
        found = secret_from_environment()
    except ValueError as error:
        yield Finding("secret", ERROR, str(error))
        return
    if found:
        yield Finding("secret", OK, "the environment has one")
    else:
        text = "none: ranks started by hand connect on loopback only"
        yield Finding("secret", NOTE, text, "meshrun and spawn make one; by hand, set MESHDIST_SECRET on all ranks")


def encryption() -> Iterator[Finding]:
    """Check what connections to other hosts are encrypted with."""
    try:
        has_secret = bool(secret_from_environment())
        found = encryption_from_environment(secret_from_environment())
    except ValueError as error:
        yield Finding("encryption", ERROR, str(error))
        return
    files = tls_files_from_environment()
    if files is not None:
        yield Finding("encryption", OK, f"TLS 1.3 on all connections, with the certificate {files.certificate}")
    elif found.is_on:
        yield Finding("encryption", OK, f"TLS 1.3 between hosts ({found.mode})")
    elif has_secret:
        yield Finding("encryption", NOTE, f"none ({found.mode}): use it only on a network that you trust")


CHECKS = (network_interfaces, host_name, ports, secret, encryption)
