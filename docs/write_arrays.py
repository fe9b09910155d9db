"""Writes the table of NumPy's functions in tensor.md: `python docs/write_arrays.py`."""

import re
from pathlib import Path

from meshdist.tensor.dispatch import implemented_functions

PAGE = Path(__file__).parent / "tensor.md"
BEGIN, END = "<!-- functions: written by write_arrays.py -->", "<!-- end of functions -->"


def function_table() -> str:
    """Return the functions that work on DTensors, by NumPy's module."""
    by_module: dict[str, list[str]] = {}
    for name in implemented_functions():
        module, _, function = name.rpartition(".")
        by_module.setdefault(module, []).append(f"`{function}`")
    rows = [f"| `{module.replace('numpy', 'np')}` | {', '.join(names)} |" for module, names in by_module.items()]
    return "\n".join(["| | |", "| --- | --- |", *rows])


def written(text: str) -> str:
    """Return the page with its table as the code has it."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"{PAGE.name}: expected a table between {BEGIN} and {END}")
    return re.sub(f"{BEGIN}.*?{END}", f"{BEGIN}\n{function_table()}\n{END}", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
