"""Check this machine: shared memory, limits, processors."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from meshdist import core
from meshdist._version import __version__
from meshdist.backends.gloo.shm.single_copy import Memory, address_of, may_copy
from meshdist.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from meshdist.system.platform import available_cores, local_world_size, why_no_processes
from meshdist.system.variables import unknown_variables

_MIB = 1 << 20
_FEWEST_FILES = 1024
_FEWEST_PROCESSES = 4096
_LEAST_SHM = 64 * _MIB


def versions() -> Iterator[Finding]:
    text = f"meshdist {__version__}, NumPy {np.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield Finding("versions", OK, text)
    if core.module is not None or sys.platform != "linux":
        yield Finding("compiled core", OK, core.status())
    else:
        remedy = "" if os.environ.get(core.VARIABLE) == "python" else "install meshdist where there is a C compiler"
        yield Finding("compiled core", NOTE, f"{core.status()}: calls of few bytes take several times as long", remedy)
    why_not = why_no_processes()
    if why_not is not None:
        yield Finding("system", ERROR, why_not, "use meshdist.run here")
    elif sys.platform != "linux":
        text = (
            f"{sys.platform}: jobs on one host only; the gloo backend has never been run here, and between hosts it"
            " needs Linux"
        )
        yield Finding("system", WARNING, text, "compare results with meshdist.run, whose ranks are threads")


def variables() -> Iterator[Finding]:
    for name, meant in unknown_variables().items():
        remedy = "see docs/variables.md" if meant is None else f"did you mean {meant}?"
        yield Finding("environment", WARNING, f"{name} is unknown, and ignored", remedy)


def processors() -> Iterator[Finding]:
    count = available_cores()
    ranks = local_world_size()
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0)
    if ranks > count:
        yield Finding(
            "processors",
            WARNING,
            f"{count} available for {ranks} ranks, which have to share them",
            f"start at most {count} ranks per host (--nproc-per-node)",
        )
    elif threads * ranks > count:
        yield Finding(
            "processors",
            WARNING,
            f"{count} available for {ranks} ranks with {threads} threads each (OMP_NUM_THREADS)",
            f"set OMP_NUM_THREADS={max(1, count // ranks)}",
        )
    else:
        yield Finding("processors", OK, f"{count} available to this process")


def shared_memory() -> Iterator[Finding]:
    """Check memfd_create, else the space in /dev/shm; other systems use files."""
    if sys.platform != "linux":
        if sys.platform != "win32":
            yield Finding("shared memory", OK, f"files in {tempfile.gettempdir()}, removed when all have mapped them")
        return
    space = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    free = space.f_bavail * space.f_frsize if space is not None else 0
    try:
        with open(os.memfd_create("meshdist-doctor"), "wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, _MIB)
        yield Finding("shared memory", OK, "memfd_create works; /dev/shm is not needed")
        return
    except (OSError, AttributeError) as error:
        why = (
            f"memfd_create does not work here ({error}); files in /dev/shm are used, {free // _MIB} MiB are free there"
        )
    if free < _LEAST_SHM:
        yield Finding("shared memory", ERROR, why, "start the container with --shm-size=1g, or allow memfd_create")
    else:
        yield Finding("shared memory", WARNING, why, "allow memfd_create in the sandbox or container")


def single_copy() -> Iterator[Finding]:
    """Check access to the memory of a peer (Linux only)."""
    if sys.platform != "linux":
        return
    if not may_copy():
        yield Finding("process_vm_readv", NOTE, "forbidden by MESHDIST_SINGLE_COPY=0: large arrays are copied twice")
        return
    source, target = np.arange(8), np.zeros(8, dtype=int)
    remedy = "in a container: --cap-add=SYS_PTRACE, or a seccomp profile that allows process_vm_readv"
    here = Memory(os.getpid(), "this process")
    if not here.try_read(address_of(source), target) or not np.array_equal(source, target):
        yield Finding("process_vm_readv", WARNING, "does not work here: large arrays are copied twice", remedy)
        return
    if not here.try_write(address_of(target), source):
        yield Finding("process_vm_writev", NOTE, "does not work here: only the receiver copies a large array")
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = yama.read_text().strip() if yama.exists() else "0"
    if scope in ("2", "3") and os.geteuid() != 0:
        text = f"kernel.yama.ptrace_scope is {scope}, which forbids it between ranks: large arrays are copied twice"
        yield Finding("process_vm_readv", WARNING, text, "sysctl kernel.yama.ptrace_scope=1")
    else:
        yield Finding("process_vm_readv", OK, "works: large arrays are copied once")


def watching() -> Iterator[Finding]:
    """Check how the end of a peer is noticed."""
    if sys.platform != "linux":
        return
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        text = f"does not work here ({error}): the end of a rank is looked up in /proc"
        yield Finding("pidfd_open", NOTE, text)
    else:
        yield Finding("pidfd_open", OK, "works: the end of a rank is noticed at once")


def limits() -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    import resource

    yield _limit("open files", resource.RLIMIT_NOFILE, _FEWEST_FILES, "ulimit -n 65536, or LimitNOFILE= of the service")
    if sys.platform == "linux":
        yield _limit("processes and threads", resource.RLIMIT_NPROC, _FEWEST_PROCESSES, "ulimit -u 65536")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked == resource.RLIM_INFINITY:
        yield Finding("locked memory", OK, "unlimited")
    else:
        text = f"at most {locked // 1024} KiB: enough for gloo; MPI and NCCL over InfiniBand need more"
        yield Finding("locked memory", NOTE, text, "ulimit -l unlimited, where these are used")


def _limit(name: str, number: int, fewest: int, remedy: str) -> Finding:
    if sys.platform == "win32":
        raise AssertionError("Windows has no such limits")
    import resource

    soft, hard = resource.getrlimit(number)
    if soft == resource.RLIM_INFINITY:
        return Finding(name, OK, "unlimited")
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    if soft < fewest:
        return Finding(name, WARNING, f"at most {soft} (hard limit {most})", remedy)
    return Finding(name, OK, f"at most {soft}")


def memory() -> Iterator[Finding]:
    """Report the memory limit of the control group."""
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        text = path.read_text().strip() if path.exists() else "max"
        if text.isdigit() and int(text) < 1 << 50:
            yield Finding("memory", OK, f"{int(text) // _MIB} MiB, the limit of the control group; all ranks share it")
            return
    if sys.platform == "linux":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        yield Finding("memory", OK, f"{pages // _MIB} MiB")


def clock() -> Iterator[Finding]:
    path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if not path.exists():
        return
    source = path.read_text().strip()
    if source in ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"):
        yield Finding("clock", OK, source)
    else:
        text = f"{source}, read by a system call: every call takes a microsecond more"
        yield Finding("clock", WARNING, text, "boot with clocksource=tsc, where the processor has a steady one")


CHECKS = (versions, variables, processors, memory, shared_memory, single_copy, watching, limits, clock)
