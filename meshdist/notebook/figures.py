"""The matplotlib backend of workers: `pyplot.show()` sends the open figures to the notebook."""

from __future__ import annotations

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from meshdist.notebook.cell_worker import draw_figures


class FigureManager(FigureManagerBase):
    """Lets pyplot show figures."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """Send the open figures to the notebook, and close them."""
        draw_figures()


class FigureCanvas(FigureCanvasAgg):
    """Draws a figure into memory."""

    manager_class = FigureManager
