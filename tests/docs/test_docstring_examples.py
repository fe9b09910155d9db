"""The examples of the API reference can be copied: they import what they use."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
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


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_public_examples_import_what_they_use(path):
    public = public_names()
    for owners, docstring in documented(ast.parse((ROOT / path).read_text())):
        if owners[0] in public and ">>>" in docstring:
            program = "".join(example.source for example in doctest.DocTestParser().get_examples(docstring))
            assert unknown_names(ast.parse(program)) == [], ".".join(owners)
