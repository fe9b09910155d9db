"""Makes the tables of the API reference: the functions of a page, and the methods of groups and meshes."""

import importlib
import inspect
import re
from typing import Any

import meshdist
from meshdist.collectives import methods

MARK = "<!-- the collectives as methods -->"
FUNCTIONS_MARK = "<!-- the functions of this page -->"
# What methods do not take: their group is that of the object.
_OF_FLAT_FUNCTIONS = ("group", "group_src", "group_dst")


def method_table() -> str:
    """Return a table of all collectives and messages as methods, each with the first line of its docstring."""
    rows = [f"   * - {_link(name)}\n     - {_first_line(getattr(meshdist, name))}" for name in methods.__all__]
    head = ".. list-table::\n   :header-rows: 1\n   :widths: 55 45\n\n   * - method\n     -\n"
    return "```{eval-rst}\n" + head + "\n".join(rows) + "\n```"


def function_table(page: str) -> str:
    """Return a table of the functions that a page documents, each with the first line of its docstring."""
    names = re.findall(r"^\.\. autofunction:: ([\w.]+)$", page, re.MULTILINE)
    rows = [f"   * - :func:`{_short(name)} <{_full(name)}>`\n     - {_first_line(_thing(name))}" for name in names]
    return "```{eval-rst}\n.. list-table::\n   :widths: 30 70\n\n" + "\n".join(rows) + "\n```"


def _full(name: str) -> str:
    return name if name.startswith("meshdist.") else f"meshdist.{name}"


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _thing(name: str) -> Any:
    return getattr(importlib.import_module(_full(name).rpartition(".")[0]), _short(name))


def _link(name: str) -> str:
    parameters = inspect.signature(getattr(meshdist, name)).parameters.values()
    taken = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    taken = [parameter for parameter in taken if parameter.name not in _OF_FLAT_FUNCTIONS]
    words = ", ".join(_as_written(parameter) for parameter in taken)
    return f":func:`{name}({words}) <meshdist.{name}>`"


def _as_written(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is inspect.Parameter.empty:
        return str(parameter)
    shown = str(default) if isinstance(default, meshdist.ReduceOp) else repr(default)
    return f"{parameter.name}={shown}"


def _first_line(function: Any) -> str:
    return (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")


def complete(app: Any, name: str, content: list[str]) -> None:
    """Put the tables in place of their marks: the event "source-read" of Sphinx."""
    if FUNCTIONS_MARK in content[0]:
        content[0] = content[0].replace(FUNCTIONS_MARK, function_table(content[0]))
    if MARK in content[0]:
        content[0] = content[0].replace(MARK, method_table())
