"""How a process ended, in words."""

from __future__ import annotations

import signal

INTERRUPT_BASE = 128


def describe_status(status: int) -> str:
    """Return how a process ended, from its exit status or minus the number of a signal.

    Example:
        >>> describe_status(3), describe_status(-9)
        ('exited with status 3', 'was killed by SIGKILL')
    """
    if status < 0:
        return f"was killed by {signal_name(-status)}"
    return f"exited with status {status}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shell_status(status: int) -> int:
    """Return the exit status of a program that passes on how a process of its own ended: 128 + signal, as shells do."""
    return INTERRUPT_BASE - status if status < 0 else status
