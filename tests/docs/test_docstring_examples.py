"""Examples in docstrings give what they show, and those of the API reference import what they use."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import io
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "meshdist"
PUBLIC = ("meshdist", "meshdist.tensor", "meshdist.parallel", "meshdist.checkpoint", "meshdist.topology")


def public_names():
    return {name for module in PUBLIC for name in importlib.import_module(module).__all__}


def documented(tree, owners=()):
    """Yield the docstrings of what a module defines, and the names that lead there."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield (*owners, node.name), ast.get_docstring(node) or ""
            yield from documented(node, (*owners, node.name))


def unknown_names(program):
    known, used = {*dir(builtins), "__name__"}, set()
    for node in ast.walk(program):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            known |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.ExceptHandler):
            known.add(node.name)
        elif isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else known).add(node.id)
    return sorted(used - known)


WITH_EXAMPLES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if ">>>" in path.read_text())


# The libraries that packages of meshdist need; None where their pages have tests, as importing them takes seconds.
LIBRARY_OF = {"autograd": "autograd", "dask": None, "ray": None, "torch": None}


@pytest.mark.parametrize("path", [path for path in WITH_EXAMPLES if LIBRARY_OF.get(path.parts[0], "numpy")], ids=str)
def test_examples_give_what_they_show(path):
    library = LIBRARY_OF.get(path.parts[0], "numpy")
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    module = importlib.import_module(".".join(["meshdist", *path.with_suffix("").parts]))
    parser, runner, differences = doctest.DocTestParser(), doctest.DocTestRunner(), io.StringIO()
    # Not doctest.DocTestFinder, which passes over functions whose decorator is of another module.
    tree = ast.parse((ROOT / path).read_text())
    for owners, docstring in [((), ast.get_docstring(tree) or ""), *documented(tree)]:
        if ">>>" in docstring:
            examples = parser.get_doctest(docstring, vars(module).copy(), ".".join(owners), str(path), 0)
            runner.run(examples, out=differences.write)
    assert runner.tries > 0
    assert differences.getvalue() == ""


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_public_examples_import_what_they_use(path):
    public = public_names()
    for owners, docstring in documented(ast.parse((ROOT / path).read_text())):
        if owners[0] in public and ">>>" in docstring:
            program = "".join(example.source for example in doctest.DocTestParser().get_examples(docstring))
            assert unknown_names(ast.parse(program)) == [], ".".join(owners)
