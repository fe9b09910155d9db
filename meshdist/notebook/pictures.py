"""Collect the matplotlib figures of a cell on a worker, as files for the notebook, without importing matplotlib."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from io import BytesIO

_PICTURES: ContextVar[list[bytes] | None] = ContextVar("pictures", default=None)


@contextmanager
def drawn_pictures() -> Iterator[list[bytes]]:
    """Yield a list that contains, after the block, the figures that it has shown or left open, as PNG files.

    The figures are closed. After an exception, open figures are closed without being drawn.
    """
    pictures: list[bytes] = []
    token = _PICTURES.set(pictures)
    try:
        yield pictures
        draw_figures()
    finally:
        _PICTURES.reset(token)
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:
            pyplot.close("all")


def draw_figures() -> None:
    """Draw all open figures into the list of the block, and close them; without a list, leave them open."""
    pyplot, pictures = sys.modules.get("matplotlib.pyplot"), _PICTURES.get()
    if pyplot is None or pictures is None:  # no figures, or called from a thread of the cell
        return
    for number in pyplot.get_fignums():
        file = BytesIO()
        pyplot.figure(number).savefig(file, format="png", bbox_inches="tight")
        pyplot.close(number)
        pictures.append(file.getvalue())
