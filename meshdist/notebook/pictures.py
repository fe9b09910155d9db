"""What a cell draws with matplotlib on a worker, as files for the notebook; matplotlib itself is not imported here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from io import BytesIO

_PICTURES: ContextVar[list[bytes] | None] = ContextVar("pictures", default=None)


@contextmanager
def drawn_pictures() -> Iterator[list[bytes]]:
    """Give a list that has, after the block, the figures that it has shown or left open, as PNG files.

    They are closed. After an exception the figures that were open are closed, and not drawn.
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
    """Draw all open figures into the list of the block, and close them; where there is none, leave them open."""
    pyplot, pictures = sys.modules.get("matplotlib.pyplot"), _PICTURES.get()
    if pyplot is None or pictures is None:  # nothing was drawn, or a thread of the cell has called this
        return
    for number in pyplot.get_fignums():
        file = BytesIO()
        pyplot.figure(number).savefig(file, format="png", bbox_inches="tight")
        pyplot.close(number)
        pictures.append(file.getvalue())
