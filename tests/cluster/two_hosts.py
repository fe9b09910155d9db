"""Two network namespaces with a cable between them, which stand for two hosts."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MESHRUN = [sys.executable, "-m", "meshdist.launch.meshrun"]


class TwoHosts:
    """Start processes in one of two namespaces; host 0 has the address `addresses[0]`."""

    addresses = ("10.213.77.1", "10.213.77.2")

    def __init__(self):
        tag = uuid.uuid4().hex[:6]
        self.names = [f"meshdist-{tag}-{index}" for index in range(2)]
        self.links = [f"md{tag}{index}" for index in range(2)]
        self.processes = []

    def build(self):
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = self.links
        ip("link", "add", first, "netns", self.names[0], "type", "veth", "peer", second, "netns", self.names[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")

    def start(self, host, command, cwd, **variables):
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command],
            cwd=cwd,
            env=clean_environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def cut(self):
        ip("-n", self.names[0], "link", "set", self.links[0], "down")

    def vanish(self):
        """Cut the cable as if behind a router: the kernel drops packets without telling that it finds no neighbour."""
        for name, link, other in zip(self.names, self.links, reversed(self.addresses), strict=True):
            ip("-n", name, "neigh", "change", other, "dev", link, "nud", "permanent")
        self.cut()

    def remove(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
        self.remove_link()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def remove_link(self):
        """Do nothing: the cable goes with the namespaces."""


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PermissionError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def clean_environment(**variables):
    """Return this process's environment without what a launcher would set, and with meshdist to import."""
    launchers = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "OMPI_", "PMI", "SLURM_", "JOB_", "MESHDIST_", "MPI_LOCAL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    path = os.pathsep.join([os.path.dirname(sys.executable), kept.get("PATH", "")])
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), **variables}


def make_two_hosts():
    """Return them, or skip the test where this is not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip (iproute2)")
    hosts = TwoHosts()
    try:
        hosts.build()
    except PermissionError as error:
        hosts.remove()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    return hosts
