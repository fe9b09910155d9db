"""Differences between operating systems, their limits, and the errors that name them."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from functools import cache

from meshdist import core
from meshdist.errors import DistBackendError, DistError

# Keeps a descriptor from programs that are started; on Windows they never inherit one.
CLOSE_ON_EXEC: int = getattr(os, "O_CLOEXEC", 0)

# With NumPy and this package it is 20 MiB of its own; a little program, or a fork, takes less.
_LEAST_OF_A_PROCESS = 8 << 20
_CACHES = "/sys/devices/system/cpu/cpu0/cache"
_NO_PROCESSES = (
    "ranks that are processes need Linux or macOS; on Windows, run them as threads, meshdist.run(fn, world_size), or"
    " use the Windows Subsystem for Linux"
)


def temporary_directory() -> str:
    """Return `tempfile.gettempdir()`; if that is /tmp, without importing `tempfile`, which takes 4 ms."""
    is_set = any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    if not is_set and sys.platform == "linux" and os.access("/tmp", os.R_OK | os.W_OK | os.X_OK):
        return "/tmp"
    import tempfile

    return tempfile.gettempdir()


if sys.platform == "win32":
    KILL = signal.SIGTERM  # on Windows it ends a process at once

    def let_others_run() -> None:
        """Yield the processor to another thread."""
        time.sleep(0)
else:
    KILL = signal.SIGKILL
    let_others_run = os.sched_yield if core.module is None else core.module.yield_processor


def user_id() -> int:
    """Return the user's id; on Windows 0, the owner of every file there."""
    if sys.platform == "win32":
        return 0
    return os.geteuid()


def why_no_processes() -> str | None:
    """Return why ranks cannot be processes on this system; None if they can."""
    return _NO_PROCESSES if sys.platform == "win32" else None


def check_processes(where: str) -> None:
    """Raise DistError with the prefix `where` if ranks cannot be processes on this system."""
    why = why_no_processes()
    if why is not None:
        raise DistError(why, error_prefix=where)


def check_num_processes(num_ranks: int, prefix: str = "") -> None:
    """Raise ValueError if this host does not have the memory for so many processes of Python.

    Most likely the number is a typing error; starting them one by one would bring the host down before one fails.
    """
    if sys.platform == "win32":  # there are no ranks that are processes
        return
    try:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not known on this system
        return
    needed = num_ranks * _LEAST_OF_A_PROCESS
    if needed > available > 0:
        raise ValueError(
            f"{prefix}{num_ranks} processes take at least {needed / 2**30:,.0f} GiB of memory, and this host has"
            f" {available / 2**30:,.0f} GiB"
        )


def cores() -> set[int]:
    """Return the processors that this process may run on; all where that is not known."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def available_cores() -> int:
    return len(cores())


@cache
def cache_bytes() -> int:
    """Return the size of the caches that processors of this host share, of all together; 0 where it is not known."""
    if sys.platform != "linux":
        return 0
    try:
        last = max(name for name in os.listdir(_CACHES) if name.startswith("index"))  # the largest
        with open(f"{_CACHES}/{last}/size") as file:
            size = file.read().strip()
        with open(f"{_CACHES}/{last}/shared_cpu_list") as file:
            num_sharing = sum(_length(part) for part in file.read().strip().split(","))
        kibibytes = int(size.removesuffix("K"))
    except (OSError, ValueError):
        return 0
    return (kibibytes << 10) * -(-(os.cpu_count() or 1) // num_sharing)


def _length(processors: str) -> int:
    """Return how many processors a part of a list, such as "0-7" or "3", names."""
    first, _, last = processors.partition("-")
    return int(last or first) - int(first) + 1


def local_world_size() -> int:
    """Return the number of ranks that the launcher started on this host; 1 if it does not say."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


def ranks_share_cores() -> bool:
    """Return whether the ranks of this host are more than its cores, as far as the launcher says.

    It does not ask for this rank's cores: ranks that are bound to cores of their own have few, and share none.
    """
    return local_world_size() > (os.cpu_count() or 1)


def num_preemptions() -> int:
    """Return how often this thread's core was given to another; 0 where that is not known."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def num_runnable() -> int:
    """Return how many threads of this host run or wait for a core; 0 where that is not known, as on a part of it."""
    if sys.platform != "linux" or available_cores() != os.cpu_count():
        return 0
    try:
        with open("/proc/loadavg") as file:
            running = file.read().split()[3]
        return int(running.split("/")[0])
    except (OSError, IndexError, ValueError):
        return 0


def ioctl(fd: int, request: int, argument: bytes) -> bytes:
    if sys.platform == "win32":
        raise OSError(errno.ENOSYS, "there is no ioctl on Windows")
    import fcntl

    return fcntl.ioctl(fd, request, argument)


def num_gpus() -> int:
    """Return how many CUDA GPUs a process started here sees, given CUDA_VISIBLE_DEVICES; 0 without a driver."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def parse_num_ranks(text: str) -> int:
    """Return the number of ranks of `--nproc-per-node`: a positive number, "cpu", "gpu", or "auto" (GPUs if any).

    Raises:
        ValueError: It is none of these, "gpu" on a host without GPUs, or more than the host has memory for.
    """
    if text == "cpu":
        return available_cores()
    if text == "auto":
        return num_gpus() or available_cores()
    if text == "gpu":
        found = num_gpus()
        if found == 0:
            raise ValueError("gpu: this host shows no CUDA GPU (driver missing, or hidden by CUDA_VISIBLE_DEVICES)")
        return found
    if text.isdecimal() and int(text) > 0:
        check_num_processes(int(text))
        return int(text)
    raise ValueError(f"expected a positive number, auto, cpu or gpu, got {text!r}")


_NO_FILES = (errno.EMFILE, errno.ENFILE)


def limit_of(error: BaseException) -> str:
    """Return the limit that caused an error, to append to its message; empty if no limit did."""
    if not isinstance(error, OSError) or error.errno not in _NO_FILES:
        return ""
    if sys.platform == "win32":  # has no such limit
        return ""
    import resource

    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"; no file descriptor is left: raise `ulimit -n`, which is {allowed}"


def at_limit(error: BaseException) -> BaseException:
    """Return an error that names the limit if one caused `error`, else `error` itself."""
    limit = limit_of(error)
    return DistBackendError(f"{error}{limit}") if limit else error


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raise DistError if the system allows no more threads."""
    try:
        thread.start()
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Ctrl-C while `start` waited
            raise error.__context__ from None
        raise DistError(
            f"{error}: no thread is left for {thread.name!r}; raise `ulimit -u`, or the container's limit of processes"
        ) from error
