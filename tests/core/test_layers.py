"""What import-linter cannot say of the layers: nothing below the tools imports the facade."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import meshdist

PACKAGE = Path(meshdist.__file__).parent
TOOLS = ("bench", "doctor", "launch", "notebook")
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in TOOLS]
FACADE = re.compile(r"^\s*(import\s.*|from\s+)meshdist\b(?!\.)", re.MULTILINE)  # what may import it


def imports_facade(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name == "meshdist" for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.module == "meshdist":
        return any(find_spec(f"meshdist.{alias.name}") is None for alias in node.names)
    return False


def test_no_layer_imports_the_facade() -> None:
    programs = [PACKAGE / "topology" / "__main__.py"]
    texts = {path: path.read_text() for path in FILES}
    may = {path: text for path, text in texts.items() if FACADE.search(text)}
    importing = [path for path, text in may.items() if any(map(imports_facade, ast.walk(ast.parse(text))))]
    assert importing == programs


def test_the_root_has_few_modules() -> None:
    modules = [path.name for path in PACKAGE.glob("*.py")]
    assert len(modules) <= 9, modules


def test_file_names_are_unique_but_for_the_same_role_in_several_backends() -> None:
    names = [path.name for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert len({name for name in names if names.count(name) > 1}) <= 12


@pytest.mark.parametrize("name", ["device_mesh", "functional", "errors", "store", "topology"])
def test_public_modules_stay(name: str) -> None:
    assert find_spec(f"meshdist.{name}") is not None
