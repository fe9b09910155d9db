"""The values of a cell: the forms in which Jupyter shows one, and the variables that belong to the cell's world."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import islice
from types import ModuleType
from typing import Any

from meshdist.groups.process_group import ProcessGroup
from meshdist.mesh.device_mesh import DeviceMesh

# The methods that Jupyter calls, and the media type of the result.
_METHODS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_latex_": "text/latex",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_json_": "application/json",
}
# Of a list or another container, so many items are looked at.
_MOST_ITEMS = 64


def rich_forms(value: Any) -> dict[str, Any] | None:
    """Return the forms of `value` by media type, its repr as text/plain among them; None if the repr is all.

    As in Jupyter, classes have none, and a method that returns None does not count.
    """
    if isinstance(value, type):
        return None
    forms: dict[str, Any] = {}
    bundle = _called(value, "_repr_mimebundle_")
    if bundle is not None:
        forms |= bundle[0] if isinstance(bundle, tuple) else bundle  # with metadata, or without
    for method, media_type in _METHODS.items():
        form = _called(value, method)
        if form is not None:
            forms.setdefault(media_type, form[0] if isinstance(form, tuple) else form)
    if forms.keys() <= {"text/plain"}:
        return None
    return {"text/plain": repr(value), **forms}


def _called(value: Any, method: str) -> Any:
    # Looked up in the class, since objects with `__getattr__` may have any attribute.
    return getattr(value, method)() if callable(getattr(type(value), method, None)) else None


def drawn_figures(value: Any) -> list[Any] | None:
    """Return the matplotlib figures that `value` shows; None if it is nothing of matplotlib.

    It is a figure, axes, a line and so on, or a list, tuple or array of these, as the functions of pyplot return.
    """
    if "matplotlib" not in sys.modules:
        return None
    from matplotlib.artist import Artist
    from matplotlib.container import Container

    parts, figures = [value], {}
    if isinstance(value, (list, tuple)) or (type(value).__name__ == "ndarray" and value.dtype == object):
        parts = [part for each in value for part in (each if isinstance(each, (list, tuple, Container)) else [each])]
        parts = [item for part in parts for item in (part.ravel() if hasattr(part, "ravel") else [part])]
    for part in parts:
        if not isinstance(part, (Artist, Container)):
            return None
        figure = part.get_figure() if isinstance(part, Artist) else None
        if figure is not None:
            figures[id(figure)] = figure
    return list(figures.values()) if parts else None


def variables_of_the_world(variables: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the variables that are groups, meshes or arrays over a mesh, or hold some.

    What is hidden deeper is not found; its first use raises, and says that its world has ended.
    """
    module = sys.modules.get("meshdist.tensor.dtensor")  # imported by programs that use it
    kinds = (ProcessGroup, DeviceMesh, *([] if module is None else [module.DTensor]))
    return tuple(
        name
        for name, value in variables.items()
        if not name.startswith("_") and any(isinstance(one, kinds) for one in (value, *_held_by(value)))
    )


def _held_by(value: Any) -> list[Any]:
    """Return the items of a container, or the attributes of an object that is no module and no class."""
    if isinstance(value, (ModuleType, type)):
        return []
    if type(value) in (list, tuple, set):
        return list(islice(value, _MOST_ITEMS))
    held = value if type(value) is dict else getattr(value, "__dict__", {})
    return list(islice(held.values(), _MOST_ITEMS)) if type(held) is dict else []
