"""Draw a mesh: one grid of its ranks as text, as HTML or with matplotlib."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from meshdist.mesh.show.grid import grid_of
from meshdist.mesh.show.html import as_html
from meshdist.mesh.show.text import as_text
from meshdist.system.terminal import terminal_width

if TYPE_CHECKING:
    from meshdist.mesh.layout.layout import Layout
    from meshdist.mesh.mesh_state import MeshHosts

FORMS = ("text", "html", "plot")
# Whether the calling rank stands out, in drawings of arrays as well. Of the workers of a notebook, equal drawings are
# shown once.
marks_me = True


def show(layout: Layout, hosts: MeshHosts | None, form: str | None, axis: int | str | None, ax: Any) -> Any:
    if form == "matplotlib":
        form = "plot"
    if form is not None and form not in FORMS:
        raise ValueError(f"DeviceMesh.show: form must be one of {', '.join(map(repr, FORMS))} or None, got {form!r}")
    if ax is not None and form != "plot":
        raise ValueError("DeviceMesh.show: ax needs form='plot'; pass both")
    is_text = form == "text" or (form is None and not in_notebook())
    width = terminal_width() if is_text else 0
    grid = grid_of(layout, hosts, axis, marks_me=marks_me, width=width)
    if is_text:
        print(as_text(grid, width) + "\n", end="")  # in one piece, as other ranks may be threads
        return None
    if form == "plot":
        from meshdist.mesh.show.plot import as_plot

        return as_plot(grid, ax)
    if form == "html":
        return as_html(grid)
    from IPython.display import HTML, display

    display(HTML(as_html(grid)))
    return None


def in_notebook() -> bool:
    # Outside notebooks IPython need not be installed.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
