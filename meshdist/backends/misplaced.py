"""misplaced: whether a backend is for ranks of this kind, processes or threads; known before any rank is met."""

from __future__ import annotations

from meshdist.backends.device_backends import by_device

FOR_THREADS = "threads"
"""The one backend whose ranks are threads of one process."""


def misplaced(backend: str, *, ranks_are_threads: bool) -> str | None:
    """Return why the ranks cannot use a backend, or one of several; None where they can.

    Args:
        backend: The backends, as `backend_name` spells them.
        ranks_are_threads: Whether a rank is a thread of `meshdist.run`, or a process.

    Example:
        >>> misplaced("gloo", ranks_are_threads=False) is None
        True
        >>> misplaced("threads", ranks_are_threads=False)
        "backend 'threads' is for ranks that are threads of meshdist.run; for processes use 'gloo'"
    """
    names = set(by_device(backend).values())
    if FOR_THREADS in names and not ranks_are_threads:
        return f"backend {FOR_THREADS!r} is for ranks that are threads of meshdist.run; for processes use 'gloo'"
    return None
