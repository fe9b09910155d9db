"""A link of a machine: how long a message takes to cross it, and how many bytes per second."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Say how fast a connection is, each way: `latency_s + nbytes / bandwidth` seconds for a message.

    Args:
        latency_s: Seconds until the first byte is there.
        bandwidth: Bytes per second.

    Raises:
        ValueError: A latency below 0, or a bandwidth of 0 or less.
        TypeError: One of them is no number.

    Example:
        >>> Link(latency_s=5e-6, bandwidth=12.5e9).seconds(125_000_000)
        0.010005
        >>> print(Link(5e-6, 12.5e9))
        12.5 GB/s, 5 us
    """

    latency_s: float
    bandwidth: float

    def __post_init__(self) -> None:
        for name, value in (("latency_s", self.latency_s), ("bandwidth", self.bandwidth)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Link: {name} must be a number, got {value!r} ({type(value).__name__})")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"Link: latency_s must be 0 or a positive number of seconds, got {self.latency_s}")
        if not self.bandwidth > 0:
            raise ValueError(f"Link: bandwidth must be a positive number of bytes per second, got {self.bandwidth}")

    def seconds(self, nbytes: float) -> float:
        """Return how long a message of `nbytes` bytes takes that has the link to itself."""
        return self.latency_s + nbytes / self.bandwidth

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:.3g} GB/s, {self.latency_s * 1e6:.3g} us"


# Where nothing is said or measured. Orders of magnitude of common machines, good enough to compare arrangements.
MEMORY = Link(1e-6, 50e9)
SOCKET_LINK = Link(0.3e-6, 40e9)
GPU_LINK = Link(2e-6, 25e9)
NETWORK = Link(5e-6, 12.5e9)
