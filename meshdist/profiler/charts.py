"""Volumes as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshdist.profiler.accounting import Volume

# Of the highest bar, so that what is written above it stays inside the frame.
_HEADROOM = 1.15
_MOST_STEPS = 6


def plot_volumes(volumes: dict[str, dict[str, Volume]], ax: Any = None) -> Any:
    """Draw a bar for each axis, in it the bytes that are sent inside and between hosts; see `Account.plot`."""
    try:
        from matplotlib import pyplot
        from matplotlib.ticker import MultipleLocator
    except ImportError as error:
        raise ImportError("Account.plot draws with matplotlib; pip install matplotlib") from error
    from meshdist.profiler.tables import bytes_text, short_bytes_text

    axes = list(volumes)
    if ax is None:
        ax = pyplot.subplots(figsize=(max(6.4, 1.2 + 0.9 * len(axes)), 4.8), layout="constrained")[1]
    inside = [sum(volume.inside for volume in volumes[axis].values()) for axis in axes]
    between = [sum(volume.between for volume in volumes[axis].values()) for axis in axes]
    sums = [one + other for one, other in zip(inside, between, strict=True)]
    highest = max(sums, default=0)
    ax.bar(axes, inside, label="inside hosts")
    bars = ax.bar(axes, between, bottom=inside, label="between hosts")
    # The sum of both; beside a large bar a small one is not to be seen, and its number is.
    ax.bar_label(bars, labels=[bytes_text(nbytes) for nbytes in sums], padding=2, fontsize="small")
    ax.set_ylim(0, _HEADROOM * highest if highest else 1)
    ax.yaxis.set_major_locator(MultipleLocator(binary_step(highest)))
    ax.yaxis.set_major_formatter(lambda nbytes, _: short_bytes_text(nbytes))
    ax.set_xlabel("axis")
    ax.set_ylabel("bytes that this rank sends")
    ax.legend()
    return ax


def binary_step(highest: int) -> int:
    """Return the distance of ticks up to `highest` bytes: the least power of two with which they are few.

    Example:
        >>> binary_step(0), binary_step(100), binary_step(7 << 20) == 2 << 20
        (1, 32, True)
    """
    step = 1
    while highest > _MOST_STEPS * step:
        step *= 2
    return step
