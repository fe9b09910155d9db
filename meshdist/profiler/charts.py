"""Volumes as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshdist.profiler.accounting import Volume


def plot_volumes(volumes: dict[str, dict[str, Volume]], ax: Any = None) -> Any:
    """Draw a bar for each axis, in it the bytes that are sent inside and between hosts; see `Account.plot`."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("Account.plot draws with matplotlib; pip install matplotlib") from error
    from meshdist.profiler.tables import bytes_text

    ax = pyplot.subplots()[1] if ax is None else ax
    axes = list(volumes)
    inside = [sum(volume.inside for volume in volumes[axis].values()) for axis in axes]
    between = [sum(volume.between for volume in volumes[axis].values()) for axis in axes]
    ax.bar(axes, inside, label="inside hosts")
    ax.bar(axes, between, bottom=inside, label="between hosts")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda nbytes, _: bytes_text(nbytes))
    ax.set_xlabel("axis")
    ax.set_ylabel("bytes that this rank sends")
    ax.legend()
    return ax
